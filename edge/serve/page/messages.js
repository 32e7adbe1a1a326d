// Elements for the messages of a chat.

import {bytes, digits, iconButton, make, plural, seconds} from "./dom.js";
import {sizeOf, thumbnail} from "./files.js";
import {show} from "./markdown.js";

/** Create the list item of a question. */
export function questionItem(message) {
  const files = (message.files || []).map(file => make("details", {class: "file"},
    make("summary", {}, thumbnail(file), file.name, " ", make("span", {class: "quiet"}, bytes(sizeOf(file)))),
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
  showAnswer(item, message, "");
  return item;
}

/** Show the current state of an answer. `status`: a text while it waits for the server, null while tokens arrive, or "". */
export function showAnswer(item, message, status) {
  const {thoughts, content: text} = message;
  const [thinking, answer, wrong] = [item.children[1], item.children[2], item.children[3]];
  thinking.hidden = !thoughts;
  if (thoughts) show(thinking.lastChild, thoughts);
  thinking.firstChild.textContent = text || message.figures?.prompt !== undefined ? "Thoughts" : "Thinking\u2026";
  show(answer, text);
  wrong.textContent = message.error || "";
  item.classList.toggle("waits", Boolean(status));
  item.querySelector(".figures").textContent = status || figures(message, status === null);
}

/** Replace the buttons under a message. Null stands for no button. */
export function setActions(item, ...buttons) {
  const foot = item.querySelector(".foot");
  foot.querySelectorAll(":scope > :not(.figures)").forEach(one => one.remove());
  foot.append(...buttons.filter(Boolean));
}

/** Create the arrows between the versions of a message. `choose`: called with a version; null: arrows are disabled. */
export function versionButtons(versions, message, choose) {
  if (versions.length < 2) return null;
  const at = versions.indexOf(message);
  const arrow = (icon, name, to) => {
    const element = iconButton(icon, name, () => choose(to));
    element.disabled = !choose || !to;
    return element;
  };
  return make("span", {class: "versions", role: "group", "aria-label": "Versions"},
    arrow("left", "Earlier version", versions[at - 1]), make("span", {}, `${at + 1} of ${versions.length}`),
    arrow("right", "Later version", versions[at + 1]));
}

function figures(message, isComing) {
  const {tokens, first_s, rate, prompt, cached, total_s} = message.figures || {};
  return [
    tokens ? plural(tokens, "token") : null,
    total_s !== undefined ? `in ${seconds(total_s)}` : null,
    rate ? `${digits(rate)} tokens/s` : null,
    first_s !== undefined ? `first token after ${seconds(first_s)}` : null,
    prompt !== undefined ? `prompt ${plural(prompt, "token")}${cached ? `, ${cached} of them cached` : ""}` : null,
    isComing ? null : message.partial ? "interrupted" : message.note,
  ].filter(Boolean).join(" \u00b7 ");
}
