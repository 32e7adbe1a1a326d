// The devices view.

import {$, bytes, count, digits, draw, make, plain, plural} from "./dom.js";
import {LineChart} from "./line_chart.js";
import {Poll} from "./poll.js";

const LATEST = 10;     // lines about what happened

const shown = new Map();  // ModelView by model name
const poll = new Poll(({models}) => show(models), complain);

/** Install the event handlers. */
export function start() {}

/** Begin to refresh the view, because it is visible. */
export function look() { poll.look(); }

/** Stop refreshing the view. */
export function lookAway() { poll.lookAway(); }

function complain(text) { $("devices-notice").textContent = text; }

function show(models) {
  if (!models.length) complain("No model is loaded. A question in the chat loads one.");
  const names = new Set(models.map(status => status.model.name));
  for (const [name, view] of shown) {
    if (!names.has(name)) { view.element.remove(); shown.delete(name); }
  }
  for (const status of models) {
    const name = status.model.name;
    if (!shown.has(name)) {
      shown.set(name, new ModelView());
      $("running").append(shown.get(name).element);
    }
    shown.get(name).show(status);
  }
}

class ModelView {
  constructor() {
    this.title = make("h2");
    this.about = make("p", {class: "quiet"});
    this.wrong = make("p", {class: "wrong"});
    this.figures = make("dl", {class: "figures"});
    this.chart = new LineChart("tokens/s");
    this.devices = make("ul", {class: "devices", "aria-label": "Devices"});
    this.slots = make("tbody");
    this.idle = make("p", {class: "quiet"}, "No answers are being generated.");
    this.counters = make("dl", {class: "counters"});
    this.why = make("p", {class: "why"});
    this.events = make("ol", {class: "events", "aria-label": "What happened"});
    this.happened = make("div", {}, make("h3", {}, "What happened"), this.events);
    this.plan = make("pre", {tabindex: 0});
    this.planned = make("details", {}, make("summary", {}, "The plan as JSON"), this.plan);
    const heads = ["Slot", "State", "Prompt", "Generated"].map((name, i) =>
      make("th", {class: i > 1 ? "number" : null}, name));
    this.element = make("section", {class: "model"}, this.title, this.about, this.wrong,
      make("div", {class: "now"}, this.figures, this.chart.element),
      make("h3", {}, "Devices"), this.devices, this.why, this.happened, this.planned,
      make("div", {class: "pair"},
        make("div", {}, make("h3", {}, "Slots"), this.idle,
          make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), this.slots))),
        make("div", {}, make("h3", {}, "Since the start"), this.counters)));
  }

  show(status) {
    const {model, slots = [], waiting, tokens_per_s, devices = [], plan, why, counters = {}, restarts, latency} = status;
    const events = status.events || [];
    this.wrong.textContent = status.error || "";  // its engine process has ended
    const busy = slots.filter(slot => slot.is_processing).length;
    this.title.textContent = plain(model.name);
    this.about.textContent = [
      model.architecture,
      model.parameters ? `${parameters(model.parameters)} parameters` : null,
      model.size_bytes ? bytes(model.size_bytes) : null,
      model.context ? `context of ${count(model.context)} tokens` : null,
    ].filter(Boolean).join(" \u00b7 ");
    setList(this.figures, [
      ["tokens/s", digits(tokens_per_s)], ["slots in use", `${busy} of ${model.sequences ?? slots.length}`],
      ["waiting", count(waiting)],
      ...within(`gaps within ${latency?.target_itl_ms} ms`, latency?.gaps_within, latency?.gaps),
      ...within(`first tokens within ${latency?.target_ttft_ms} ms`, latency?.first_tokens_within, latency?.first_tokens),
    ]);
    this.chart.add(tokens_per_s);
    this.showDevices(devices);
    this.why.textContent = plan && why ? `Placement: ${why}` : "";
    this.happened.hidden = !events.length;
    setRows(this.events, events.slice(-LATEST).reverse(), ({time, text}) =>
      make("li", {}, make("time", {class: "quiet"}, new Date(1e3 * time).toLocaleTimeString()), ` ${text}`));
    this.planned.hidden = !plan;
    const text = plan ? JSON.stringify(plan, null, 1) : "";
    if (this.plan.textContent !== text) this.plan.textContent = text;
    setRows(this.slots, slots.map(slot => [
      [slot.id < 0 ? "-" : slot.id], [slot.is_processing ? "at work" : "free", slot.is_processing ? "busy" : "quiet"],
      [count(slot.prompt_tokens), "number"], [count(slot.generated_tokens), "number"],
    ]), cells => make("tr", {}, ...cells.map(([text, style]) => make("td", {class: style}, text))));
    this.slots.parentElement.hidden = !slots.length;
    this.idle.hidden = slots.length > 0;
    const figures = Object.entries({...counters, ...(restarts === undefined ? {} : {restarts})});
    setList(this.counters, figures.map(([name, value]) => [WORDS[name] || name, count(value)]));
  }

  // Only changed parts are created again, so that selected text stays selected.
  showDevices(devices) {
    const shown = JSON.stringify(devices, (key, value) => key === "left_s" ? agoText(value) : value);
    if (shown === this.shown) return;
    this.shown = shown;
    const spans = devices.map(device => span(device.layers));
    const layers = Math.max(1, ...spans.map(one => one ? one.stop : 0));
    const heads = Math.max(0, ...devices.map(device => span(device.heads)?.stop || 0));
    this.devices.replaceChildren(...devices.map((device, i) => deviceItem(device, spans[i], layers, heads)));
  }
}

/** Return the figure for the share within a latency target, or [] without a target or without values. */
function within(words, part, all) {
  return part == null || !all ? [] : [[words, `${digits(100 * part / all)} %`]];
}

const WORDS = {
  prompt_tokens: "tokens of prompts", cached_tokens: "of them kept from before", generated_tokens: "tokens generated",
  steps: "steps", preemptions: "answers put off for others",
  background_preemptions: "those in the background put off",
  restarts: "restarts of its process",
};

function deviceItem(device, layers, allLayers, allHeads) {
  const heads = span(device.heads);
  const holds = [
    layers ? layers.text("layer") : null,
    heads && heads.stop > heads.start && heads.stop - heads.start < allHeads ? heads.text("head") : null,
  ].filter(Boolean).join(", ");
  const left = device.left_s !== undefined;
  return make("li", {class: left ? "left" : null},
    make("div", {class: "bar"}, make("strong", {}, device.name),
      make("span", {class: "quiet"}, device.rank === undefined || device.rank === null ? "" : `rank ${device.rank}`)),
    left ? make("p", {class: "wrong"}, `lost, or not used any more, for ${agoText(device.left_s)}`) : null,
    layers ? heldBar(layers, allLayers) : null,
    setList(make("dl"), [
      holds ? ["holds", holds] : null,
      device.memory_bytes ? ["memory", bytes(device.memory_bytes)] : null,
      device.link ? ["link", linkText(device.link)] : null,
    ].filter(Boolean)));
}

// Coarse, so that the view does not change every second.
function agoText(seconds) {
  if (seconds < 60) return "less than a minute";
  return seconds < 3600 ? plural(Math.floor(seconds / 60), "minute") : plural(Math.floor(seconds / 3600), "hour");
}

// Draw the layers of a device among all layers.
function heldBar(layers, all) {
  const [x, width] = [100 * layers.start / all, 100 * (layers.stop - layers.start) / all];
  return draw("svg", {viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true", class: "held"},
    draw("rect", {x, width, height: 8}));
}

function linkText(link) {
  if (typeof link === "string") return link;
  const {latency_s, bytes_per_s, ...others} = link;
  return [
    latency_s === undefined ? null : `${digits(1e3 * latency_s)} ms`,
    bytes_per_s === undefined ? null : `${bytes(bytes_per_s)}/s`,
    ...Object.values(others).filter(value => typeof value === "string" || typeof value === "number"),
  ].filter(value => value !== null).join(", ");
}

// Parse a range of layers or heads: "0-15" is inclusive, [0, 16] and {start, stop} exclude the end, 16 is a count.
function span(value) {
  let found = null;
  if (typeof value === "number") found = [0, value];
  else if (Array.isArray(value)) found = value;
  else if (typeof value === "string") {
    const match = /^(\d+)(?:-(\d+))?$/.exec(value);
    if (match) found = [Number(match[1]), Number(match[2] ?? match[1]) + 1];
  } else if (value) found = [value.start, value.stop];
  if (!found || !found.every(Number.isInteger) || found.length !== 2) return null;
  const [start, stop] = found;
  const text = word => {
    if (stop - start < 2) return stop > start ? `${word} ${start}` : `no ${word}s`;
    return typeof value === "number" ? plural(value, word) : `${word}s ${start}-${stop - 1}`;
  };
  return {start, stop, text};
}

function parameters(value) {
  if (typeof value !== "number") return value;
  const [size, unit] = value >= 1e9 ? [1e9, "billion"] : value >= 1e6 ? [1e6, "million"] : [1, ""];
  return `${digits(value / size)} ${unit}`.trim();
}

// Show names and figures. If the names are unchanged, only the texts are replaced.
function setList(list, pairs) {
  const names = [...list.querySelectorAll("dt")].map(one => one.textContent);
  if (names.join("\n") !== pairs.map(pair => pair[0]).join("\n")) {
    list.replaceChildren(...pairs.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  list.querySelectorAll("dd").forEach((element, i) => {
    if (element.textContent !== pairs[i][1]) element.textContent = pairs[i][1];
  });
  return list;
}

// Replace the rows of an element if they have changed, so that selected text stays selected.
function setRows(body, rows, row) {
  const shown = JSON.stringify(rows);
  if (body.dataset.rows === shown) return;
  body.dataset.rows = shown;
  body.replaceChildren(...rows.map(row));
}
