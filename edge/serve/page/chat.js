// The conversation: questions, streamed answers, stopping, editing and retrying.

import {stream} from "./api.js";
import * as chats from "./chats.js";
import {$, announce, button, toQuestion} from "./dom.js";
import * as files from "./files.js";
import {answerItem, copyAnswer, questionItem, setButtons, showAnswer} from "./messages.js";
import {asked, system} from "./settings.js";

const NEAR_PX = 60;  // within this distance from the end, the view follows the answer

let chat = chats.current();
let answering = null;  // AbortController of the current answer
let editing = false;   // the last question is being edited in the composer
let following = true;  // the view follows the end of the conversation

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
  $("new-chat").addEventListener("click", () => { location.hash = "#chat"; open(chats.fresh()); });
  $("scroll").addEventListener("scroll", () => {
    following = $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < NEAR_PX;
  });
  addEventListener("pagehide", () => { if (answering) chats.keep(chat); });
  new ResizeObserver(() => { fit(); follow(); }).observe($("talk"));
  files.listen(complain);
  open(chat);
}

/** Begin to refresh the view, because it is visible. */
export function look() {}

/** Stop refreshing the view. */
export function lookAway() {}

/** Show another chat and stop the current answer. */
export function open(other) {
  stop();
  chat = other;
  chats.choose(chat);
  if (editing) leaveEditing();
  complain("");
  following = true;
  draw();
  toQuestion();
}

/** Return true if a chat is shown. */
export function isOpen(other) { return other.id === chat.id; }

/** Handle Escape: stop the answer or cancel editing. Return false if there was nothing to do. */
export function escape() {
  if (answering) stop();
  else if (editing) leaveEditing();
  else return false;
  return true;
}

function draw() {
  $("messages").replaceChildren(...chat.messages.map(message =>
    message.role === "user" ? questionItem(message) : answerItem(message)));
  $("welcome").hidden = chat.messages.length > 0;
  offer();
  follow();
}

// Update the buttons of the messages. Only the last question and answer can be changed, after the answer has ended.
function offer() {
  chat.messages.forEach((message, i) => {
    const buttons = [];
    const last = i >= chat.messages.length - 2 && !answering;
    const coming = answering && i === chat.messages.length - 1;
    if (message.role === "assistant" && !coming && message.content) buttons.push(copyAnswer(message));
    if (last) buttons.push(message.role === "user" ? button("Edit", "link", edit) : button("Retry", "link", retry));
    setButtons($("messages").children[i], ...buttons);
  });
}

function send() {
  const content = $("question").value.trim();
  if (answering || (!content && !files.chosen().length)) return;
  if (editing) {
    chat.messages.length = lastQuestion();
    leaveEditing();
  }
  chat.messages.push({role: "user", content, files: files.chosen()});
  $("question").value = "";
  files.setFiles([]);
  fit();
  complain("");
  following = true;
  draw();
  answer();
  toQuestion();
}

function retry() {
  if (answering || lastQuestion() < 0) return;
  chat.messages.length = lastQuestion() + 1;
  draw();
  answer();
  toQuestion();
}

function edit() {
  const message = chat.messages[lastQuestion()];
  editing = true;
  $("editing").hidden = false;
  $("question").value = message.content;
  files.setFiles(message.files || []);
  fit();
  $("question").focus();
}

function leaveEditing() {
  editing = false;
  $("editing").hidden = true;
  $("question").value = "";
  files.setFiles([]);
  fit();
  toQuestion();
}

function lastQuestion() { return chat.messages.findLastIndex(message => message.role === "user"); }

function stop() {
  if (!answering) return;
  answering.abort();
  announce("Stopped.");
}

async function answer() {
  const here = chat;  // another chat may be opened during the answer
  const message = {role: "assistant", content: "", figures: {}};
  const request = {...asked(), messages: history(here), stream: true, stream_options: {include_usage: true}};
  here.messages.push(message);
  const item = answerItem(message);
  $("messages").append(item);
  const control = answering = new AbortController();
  setBusy(true);
  showAnswer(item, message, true);
  follow();
  const taking = new Taking(message, () => { showAnswer(item, message, false); follow(); });
  try {
    for await (const event of stream("v1/chat/completions", request, control.signal)) taking.take(event);
  } catch (error) {
    if (control.signal.aborted) message.note = "stopped";
    else message.error = error.message;
  }
  taking.end();
  const room = chats.keep(here);
  if (answering === control) {
    answering = null;
    setBusy(false);
  }
  if (chat !== here) return;
  showAnswer(item, message, false);
  offer();
  follow();
  if (!room) complain("This chat cannot be saved: the browser's storage is full. Delete chats in the settings.");
  announce(message.error || `${message.note || "Answer"}: ${message.content}`);
}

// Collects a streamed answer and measures its speed.
class Taking {
  constructor(message, show) {
    this.message = message;
    this.show = show;
    this.began = this.last = performance.now();
    this.first = null;
    this.pieces = 0;
    this.frame = 0;
  }

  take(event) {
    const [choice] = event.choices || [], figures = this.message.figures;
    const delta = choice?.delta || {};
    if (delta.content || delta.reasoning_content) {
      this.last = performance.now();
      this.first ??= this.last;
      this.pieces += 1;
      figures.first_s = (this.first - this.began) / 1e3;
      this.message.content += delta.content || "";
      if (delta.reasoning_content) this.message.thoughts = (this.message.thoughts || "") + delta.reasoning_content;
      this.count(this.pieces);
      this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.show(); });
    }
    if (choice?.ended_by === "repetition") this.message.note = "stopped because it repeats itself";
    else if (choice?.finish_reason === "length") this.message.note = "stopped at the token limit";
    if (event.usage) {
      this.count(event.usage.completion_tokens);
      figures.prompt = event.usage.prompt_tokens;
      figures.cached = event.usage.prompt_tokens_details?.cached_tokens;
    }
  }

  // The rate excludes the first token, whose time includes the prefill.
  count(tokens) {
    const figures = this.message.figures, elapsed = (this.last - this.first) / 1e3;
    figures.tokens = tokens;
    if (this.first !== null && tokens > 1 && elapsed > 0) figures.rate = (tokens - 1) / elapsed;
  }

  end() { cancelAnimationFrame(this.frame); }
}

// Return the messages for the model. Unanswered questions are left out, because roles must alternate.
function history(of) {
  const answered = (message, i) => {
    const other = message.role === "user" ? of.messages[i + 1] : message;
    return !other || Boolean(other.content);
  };
  return [
    ...(system() ? [{role: "system", content: system()}] : []),
    ...of.messages.filter(answered).map(message => ({
      role: message.role,
      content: message.role === "user" ? files.withFiles(message) : message.content,
      ...(message.thoughts ? {reasoning_content: message.thoughts} : {}),
    })),
  ];
}

function setBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("messages").setAttribute("aria-busy", String(busy));
  if (busy) {
    announce("The answer is coming.");
    offer();
  }
}

function complain(text) { $("notice").textContent = text; }

function follow() { if (following) $("scroll").scrollTop = $("scroll").scrollHeight; }

function fit() {
  const style = $("question").style;
  style.height = "auto";
  style.height = `${$("question").scrollHeight}px`;
}
