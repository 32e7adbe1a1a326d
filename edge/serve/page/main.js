// Entry point of the page: its two views and their common parts.

import {get} from "./api.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import {$, make} from "./dom.js";
import * as settings from "./settings.js";

function view() {
  const seen = location.hash === "#cluster" ? "cluster" : "chat";
  for (const name of ["chat", "cluster"]) {
    $(name).hidden = name !== seen;
    if (name === seen) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  document.title = seen === "chat" ? "edge" : "edge: cluster";
  watch();
}

// The cluster view is refreshed only while it is visible.
function watch() {
  if (!$("cluster").hidden && document.visibilityState === "visible") cluster.look();
  else cluster.lookAway();
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
chat.start();
view();
welcome();
