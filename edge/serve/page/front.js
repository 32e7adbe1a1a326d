// The plans of a model: finding them, the chart of the Pareto front, what a plan would change, and running it.

import {ApiError, get, lines, post} from "./api.js";
import {scale} from "./axes.js";
import {$, announce, button, bytes, digits, draw, make, plain, seconds} from "./dom.js";
import {OWN, devicesOf, partsOf, planPicture} from "./plan_picture.js";

const PATIENCE_MS = 600000;  // timeout of a switch; devices may have to load their parts first
const LOG_FROM = 20;  // an axis is logarithmic if its values span more than this factor

let poll = null;
let names = [];       // names of the models
let state = {models: []};  // the last state of the server
let model = null;     // name of the model whose plans are shown
let front = {};       // the plans as the server returned them
let points = [];      // plans on the front sorted by latency
let single = null;    // the plan for this device alone, if it is known
let picked = null;    // the selected plan
let changes = null;   // what the selected plan would change: the server's preview, or an error
let message = "";     // message about the last switch
let switching = false;
let finding = null;   // AbortController of the request for plans

/** Install the event handlers. `shared`: the poll of the view. */
export function start(shared) {
  poll = shared;
  $("find-plans").addEventListener("click", find);
  $("stop-finding").addEventListener("click", () => finding?.abort());
  $("front-model").addEventListener("change", () => select($("front-model").value));
  new ResizeObserver(() => { plot(); picture(); }).observe($("plans"));
  $("plot").addEventListener("keydown", event => {
    const at = points.indexOf(picked);
    const next = {ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1};
    const to = {...next, Home: 0, End: points.length - 1}[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    pick(points[Math.min(Math.max(to, 0), points.length - 1)]);
  });
}

/** Show the plans of a model, and move there. */
export function open(name) {
  select(name);
  $("front").scrollIntoView({block: "start"});
  $("front-title").focus({preventScroll: true});
}

function select(name) {
  if (name === model) return;
  model = name;
  $("front-model").value = name;
  [points, picked, message] = [[], null, ""];
  load();
}

/** Load the plans of the selected model from the server. */
export async function load() {
  const wanted = model;
  try {
    const path = wanted === null ? "v1/front" : `v1/front?model=${encodeURIComponent(wanted)}`;
    const answer = await get(path);
    if (wanted !== model) return;
    front = answer;
    $("front-notice").textContent = "";
  } catch (error) {
    if (wanted !== model) return;
    front = {};
    if (error.status !== 404) $("front-notice").textContent = error.message;
  }
  const all = (Array.isArray(front.points) ? front.points : []).map(pointOf)
    .filter(point => point.plan && Number.isFinite(point.latency_s) && Number.isFinite(point.throughput_per_s));
  points = all.filter(point => point.on_front !== false).sort((a, b) => a.latency_s - b.latency_s);
  single = all.find(point => devicesOf(point.plan).join() === OWN) ?? null;
  $("plans").hidden = $("front-words").hidden = !points.length;
  const isOnly = points.length === 1;  // a chart of one point says nothing
  $("front-legend").hidden = $("chart").hidden = isOnly;
  $("plans").className = isOnly ? "only" : "";
  $("find-plans").textContent = points.length ? "Find plans again" : "Find plans";
  if (!points.length) return;
  const before = picked;
  picked = points.find(point => before && isSame(point.plan, before.plan)) || points.find(point => point.knee) || points[0];
  if (!before || !isSame(picked.plan, before.plan)) foresee();
  notes();
  picks();
  plot();
  describe();
}

// Show what the server noted, and why a plan with other devices is missing.
function notes() {
  const list = (Array.isArray(front.notes) ? front.notes : []).map(String);
  const others = (Array.isArray(front.devices) ? front.devices : []).map(item => String(item?.name)).slice(1);
  if (others.length && points.every(point => point === single)) {
    const names = new Intl.ListFormat("en").format(others.map(plain));
    list.unshift(`This device alone is best now: no plan that also uses ${names} would be faster.`);
  }
  $("front-notes").replaceChildren(...list.slice(0, 10).map(text => make("li", {}, text)));
}

// Return a plan with its figures: for output of `edge pareto --json`, the measured ones, or else the predicted ones.
function pointOf(point) { return {...point, ...point.predicted, ...point.measured}; }

/** Set the names of the models, and the state of the server, which has the plans in use. */
export function setModels(value, now) {
  state = now;
  if (names.join("\n") !== value.join("\n")) {
    names = value;
    $("front-model").replaceChildren(...names.map(name => make("option", {value: name}, name)));
  }
  if (!names.includes(model)) {
    const loaded = state.models.map(status => status.model.name).find(name => names.includes(name));
    if (loaded ?? names[0]) select(loaded ?? names[0]);
  } else if ($("front-model").value !== model) $("front-model").value = model;
  $("front").hidden = !names.length;
  if (points.length && inUse() !== shownInUse) { plot(); describe(); }
}

/** Return a function from addresses in a running plan to names. `devices`: items of the status. */
export function nameOf(devices, plan) {
  const known = new Map([[OWN, "this device"]]);
  [plan, ...(plan.replicas || [])].forEach((copy, i) => {
    copy.stages.flatMap(stage => stage.shards).forEach((shard, rank) => {
      const device = devices.find(item => item.rank === rank && (item.replica ?? 0) === i);
      if (device && shard.device !== OWN) known.set(shard.device, device.name);
    });
  });
  return address => known.get(address) ?? inFront(address);
}

function inFront(address) {
  if (address === OWN) return "this device";
  const known = [...(Array.isArray(front.devices) ? front.devices : []), ...(state.devices || [])];
  const device = known.find(item => item?.address === address);
  return String(device?.name ?? address);
}

function isSame(a, b) { return partsOf(a) === partsOf(b); }

let shownInUse = null;  // plan that is marked as in use

// Return the plan in use among the plans, or null.
function inUse() {
  const status = state.models.find(item => item.model.name === model);
  if (!status || status.error) return null;
  if (!status.plan) return single;
  return [...points, single].find(point => point && isSame(point.plan, status.plan)) ?? null;
}

// --- finding plans ---

async function find() {
  finding = new AbortController();
  showFinding();
  try {
    for await (const line of lines("v1/front", {model}, finding.signal)) {
      const {status, completed, total} = line;
      const bar = $("finding-progress");
      if (total) { bar.max = total; bar.value = completed; } else bar.removeAttribute("value");
      const text = status === "success" ? "Done." : `${status}${total ? `: ${digits(completed)} of ${digits(total)}` : ""}`;
      if ($("finding-text").textContent !== text) $("finding-text").textContent = text;
    }
    picked = null;
    await load();
    announce(`${points.length} plans were found.`);
  } catch (error) {
    if (error instanceof ApiError) $("front-notice").textContent = error.message;
    else if (error.name !== "AbortError") throw error;
  } finally {
    const hadFocus = document.activeElement === $("stop-finding");
    finding = null;
    showFinding();
    if (hadFocus) $("find-plans").focus();
  }
}

function showFinding() {
  $("finding").hidden = $("stop-finding").hidden = !finding;
  $("find-plans").hidden = Boolean(finding);
  if (!finding) return;
  $("front-notice").textContent = "";
  $("finding-text").textContent = "Starting";
  $("finding-progress").removeAttribute("value");
  $("stop-finding").focus();
}

// --- the selected plan ---

function pick(point) {
  picked = point;
  if (!switching) message = "";
  plot();
  foresee();
  describe();
}

// Buttons for the plans that most people look for. A plan that is best in several ways has one button.
function picks() {
  const best = (list, figure) => list.reduce((a, b) => figure(b) > figure(a) ? b : a);
  const choices = [[points.length > 1 ? "Best balance" : "The best plan", points.find(point => point.knee)],
    ["Fastest single answer", best(points, point => -point.latency_s)],
    ["Most answers at once", best(points, point => point.throughput_per_s)], ["This device alone", single]];
  const first = new Map();
  for (const [text, point] of choices) {
    if (point && !first.has(point)) first.set(point, point === single ? "This device alone" : text);
  }
  $("picks").hidden = first.size < 2;
  $("picks").replaceChildren(...[...first].map(([point, text]) => button(text, "framed", () => pick(point))));
}

// Ask the server what the selected plan would change.
async function foresee() {
  const point = picked;
  changes = null;
  try {
    const answer = await post("v1/plan", {model, plan: point.plan, preview: true});
    if (picked === point) changes = answer;
  } catch (error) {
    if (picked === point) changes = {error: error.message};
  }
  if (picked === point) describe();
}

function describe() {
  if (!picked) return;
  const hadFocus = document.activeElement?.id === "run-plan";
  shownInUse = inUse();
  const memory = typeof picked.memory_bytes === "object" && picked.memory_bytes
    ? Math.max(...Object.values(picked.memory_bytes)) : picked.memory_bytes;
  const used = picked === shownInUse;
  const run = button(switching ? "Switching\u2026" : "Run this plan", "main", change);
  run.id = "run-plan";
  run.disabled = switching;
  const figures = [
    ["one answer", `${digits(1 / picked.latency_s)} tokens/s`],
    [`${picked.in_flight ? `${digits(picked.in_flight)} at once` : "at once"}`, `${digits(picked.throughput_per_s)} tokens/s`],
    Number.isFinite(picked.ttft_s) ? ["first token", seconds(picked.ttft_s)] : null,
    ["memory", `${bytes(memory)} on the fullest device`],
    ["figures", picked.measured ? "measured" : "predicted"],
  ].filter(Boolean);
  const items = changes?.changes ?? ["Asking the server\u2026"];
  const words = changes?.error ? [make("p", {class: "wrong"}, changes.error)] : !items.length ? []
    : [used ? "" : make("h4", {}, "What will change"),
      make("ul", {class: "changes", "aria-busy": String(!changes)}, ...items.map(text => make("li", {}, text)))];
  $("plan").replaceChildren(
    make("h3", {}, title(),
      used ? " \u2013 in use" : ""),
    make("div", {id: "plan-drawn"}),
    make("dl", {}, ...figures.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)))),
    ...words, ...(used ? [] : [run]), make("p", {id: "switched", role: "status"}, message));
  picture();
  if (hadFocus && !used) run.focus();
}

function title() {
  if (points.length === 1 && picked !== single) return "The best plan";
  const number = `Plan ${points.indexOf(picked) + 1} of ${points.length}`;
  return picked === single ? "This device alone" : picked.knee ? `Best balance (${number.toLowerCase()})` : number;
}

function picture() {
  const place = $("plan-drawn");
  if (!place || !picked || place.clientWidth < 100) return;
  const drawn = planPicture(picked.plan, inFront, place.clientWidth);
  place.replaceChildren(...(drawn ? [drawn] : []));
}

async function change() {
  const point = picked, name = model;
  switching = true;
  message = "Switching. Devices may have to receive their parts first; answers in progress continue afterwards.";
  describe();
  try {
    await post("v1/plan", {model: name, plan: point.plan}, PATIENCE_MS);
    message = `${name} runs this plan now.`;
  } catch (error) {
    message = error.message;
  }
  switching = false;
  if (picked === point) foresee();
  plot();
  describe();
  $("plot").focus();
  poll.ask();
}

// --- the chart ---

function plot() {
  const svg = $("plot");
  if (!points.length || !svg.clientWidth) return;
  const used = inUse();
  const width = svg.clientWidth, height = Math.round(Math.min(380, Math.max(240, 0.6 * width)));
  const left = Math.max(...points.map(point => point.throughput_per_s)) < 900 ? 46 : 60;
  const [right, top, bottom] = [width - 14, 14, height - 44];
  const x = scale(points.map(point => 1e3 * point.latency_s), left, right, LOG_FROM);
  const y = scale(points.map(point => point.throughput_per_s), bottom, top, LOG_FROM);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const parts = [];
  for (const value of x.ticks) {
    parts.push(draw("line", {x1: x.at(value), x2: x.at(value), y1: top, y2: bottom, class: "grid"}));
    parts.push(draw("text", {x: x.at(value), y: bottom + 17, "text-anchor": "middle", class: "tick"}, digits(value)));
  }
  for (const value of y.ticks) {
    parts.push(draw("line", {x1: left, x2: right, y1: y.at(value), y2: y.at(value), class: "grid"}));
    parts.push(draw("text", {x: left - 6, y: y.at(value) + 4, "text-anchor": "end", class: "tick"}, digits(value)));
  }
  const middle = (top + bottom) / 2;
  parts.push(
    draw("path", {d: `M${left},${top}V${bottom}H${right}`, fill: "none", class: "axis"}),
    draw("text", {x: (left + right) / 2, y: height - 6, "text-anchor": "middle"}, "latency of one answer (ms a token)"),
    draw("text", {x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`},
      "throughput (tokens/s)"));
  for (const point of points) {
    const [cx, cy] = [x.at(1e3 * point.latency_s), y.at(point.throughput_per_s)];
    const group = draw("g", {class: "point"}, draw("title", {}, point.label || "plan"),
      draw("circle", {cx, cy, r: 16, class: "target"}),
      point === picked ? draw("circle", {cx, cy, r: 11, class: "picked"}) : null,
      draw("circle", {cx, cy, r: 6, class: point === used ? "in-use" : "ring"}),
      point.knee ? draw("text", {x: cx, y: cy - 15, "text-anchor": cx > width - 80 ? "end" : cx < 120 ? "start" : "middle"},
        "best balance") : null);
    group.addEventListener("click", () => pick(point));
    parts.push(group);
  }
  svg.replaceChildren(...parts);
}
