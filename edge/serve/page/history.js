// The list of conversations, with rename and delete.

import * as chats from "./chats.js";
import {$, button, iconButton, make} from "./dom.js";
import {closeHistory} from "./panels.js";

let view = null;      // the chat module
let renaming = null;  // id of the chat whose title is being edited

/** Install the event handlers. `chat`: module that opens chats. */
export function start(chat) {
  view = chat;
  $("new-chat").addEventListener("click", fresh);
  $("new-chat-narrow").addEventListener("click", fresh);
  $("clear").addEventListener("click", () => {
    if (!confirm("Delete all chats stored in this browser?")) return;
    chats.all().forEach(chats.forget);
    fresh();
  });
  addEventListener("storage", list);  // another tab has changed a chat
}

function fresh() {
  closeHistory();
  view.open(chats.fresh());
}

/** Show the conversations. */
export function list() {
  if (renaming) return;
  const stored = chats.all();
  $("clear").hidden = !stored.length;
  $("no-chats").hidden = stored.length > 0;
  $("chats").replaceChildren(...stored.map(item));
}

function item(chat) {
  const title = chats.title(chat);
  const opening = button(title, "title", () => { closeHistory(); view.open(chat); });
  if (view.isOpen(chat)) opening.setAttribute("aria-current", "true");
  const row = make("li", {}, opening,
    view.isAnswering(chat) ? make("span", {class: "dot", role: "img", "aria-label": "An answer is coming"}) : null,
    iconButton("pencil", `Rename ${title}`, () => rename(chat, row)),
    iconButton("bin", `Delete ${title}`, () => remove(chat)));
  return row;
}

function remove(chat) {
  if (!confirm(`Delete "${chats.title(chat)}"?`)) return;
  chats.forget(chat);
  view.forget(chat);
  list();
}

function rename(chat, row) {
  const field = make("input", {"aria-label": "Name of the chat", maxlength: 80});
  field.value = chats.title(chat);
  renaming = chat.id;
  const end = save => {
    if (!renaming) return;
    renaming = null;
    if (save) view.rename(chat, field.value.trim());
    list();
    $("chats").querySelector("[aria-current]")?.focus();
  };
  field.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  row.replaceChildren(field);
  field.select();
}
