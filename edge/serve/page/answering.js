// One answer, from its request to its end. If the connection breaks or the server restarts, the answer continues.

import {stream} from "./api.js";

const PATIENCE_MS = 120000;  // time without another token after which the page stops trying
const PAUSES_MS = [500, 1000, 2000, 4000];  // between attempts; the last one repeats
const SAVE_MS = 3000;

/** An answer that is being generated. `chat` and `message`: where it is written. `request`: fields of the request,
 * whose messages end with the question. `show(status)`: called after changes. `save()`: called now and then. */
export class Answering {
  constructor(chat, message, request, show, save) {
    Object.assign(this, {chat, message, request, save});
    this.display = show;
    this.control = new AbortController();
    this.status = "Reading the question\u2026";
    this.timer = 0;
    this.pause_ms = 0;
    this.saved = this.progressed = performance.now();
    this.figures = {tokens: 0, active_s: 0, segments: 0, ...message.figures};
  }

  get stopped() { return this.control.signal.aborted; }

  stop() { this.control.abort(); }

  /** Generate the answer. If the message has a text already, the answer continues it. */
  async run() {
    const {message} = this;
    Object.assign(message, {partial: true, note: "", error: ""});
    this.show();
    let failedAt = 0;  // time of the first of the last failures; a device that was asleep tries again
    for (let failures = 0; ; failures++) {
      const before = this.progressed;
      try {
        await this.attempt();
        break;
      } catch (error) {
        if (this.stopped) {
          message.note = "stopped";
          break;
        }
        if (!error.again) {
          message.error = error.message;
          break;
        }
        if (this.progressed > before) failures = 0;
        if (!failures) failedAt = performance.now();
        if (performance.now() - failedAt > PATIENCE_MS) {
          message.error = `${error.message} The page tried for two minutes. Check that edge serve runs, and press ` +
            (message.content ? "Continue." : "Retry.");
          break;
        }
        this.status = `${error.message} Trying again\u2026`;
        this.show();
        await this.wait(PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)]);
      }
    }
    clearTimeout(this.timer);
    delete message.partial;
  }

  // Wait between attempts. Stopping ends the wait.
  wait(time_ms) {
    return new Promise(resolve => {
      setTimeout(resolve, time_ms);
      this.control.signal.addEventListener("abort", resolve, {once: true});
    });
  }

  async attempt() {
    const {message, request, figures} = this;
    let fields = request;
    if (message.content) {
      const left = request.max_tokens === undefined ? undefined : request.max_tokens - figures.tokens;
      if (left !== undefined && left <= 0) return;
      fields = {...request, messages: [...request.messages, {role: "assistant", content: message.content}],
        continue_final_message: true, ...(left === undefined ? {} : {max_tokens: left})};
    } else {
      message.thoughts = "";  // a thought cannot be continued
    }
    const began = performance.now(), before = {tokens: figures.tokens, active_s: figures.active_s};
    let first = null, pieces = 0;
    const count = tokens => {
      figures.tokens = before.tokens + tokens;
      figures.active_s = before.active_s + (first === null ? 0 : this.progressed - first) / 1e3;
      // The rate excludes the first token of each attempt, whose time includes the prefill.
      const rest = figures.tokens - figures.segments;
      if (rest > 0 && figures.active_s > 0) figures.rate = rest / figures.active_s;
      message.figures = figures;
    };
    for await (const event of stream("v1/chat/completions", fields, this.control.signal)) {
      const [choice] = event.choices || [], delta = choice?.delta || {};
      if (delta.content || delta.reasoning_content) {
        this.progressed = performance.now();
        if (first === null) {
          first = this.progressed;
          figures.segments += 1;
          figures.first_s ??= (first - began) / 1e3;
          this.status = null;
        }
        message.content += delta.content || "";
        message.thoughts = (message.thoughts || "") + (delta.reasoning_content || "");
        count(++pieces);
        this.schedule();
      }
      if (choice?.ended_by === "repetition") message.note = "stopped because it repeats itself";
      else if (choice?.finish_reason === "length") message.note = "stopped at the token limit";
      if (event.usage) {
        count(event.usage.completion_tokens);
        figures.prompt ??= event.usage.prompt_tokens;
        figures.cached ??= event.usage.prompt_tokens_details?.cached_tokens;
      }
    }
    this.status = "";
    figures.total_s = (figures.total_s || 0) + (performance.now() - began) / 1e3;
  }

  show() { this.display(this.status); }

  // Show the answer soon. Showing a long text takes long, so it gets at most a fifth of the time.
  schedule() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      const began = performance.now();
      this.show();
      const now = performance.now();
      this.pause_ms = 4 * (now - began);
      if (now - this.saved > SAVE_MS) {
        this.saved = now;
        this.save();
      }
    }, Math.max(16, this.pause_ms));
  }
}
