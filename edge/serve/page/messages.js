// How the messages of a chat look.

import {bytes, copyButton, digits, make, plural, seconds} from "./dom.js";
import {sizeOf} from "./files.js";
import {show} from "./markdown.js";

/** The item of a question. */
export function questionItem(message) {
  const files = (message.files || []).map(file => make("details", {class: "file"},
    make("summary", {}, file.name, " ", make("span", {class: "quiet"}, bytes(sizeOf(file)))),
    make("pre", {tabindex: 0}, file.text ?? "a picture or sound")));
  return make("li", {class: "question"}, make("h3", {class: "unseen"}, "You asked"), ...files,
    message.content ? make("p", {}, message.content) : null, make("div", {class: "foot"}));
}

/** The item of an answer, as far as there is one. */
export function answerItem(message) {
  const item = make("li", {class: "answer"}, make("h3", {class: "unseen"}, "Answer"),
    make("details", {class: "thoughts", hidden: ""}, make("summary", {}, "Thoughts"), make("div", {class: "text"})),
    make("div", {class: "text"}), make("p", {class: "wrong"}),
    make("div", {class: "foot"}, make("span", {class: "figures"})));
  showAnswer(item, message, false);
  return item;
}

/** Show an answer as it is now; `waits` while its first token has not come. */
export function showAnswer(item, message, waits) {
  const {thoughts, content: text} = message;
  const [thinking, answer, wrong] = [item.children[1], item.children[2], item.children[3]];
  thinking.hidden = !thoughts;
  if (thoughts) show(thinking.lastChild, thoughts);
  thinking.firstChild.textContent = text || message.figures?.prompt !== undefined ? "Thoughts" : "Thinking\u2026";
  show(answer, text);
  wrong.textContent = message.error || "";
  item.classList.toggle("waits", waits);
  item.querySelector(".figures").textContent = figures(message, waits);
}

/** The buttons under a message: in the place of those it had. */
export function setButtons(item, ...buttons) {
  item.querySelectorAll(".foot button").forEach(one => one.remove());
  item.querySelector(".foot").append(...buttons);
}

export function copyAnswer(message) { return copyButton(() => message.content, "link"); }

function figures(message, waits) {
  const {tokens, first_s, rate, prompt, cached} = message.figures || {};
  if (waits) return "Reading the question\u2026";
  return [
    tokens !== undefined ? plural(tokens, "token") : null,
    rate ? `${digits(rate)} tokens/s` : null,
    first_s !== undefined ? `first after ${seconds(first_s)}` : null,
    prompt !== undefined ? `prompt ${plural(prompt, "token")}${cached ? `, ${cached} of them kept` : ""}` : null,
    message.note,
  ].filter(Boolean).join(" \u00b7 ");
}
