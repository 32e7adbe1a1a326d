// The devices view: a picture, a card for each device, and what a person does with them.

import {post, remove} from "./api.js";
import * as adding from "./add_device.js";
import {DevicePicture} from "./device_picture.js";
import {$, announce, button, bytes, digits, draw, make, plain, plural} from "./dom.js";
import {Poll} from "./poll.js";
import {setList, showModels} from "./running.js";

const TIERS = {gpu: "GPU memory", memory: "Memory", disk: "Disk"};
const NEWS = ["lost", "paused", "slow"];  // states that screen readers announce
export const WORDS = {
  computing: "computing", ready: "ready", joining: "joining", paused: "paused", slow: "slow", lost: "lost",
};

const cards = new Map();  // Card by name of the device
let picture = null;
const poll = new Poll(show, complain);

/** Install the event handlers. */
export function start() {
  picture = new DevicePicture($("devices-picture"));
  adding.start(poll);
}

/** Begin to refresh the view, because it is visible. */
export function look() { poll.look(); }

/** Stop refreshing the view. */
export function lookAway() { poll.lookAway(); }

function complain(text) { $("devices-notice").textContent = text; }

function show(state) {
  const {models, devices = [], links = [], removed = []} = state;
  const names = new Set(devices.map(device => device.name));
  for (const [name, card] of cards) {
    if (!names.has(name)) { card.element.remove(); cards.delete(name); }
  }
  for (const device of devices) {
    if (!cards.has(device.name)) {
      cards.set(device.name, new Card(device.name));
      $("device-cards").append(cards.get(device.name).element);
    }
    cards.get(device.name).show(device, links);
  }
  const lost = devices.filter(device => device.state === "lost").length;
  const rate = models.reduce((sum, status) => sum + (status.tokens_per_s || 0), 0);
  $("devices-summary").textContent = [plural(devices.length, "device"), lost ? `${lost} lost` : null,
    models.length ? `${digits(rate)} tokens/s` : "no model is loaded; a question in the chat loads one"].filter(Boolean).join(" \u00b7 ");
  picture.show(devices, links, models);
  showRemoved(removed);
  adding.show(state);
  showModels(models);
}

// Devices that were removed can be used again.
function showRemoved(removed) {
  const list = $("removed-devices");
  if (list.dataset.names === JSON.stringify(removed)) return;
  list.dataset.names = JSON.stringify(removed);
  list.hidden = !removed.length;
  list.replaceChildren("Removed: ", ...removed.map(name => make("span", {class: "removed"}, name, " ",
    button("Use again", "link", () => change(name, () => post(pathOf(name), {paused: false}), `${name} is used again.`)))));
}

const pathOf = name => `v1/cluster/devices/${encodeURIComponent(name)}`;

async function change(name, request, done) {
  try {
    await request();
    announce(done);
    complain("");
  } catch (error) {
    complain(error.message);
  }
  poll.ask();
}

class Card {
  constructor(name) {
    this.name = name;
    this.state = make("span", {class: "state"});
    this.since = make("time", {class: "quiet"});
    this.words = make("span");
    this.text = make("p", {}, this.since, " ", this.words);
    this.parts = make("div", {class: "parts"});
    this.tiers = make("dl", {class: "tiers"});
    this.figures = make("dl", {class: "facts"});
    this.pause = button("Pause", "framed", () => this.togglePause());
    this.removeButton = button("Remove", "framed", () => this.askToRemove());
    this.actions = make("div", {class: "actions"}, this.pause, this.removeButton);
    this.element = make("li", {}, make("div", {class: "bar"}, make("h3", {}, name), this.state), this.text, this.parts,
      this.tiers, this.figures, this.actions);
  }

  show(device, links) {
    const {state} = device;
    if (this.device && this.device.state !== state && (NEWS.includes(state) || NEWS.includes(this.device.state))) {
      announce(`${device.name} is ${WORDS[state] || state}: ${device.text}`);
    }
    this.device = device;
    this.element.className = state;
    setText(this.state, WORDS[state] || state);
    this.state.title = `since ${clock(device.since)}`;
    setText(this.since, clock(device.since));
    setText(this.words, sentence(device.text));
    this.text.hidden = Boolean(device.models?.length) && ["ready", "computing"].includes(state);  // the parts say it
    const parts = device.models || [], isEmpty = part => !((part.layers?.[1] || 0) > part.layers?.[0]);
    this.showParts(parts.filter(part => !isEmpty(part) || parts.every(other => other.model !== part.model || isEmpty(other))));
    this.showTiers(device.memory || {});
    const link = device.kind !== "this device" &&
      links.find(({from, to}) => [from, to].includes("this device") && [from, to].includes(device.name));
    setList(this.figures, [
      typeof device.load === "number" ? ["Load", `${digits(100 * device.load)} %`] : null,
      device.models?.length ? ["Computing", `${digits(100 * device.busy)} % of the time`] : null,
      typeof device.temperature_c === "number" ? ["Temperature", `${digits(device.temperature_c)} \u00b0C`] : null,
      typeof device.battery_percent === "number" ? ["Battery", `${digits(device.battery_percent)} %`] : null,
      device.models?.length ? ["Tokens/s", digits(device.tokens_per_s)] : null,
      link ? ["Link", linkText(link)] : null,
      device.cpu ? ["Processor", plain(device.cpu)] : null,
    ].filter(Boolean));
    this.actions.hidden = device.kind === "this device";
    setText(this.pause, state === "paused" ? "Resume" : "Pause");
    this.pause.hidden = state === "joining";
    setText(this.removeButton, device.invited ? "Withdraw invitation" : "Remove");
    for (const [element, verb] of [[this.pause, this.pause.textContent], [this.removeButton, this.removeButton.textContent]]) {
      element.setAttribute("aria-label", plain(`${verb} ${device.name}`));
    }
  }

  showParts(parts) {
    const shown = JSON.stringify(parts.map(({model, layers, heads, n_layers}) => [model, layers, heads, n_layers]));
    if (this.parts.dataset.shown === shown) return;
    this.parts.dataset.shown = shown;
    this.parts.replaceChildren(...parts.map(part => make("div", {},
      make("p", {class: "quiet"}, `${partText(part)} of ${part.model}`), bar(part.layers?.[0] || 0, part.layers?.[1] || 0,
        part.n_layers))));
  }

  showTiers(memory) {
    const tiers = Object.entries(TIERS).filter(([tier]) => memory[tier]);
    const shown = JSON.stringify(tiers.map(([tier]) => [memory[tier].total, Math.round(100 * memory[tier].free / memory[tier].total)]));
    if (this.tiers.dataset.shown === shown) return;
    this.tiers.dataset.shown = shown;
    this.tiers.replaceChildren(...tiers.map(([tier, name]) => {
      const {total, free} = memory[tier];
      return make("div", {}, make("dt", {}, name), make("dd", {}, `${bytes(free)} free of ${bytes(total)}`,
        bar(0, total - free, total)));
    }));
  }

  togglePause() {
    const paused = this.device.state !== "paused";
    const done = paused ? `${this.name} is paused.` : `${this.name} is used again.`;
    change(this.name, () => post(pathOf(this.name), {paused}), done);
  }

  askToRemove() {
    const {device, name} = this, dialog = $("remove-dialog"), {invited} = device;
    $("remove-title").textContent = plain(invited ? `Withdraw the invitation of ${name}?` : `Remove ${name}?`);
    $("remove-words").textContent = invited ? `Its ${device.kind === "browser" ? "link" : "token"} will not work any more.` :
      "No plan uses the device from now on. Running answers continue on the other devices. You can use it again later.";
    $("revoke-row").hidden = invited || !device.member;
    $("revoke").checked = false;
    $("remove-now").textContent = invited ? "Withdraw" : "Remove";
    dialog.returnValue = "";
    dialog.onclose = () => {
      if (dialog.returnValue !== "remove") return;
      const query = $("revoke").checked ? "?revoke=true" : "";
      change(name, () => remove(`${pathOf(name)}${query}`), invited ? `${name} is not invited any more.` : `${name} is removed.`);
    };
    dialog.showModal();
  }
}

/** Return the text of the part of a model that a device has. */
export function partText({layers, heads, n_layers, n_heads}) {
  const [first, end] = layers || [0, 0];
  if (end <= first) return "Tokens only";
  const text = end - first === n_layers ? "All layers" : end - first === 1 ? `Layer ${first}` : `Layers ${first}-${end - 1}`;
  const some = heads && heads[1] - heads[0] < n_heads && heads[1] > heads[0];
  return some ? `${text}, heads ${heads[0]}-${heads[1] - 1}` : text;
}

/** Return the latency and the bandwidth of a link. */
export function linkText({latency_s, bytes_per_s}) {
  return [typeof latency_s === "number" ? `${digits(1e3 * latency_s)} ms` : null,
    typeof bytes_per_s === "number" ? `${bytes(bytes_per_s)}/s` : null].filter(Boolean).join(", ") || "not measured";
}

// Draw a range among all parts.
function bar(start, stop, all) {
  const x = all ? 100 * start / all : 0, width = all ? 100 * (stop - start) / all : 0;
  return draw("svg", {viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true", class: "share"},
    draw("rect", {x, width: Math.max(0, width), height: 6}));
}

// Return the time of day that was so many seconds ago, with the day if it was another day.
function clock(seconds) {
  const now = new Date(), at = new Date(now - 1e3 * seconds);
  return at.toDateString() === now.toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
}

function sentence(text) {
  const all = String(text || "");
  return all ? `${all[0].toUpperCase()}${all.slice(1)}${/[.!?]$/.test(all) ? "" : "."}` : "";
}

function setText(element, text) {
  if (element.textContent !== plain(text)) element.textContent = plain(text);
}
