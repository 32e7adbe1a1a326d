// Elements for the messages of a chat.

import {bytes, copyButton, digits, make, plural, seconds} from "./dom.js";
import {sizeOf} from "./files.js";
import {show} from "./markdown.js";

/** Create the list item of a question. */
export function questionItem(message) {
  const files = (message.files || []).map(file => make("details", {class: "file"},
    make("summary", {}, file.name, " ", make("span", {class: "quiet"}, bytes(sizeOf(file)))),
    make("pre", {tabindex: 0}, file.text ?? "a picture or sound")));
  return make("li", {class: "question"}, make("h3", {class: "unseen"}, "You asked"), ...files,
    message.content ? make("p", {}, message.content) : null, make("div", {class: "foot"}));
}

/** Create the list item of an answer, which may be incomplete. */
export function answerItem(message) {
  const item = make("li", {class: "answer"}, make("h3", {class: "unseen"}, "Answer"),
    make("details", {class: "thoughts", hidden: ""}, make("summary", {}, "Thoughts"), make("div", {class: "text"})),
    make("div", {class: "text"}), make("p", {class: "wrong"}),
    make("div", {class: "foot"}, make("span", {class: "figures"})));
  showAnswer(item, message, false);
  return item;
}

/** Show the current state of an answer. `waits`: no token has arrived yet. */
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

/** Replace the buttons under a message. */
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
    first_s !== undefined ? `first token after ${seconds(first_s)}` : null,
    prompt !== undefined ? `prompt ${plural(prompt, "token")}${cached ? `, ${cached} of them cached` : ""}` : null,
    message.note,
  ].filter(Boolean).join(" \u00b7 ");
}
