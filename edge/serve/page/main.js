// Entry point of the page: its three views and their common parts.

import {get} from "./api.js";
import * as chat from "./chat.js";
import * as devices from "./devices.js";
import {$, make} from "./dom.js";
import * as models from "./models.js";
import * as settings from "./settings.js";

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

async function welcome() {
  try {
    const {data} = await get("v1/models");
    settings.setModels(data.map(model => model.id));
    const {models} = await get("v1/cluster");
    const status = models.find(one => one.model.name === settings.asked().model);
    const devices = (status?.devices || []).map(device => device.name);
    $("welcome").replaceChildren(make("h2", {}, settings.asked().model || "No model"),
      make("p", {class: "quiet"}, devices.length ? `on ${devices.join(", ")}` : ""));
  } catch (error) {
    $("notice").textContent = error.message;
  }
}

document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  if (chat.escape() || settings.close()) event.preventDefault();
});
addEventListener("hashchange", view);
document.addEventListener("visibilitychange", watch);
$("model").addEventListener("change", welcome);
settings.start(chat);
for (const {start} of Object.values(VIEWS)) start();
view();
welcome();
