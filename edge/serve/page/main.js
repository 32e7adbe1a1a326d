// Entry point of the page: its three views and their common parts.

import * as chat from "./chat.js";
import * as devices from "./devices.js";
import {$} from "./dom.js";
import * as models from "./models.js";

const VIEWS = {chat, devices, models};
const NAMES = {"#cluster": "devices"};  // former addresses

function view() {
  const seen = NAMES[location.hash] || (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "chat");
  for (const name of Object.keys(VIEWS)) {
    $(name).hidden = name !== seen;
    if (name === seen) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = seen === "chat" ? "edge" : `edge: ${seen}`;
  watch();
}

// A view is refreshed only while it is visible.
function watch() {
  for (const [name, {look, lookAway}] of Object.entries(VIEWS)) {
    if (!$(name).hidden && document.visibilityState === "visible") look();
    else lookAway();
  }
}

addEventListener("hashchange", () => {
  document.querySelectorAll("#add-dialog[open], #remove-dialog[open]").forEach(dialog => dialog.close());
  view();
});
document.addEventListener("visibilitychange", watch);
for (const {start} of Object.values(VIEWS)) start();
view();
