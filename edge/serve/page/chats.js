// The chats that this browser keeps. Each has an entry of its own, so that two tabs do not undo each other's.

const PREFIX = "edge.chat.", SETTINGS = "edge.settings", CURRENT = "edge.current";
const forgotten = new Set();  // an answer that is still coming must not bring its chat back
const MOST = 50;  // chats; the oldest goes first

/** What a chat is before anything is asked. A message: {role, content, files, figures, note, error}. */
export function fresh() {
  return {id: crypto.getRandomValues(new Uint32Array(2)).join("-"), at: Date.now(), messages: []};
}

/** All chats, the latest first. What cannot be read is left out. */
export function all() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const name = localStorage.key(i);
    const chat = name.startsWith(PREFIX) ? read(name) : null;
    if (chat && Array.isArray(chat.messages)) found.push(chat);
  }
  return found.sort((a, b) => b.at - a.at);
}

/** The chat that this tab shows, or else the latest. */
export function current() {
  const found = all(), id = sessionStorage.getItem(CURRENT);
  return found.find(chat => chat.id === id) || (id === null && found[0]) || fresh();
}

export function choose(chat) { sessionStorage.setItem(CURRENT, chat.id); }

/** Keep a chat. False where the browser has no room for it. */
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

// Pictures and sounds would soon take all the room there is.
function withoutMedia(key, value) { return key === "part" ? undefined : value; }

export function forget(chat) {
  forgotten.add(chat.id);
  localStorage.removeItem(PREFIX + chat.id);
}

/** What it is called in a list: how it begins. */
export function title(chat) {
  const first = chat.messages.find(message => message.role === "user");
  const text = first ? first.content.trim() || (first.files || []).map(file => file.name).join(", ") : "";
  return text.split("\n")[0].slice(0, 80) || "Without a question";
}

/** The settings as they were last, with what is asked for where nothing was set. */
export function settings() {
  return {model: "", system: "", temperature: 0.7, max_tokens: null, thought: null, ...read(SETTINGS)};
}

export function keepSettings(value) {
  try { localStorage.setItem(SETTINGS, JSON.stringify(value)); } catch { /* they hold for this visit */ }
}

function read(name) {
  try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
}
