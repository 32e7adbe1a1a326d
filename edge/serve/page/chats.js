// Chats and settings stored in this browser. Each has its own entry, so that tabs do not overwrite each other's chats.

import {mend} from "./branches.js";

const PREFIX = "edge.chat.", SETTINGS = "edge.settings", CURRENT = "edge.current";
const forgotten = new Set();  // ids of deleted chats, which a running answer must not save again
const MOST = 50;  // maximum number of chats; the oldest is deleted first

/** Return an empty chat. Its messages are {role, content, thoughts, files, figures, note, error, partial, parent}; for
 * `parent` and `shown` see branches.js. */
export function fresh() {
  return {id: crypto.getRandomValues(new Uint32Array(2)).join("-"), at: Date.now(), title: "", messages: [], shown: {}};
}

/** Return all readable chats, the latest first. */
export function all() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const name = localStorage.key(i);
    const chat = name.startsWith(PREFIX) ? read(name) : null;
    if (Array.isArray(chat?.messages) && chat.messages.every(message => message?.role)) found.push(mend(chat));
  }
  return found.sort((a, b) => b.at - a.at);
}

/** Return the chat of this tab, or else the latest. */
export function current() {
  const found = all(), id = sessionStorage.getItem(CURRENT);
  return found.find(chat => chat.id === id) || (id === null && found[0]) || fresh();
}

export function choose(chat) { sessionStorage.setItem(CURRENT, chat.id); }

/** Save a chat. `at`: time of its last change, by which chats are listed. Return false if the storage is full. */
export function keep(chat, at = Date.now()) {
  if (forgotten.has(chat.id)) return true;
  chat.at = at;
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat, withoutMedia));
  } catch {
    return false;
  }
  all().slice(MOST).forEach(forget);
  return true;
}

// Pictures and sounds are not saved, because they would soon fill the storage.
function withoutMedia(key, value) { return key === "part" ? undefined : value; }

export function forget(chat) {
  forgotten.add(chat.id);
  localStorage.removeItem(PREFIX + chat.id);
}

/** Return the title of a chat: its name, or the beginning of its first question. */
export function title(chat) {
  if (chat.title) return String(chat.title);
  const first = chat.messages.find(message => message.role === "user");
  const text = first ? first.content.trim() || (first.files || []).map(file => file.name).join(", ") : "";
  return text.split("\n")[0].slice(0, 80) || "Without a question";
}

/** Return the saved settings, with defaults for unset ones. */
export function settings() {
  return {
    model: "", system: "", stop: "", temperature: 0.7, top_p: null, top_k: null, min_p: null, repeat_penalty: null,
    seed: null, max_tokens: null, reasoning_budget: null, ...read(SETTINGS),
  };
}

/** Save changed settings. */
export function keepSettings(changed) {
  const value = JSON.stringify({...read(SETTINGS), ...changed});
  try { localStorage.setItem(SETTINGS, value); } catch { /* the settings apply to this visit only */ }
}

function read(name) {
  try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
}
