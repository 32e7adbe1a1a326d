// The conversation: questions, answers, and their versions.

import {Answering} from "./answering.js";
import * as branches from "./branches.js";
import * as chats from "./chats.js";
import {$, announce, button, copyButton, toQuestion} from "./dom.js";
import * as files from "./files.js";
import * as history from "./history.js";
import {answerItem, questionItem, setActions, showAnswer, versionButtons} from "./messages.js";
import * as panels from "./panels.js";
import * as picker from "./picker.js";
import * as settings from "./settings.js";

const NEAR_PX = 60;  // within this distance from the end, the view follows the answer
const MOST_ANSWERS = 4;  // at the same time, because browsers have at most 6 connections to a server

let chat = chats.current();
let editing = null;    // the question that is edited in the composer
let following = true;  // the view follows the end of the conversation
const answers = new Map();  // Answering by chat id
const items = new Map();    // elements of the shown messages

/** Show the chat of this tab and install the event handlers. */
export function start() {
  $("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
  $("question").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("question").addEventListener("input", fit);
  $("stop").addEventListener("click", () => { stop(); toQuestion(); });
  $("keep-question").addEventListener("click", leaveEditing);
  $("scroll").addEventListener("scroll", () => {
    following = $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < NEAR_PX;
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && !$("chat").hidden && !$("key-dialog").open && escape()) event.preventDefault();
  });
  addEventListener("pagehide", () => { for (const answer of answers.values()) chats.keep(answer.chat); });
  new ResizeObserver(() => { fit(); follow(); }).observe($("talk"));
  files.listen(complain);
  panels.start();
  settings.start();
  picker.start();
  history.start({open, forget, rename, isOpen, isAnswering});
  open(chat);
}

/** Begin to refresh the view, because it is visible. */
export function look() { picker.look(); }

/** Stop refreshing the view. */
export function lookAway() { picker.lookAway(); }

// Show another chat. The answer of the former one goes on.
function open(other) {
  chat = answers.get(other.id)?.chat ?? other;
  chats.choose(chat);
  if (editing) leaveEditing();
  complain("");
  following = true;
  draw();
  toQuestion();
}

function isOpen(other) { return other.id === chat.id; }

function isAnswering(other) { return answers.has(other.id); }

function rename(other, title) {
  const own = isOpen(other) ? chat : answers.get(other.id)?.chat ?? other;
  own.title = title;
  chats.keep(own, own.at);
}

// A chat was deleted.
function forget(other) {
  answers.get(other.id)?.stop();
  if (isOpen(other)) open(chats.fresh());
}

// Handle Escape. Return false if there was nothing to do.
function escape() {
  if (panels.close()) return true;
  if (isAnswering(chat)) stop();
  else if (editing) leaveEditing();
  else return false;
  return true;
}

function draw() {
  items.clear();
  for (const message of branches.path(chat)) {
    items.set(message, message.role === "user" ? questionItem(message) : answerItem(message));
  }
  $("messages").replaceChildren(...items.values());
  $("welcome").hidden = items.size > 0;
  update();
  follow();
}

// Update the buttons of the messages and of the composer.
function update() {
  const busy = isAnswering(chat), shown = [...items.keys()];
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("messages").setAttribute("aria-busy", String(busy));
  for (const message of shown) {
    const isQuestion = message.role === "user", isLast = message === shown.at(-1);
    const coming = busy && isLast;
    const cut = message.error || message.note || message.partial;
    setActions(items.get(message),
      versionButtons(branches.versions(chat, message), message, busy ? null : version => show(version, message)),
      message.content && !coming ? copyButton(() => message.content, "link") : null,
      busy ? null : isQuestion ? button("Edit", "link", () => edit(message))
        : button("Retry", "link", () => retry(message)),
      !busy && !isQuestion && isLast && cut && message.content ? button("Continue", "link", () => proceed(message))
        : null,
      !busy && isQuestion && isLast ? button("Answer", "link", () => answerNew(message)) : null);
  }
  history.list();
}

// Show another version of a message, and keep the focus on the button that was pressed.
function show(version, former) {
  const index = [...items.get(former).querySelectorAll(".versions button")].indexOf(document.activeElement);
  branches.choose(chat, version);
  chats.keep(chat, chat.at);
  const {scrollTop} = $("scroll");
  following = false;
  draw();
  $("scroll").scrollTop = scrollTop;
  const buttons = [...items.get(version).querySelectorAll(".versions button")];
  (buttons[index]?.disabled ? buttons[1 - index] : buttons[index])?.focus();
}

function send() {
  const content = $("question").value.trim();
  if (isAnswering(chat) || (!content && !files.chosen().length) || !hasRoom()) return;
  const message = {role: "user", content, files: files.chosen()};
  branches.add(chat, message, editing ? branches.before(chat, editing) : branches.path(chat).at(-1));
  if (editing) leaveEditing();
  $("question").value = "";
  files.setFiles([]);
  fit();
  complain("");
  answerNew(message);
}

function retry(message) { if (hasRoom()) answerNew(branches.before(chat, message)); }

function proceed(message) { if (hasRoom()) answer(message); }

function hasRoom() {
  const free = answers.size < MOST_ANSWERS;
  if (!free) complain(`${MOST_ANSWERS} answers are being written in other chats. Wait for one of them, or stop one.`);
  return free;
}

function edit(message) {
  editing = message;
  $("editing").hidden = false;
  $("question").value = message.content;
  files.setFiles(message.files || []);
  fit();
  $("question").focus();
}

function leaveEditing() {
  editing = null;
  $("editing").hidden = true;
  $("question").value = "";
  files.setFiles([]);
  fit();
  toQuestion();
}

function stop() {
  answers.get(chat.id)?.stop();
  announce("Stopped.");
}

// Add an answer after a question, and generate it.
function answerNew(question) {
  const message = {role: "assistant", content: "", figures: {}};
  branches.add(chat, message, question);
  following = true;
  draw();
  answer(message);
  toQuestion();
}

async function answer(message) {
  const here = chat;  // another chat may be opened during the answer
  const shown = branches.path(here);
  const request = {...settings.requestFields(), messages: messagesBefore(shown, message), stream: true,
    stream_options: {include_usage: true}};
  const show = status => {
    if (chat !== here || !items.has(message)) return;
    showAnswer(items.get(message), message, status);
    follow();
  };
  const answering = new Answering(here, message, request, show, () => chats.keep(here));
  answers.set(here.id, answering);
  update();
  announce("The answer is coming.");
  await answering.run();
  answers.delete(here.id);
  const saved = chats.keep(here);
  show("");
  if (chat === here) {
    update();
    follow();
    if (!saved) complain("This chat cannot be saved: the browser's storage is full. Delete chats.");
    announce(message.error || `${message.note || "Answer"}: ${message.content}`);
  } else {
    history.list();
  }
  picker.refresh();
}

// Return the messages for the model. Unanswered questions are left out, because roles must alternate.
function messagesBefore(shown, message) {
  const messages = shown.slice(0, shown.indexOf(message));
  const isAnswered = (other, i) => {
    const answer = other.role === "user" ? messages[i + 1] : other;
    return !answer || Boolean(answer.content);
  };
  return [
    ...(settings.system() ? [{role: "system", content: settings.system()}] : []),
    ...messages.filter(isAnswered).map(other => ({
      role: other.role,
      content: other.role === "user" ? files.withFiles(other) : other.content,
      ...(other.thoughts ? {reasoning_content: other.thoughts} : {}),
    })),
  ];
}

function complain(text) { $("notice").textContent = text; }

function follow() { if (following) $("scroll").scrollTop = $("scroll").scrollHeight; }

function fit() {
  const style = $("question").style;
  style.height = "auto";
  style.height = `${$("question").scrollHeight}px`;
}
