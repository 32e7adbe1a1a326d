// The models view.

import {$} from "./dom.js";
import * as front from "./front.js";
import {Poll} from "./poll.js";

const poll = new Poll(({models}) => front.setModels(models), text => { $("models-notice").textContent = text; });

/** Install the event handlers. */
export function start() {}

/** Begin to refresh the view, because it is visible. */
export function look() {
  front.load();
  poll.look();
}

/** Stop refreshing the view. */
export function lookAway() { poll.lookAway(); }
