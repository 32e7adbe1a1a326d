// Versions of a conversation. Its messages form a tree, and one path through the tree is shown.
//
// chat.messages: messages in the order of their creation. `parent`: index of the message before it, or -1.
// chat.shown: index of the shown message by the index of its parent. Without an entry, the latest is shown.

/** Return the shown messages. */
export function path(chat) {
  const following = new Map();
  chat.messages.forEach((message, i) => {
    following.set(message.parent, [...following.get(message.parent) || [], i]);
  });
  const shown = [];
  for (let at = -1; following.has(at);) {
    const versions = following.get(at);
    at = versions.includes(chat.shown[at]) ? chat.shown[at] : versions.at(-1);
    shown.push(chat.messages[at]);
  }
  return shown;
}

/** Add a message after another, or at the beginning if that is undefined, and show it. */
export function add(chat, message, after) {
  message.parent = chat.messages.indexOf(after);
  chat.messages.push(message);
  choose(chat, message);
}

/** Return all versions of a message, including itself. */
export function versions(chat, message) { return chat.messages.filter(other => other.parent === message.parent); }

/** Show this version of a message. */
export function choose(chat, message) { chat.shown[message.parent] = chat.messages.indexOf(message); }

/** Return the message before another, or undefined. */
export function before(chat, message) { return chat.messages[message.parent]; }

/** Complete a stored chat. Chats of former versions of this page have no tree. */
export function mend(chat) {
  chat.shown = chat.shown && typeof chat.shown === "object" ? chat.shown : {};
  chat.messages.forEach((message, i) => {
    const {parent} = message;
    if (!Number.isInteger(parent) || parent < -1 || parent >= i) message.parent = i - 1;
  });
  return chat;
}
