// Chats stored in this browser. Each has its own entry, so that tabs do not overwrite each other's chats.

const PREFIX = "edge.chat.", SETTINGS = "edge.settings", CURRENT = "edge.current";
const forgotten = new Set();  // ids of deleted chats, which a running answer must not save again
const MOST = 50;  // maximum number of chats; the oldest is deleted first

/** Return an empty chat. Its messages are {role, content, files, figures, note, error}. */
export function fresh() {
  return {id: crypto.getRandomValues(new Uint32Array(2)).join("-"), at: Date.now(), messages: []};
}

/** Return all readable chats, the latest first. */
export function all() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const name = localStorage.key(i);
    const chat = name.startsWith(PREFIX) ? read(name) : null;
    if (chat && Array.isArray(chat.messages)) found.push(chat);
  }
  return found.sort((a, b) => b.at - a.at);
}

/** Return the chat of this tab, or else the latest. */
export function current() {
  const found = all(), id = sessionStorage.getItem(CURRENT);
  return found.find(chat => chat.id === id) || (id === null && found[0]) || fresh();
}

export function choose(chat) { sessionStorage.setItem(CURRENT, chat.id); }

/** Save a chat. Return false if the storage is full. */
export function keep(chat) {
  if (forgotten.has(chat.id)) return true;
  chat.at = Date.now();
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

/** Return the title of a chat in the list: the beginning of its first question. */
export function title(chat) {
  const first = chat.messages.find(message => message.role === "user");
  const text = first ? first.content.trim() || (first.files || []).map(file => file.name).join(", ") : "";
  return text.split("\n")[0].slice(0, 80) || "Without a question";
}

/** Return the saved settings, with defaults for unset ones. */
export function settings() {
  return {model: "", system: "", temperature: 0.7, max_tokens: null, thought: null, ...read(SETTINGS)};
}

export function keepSettings(value) {
  try { localStorage.setItem(SETTINGS, JSON.stringify(value)); } catch { /* the settings apply to this visit only */ }
}

function read(name) {
  try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
}
