// The models view: the models of the server, how one of them runs, and models to download.

import {get, post} from "./api.js";
import * as downloads from "./downloads.js";
import {$, announce, button, bytes, count, make, plain} from "./dom.js";
import * as front from "./front.js";
import {planPicture} from "./plan_picture.js";
import {Poll} from "./poll.js";

const PATIENCE_MS = 3600000;  // timeout of a load; devices may have to receive their parts first
const WORDS = {loaded: "Loaded", loading: "Loading\u2026", failed: "Failed", unloaded: "Not loaded"};

const cards = new Map();  // Card by name of the model
let models = [];          // items of GET v1/models
let asked = -Infinity;    // time of the last request for them

const poll = new Poll(show, text => { $("models-notice").textContent = text; });

/** Install the event handlers. */
export function start() {
  front.start(poll);
  downloads.start(() => { asked = -Infinity; poll.ask(); });
}

/** Begin to refresh the view, because it is visible. */
export function look() {
  asked = -Infinity;
  poll.look();
  front.load();
  downloads.look();
}

/** Stop refreshing the view. */
export function lookAway() {
  poll.lookAway();
  downloads.lookAway();
}

async function show(state) {
  if (performance.now() > asked + 1900 || !models.length) {
    asked = performance.now();
    try {
      models = (await get("v1/models")).data.filter(model => !model.parent);  // without adapters
    } catch (error) {
      $("models-notice").textContent = error.message;
    }
  }
  const names = new Set(models.map(model => model.id));
  for (const [name, card] of cards) {
    if (!names.has(name)) { card.element.remove(); cards.delete(name); }
  }
  for (const model of models) {
    if (!cards.has(model.id)) {
      cards.set(model.id, new Card(model.id));
      $("here").append(cards.get(model.id).element);
    }
    cards.get(model.id).show(model, state.models.find(status => status.model.name === model.id));
  }
  $("no-models").hidden = models.length > 0;
  front.setModels(models.map(model => model.id), state);
  downloads.setModels(models);
}

class Card {
  constructor(name) {
    this.name = name;
    this.title = make("h3", {}, name);
    this.state = make("span", {class: "state"});
    this.about = make("p", {class: "quiet"});
    this.runs = make("p");
    this.picture = make("div", {class: "picture"});
    this.wrong = make("p", {class: "wrong", role: "status"});
    this.load = button("Load", "framed", () => this.change("load"));
    this.unload = button("Unload", "framed", () => this.change("unload"));
    this.plans = button("Plans", "framed", () => front.open(name));
    for (const [action, words] of [[this.load, "Load"], [this.unload, "Unload"], [this.plans, "Plans for"]]) {
      action.setAttribute("aria-label", `${words} ${name}`);
    }
    this.changing = false;
    this.element = make("li", {class: "card"}, make("div", {class: "bar"}, this.title, this.state), this.about,
      this.runs, this.picture, this.wrong, make("div", {class: "actions"}, this.load, this.unload, this.plans));
  }

  show(model, status) {
    this.value = status && model.status.value === "unloaded" ? "loaded" : model.status.value;
    const {size, n_params: parameters, quantization, n_ctx: context} = model.meta;
    setText(this.about, [
      size ? bytes(size) : "The file is not readable", quantization && quantization !== "unknown" ? quantization : null,
      parameters ? `${short(parameters)} parameters` : null, context ? `context of ${count(context)} tokens` : null,
    ].filter(Boolean).join(" \u00b7 "));
    this.runs.hidden = !status;
    const devices = (status?.devices || []).filter(device => device.left_s === undefined);
    const memory = devices.reduce((sum, device) => sum + (device.memory_bytes || 0), 0);
    if (status) {
      const where = new Intl.ListFormat("en").format(new Set(devices.map(device => plain(device.name))));
      setText(this.runs, `Runs on ${where || "this device"}.${memory ? ` It takes ${bytes(memory)} of memory.` : ""}`);
    }
    const plan = devices.length > 1 || status?.plan?.replicas ? status.plan : null;
    const width = Math.min(760, this.picture.parentElement.clientWidth - 30);
    const drawn = plan ? JSON.stringify([plan, devices.map(device => device.name), width]) : "";
    if (drawn !== this.drawn && (width > 100 || !plan)) {
      this.drawn = drawn;
      const picture = plan && planPicture(plan, front.nameOf(devices, plan), width);
      this.picture.replaceChildren(...(picture ? [picture] : []));
    }
    this.update();
  }

  update() {
    const state = this.changing ? this.changing : WORDS[this.value] || this.value;
    setText(this.state, state);
    this.state.dataset.value = this.changing ? "loading" : this.value;
    this.load.hidden = this.value === "loaded";
    this.unload.hidden = this.value !== "loaded";
    this.load.disabled = this.unload.disabled = Boolean(this.changing) || this.value === "loading";
    this.plans.disabled = Boolean(this.changing);
  }

  async change(action) {
    const hadFocus = document.activeElement === this[action];
    this.changing = action === "load" ? "Loading\u2026" : "Unloading\u2026";
    this.wrong.textContent = "";
    this.update();
    try {
      await post(`v1/models/${action}`, {model: this.name}, PATIENCE_MS);
      this.value = action === "load" ? "loaded" : "unloaded";
      announce(`${this.name} is ${this.value}.`);
    } catch (error) {
      this.wrong.textContent = error.message;
    }
    this.changing = false;
    this.update();
    if (hadFocus) (this.load.hidden ? this.unload : this.load).focus();
    asked = -Infinity;
    poll.ask();
  }
}

// Only a changed text is replaced, so that selected text stays selected.
function setText(element, text) { if (element.textContent !== text) element.textContent = text; }

function short(value) {
  const [size, unit] = value >= 1e9 ? [1e9, " billion"] : value >= 1e6 ? [1e6, " million"] : [1, ""];
  return `${Number((value / size).toPrecision(3))}${unit}`;
}
