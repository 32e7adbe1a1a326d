// The state of the server, refreshed while a view is visible.

import {get} from "./api.js";

/** Polls GET /v1/cluster for a view. `show` is called with each answer, and `complain` with a text that says why the
 * last answer is old, and the error's own message, or with "". */
export class Poll {
  constructor(show, complain, every_ms = 1000) {
    this.show = show;
    this.complain = complain;
    this.every_ms = every_ms;
    this.looking = false;
    this.timer = null;
  }

  /** Begin to poll. */
  look() {
    if (this.looking) return;
    this.looking = true;
    this.ask();
  }

  /** Stop polling. */
  lookAway() {
    this.looking = false;
    clearTimeout(this.timer);
  }

  /** Poll now, for example after a change. */
  async ask() {
    clearTimeout(this.timer);
    try {
      const state = await get("v1/cluster");
      if (!this.looking) return;
      this.complain("");
      this.show(state);
    } catch (error) {
      this.complain(`${error.message} The view below shows the last known state.`, error.message);
      if (error.status === 401) return this.lookAway();  // the user entered no key; opening the view asks again
    }
    clearTimeout(this.timer);
    if (this.looking) this.timer = setTimeout(() => this.ask(), this.every_ms);
  }
}
