// The plans of the Pareto front, plotted as latency against throughput, and the switch to a plan.

import {get, post} from "./api.js";
import {scale} from "./axes.js";
import {$, button, bytes, digits, draw, make} from "./dom.js";

const PATIENCE_MS = 600000;  // timeout of a switch; devices may have to load their slices first
const LOG_FROM = 20;  // an axis is logarithmic if its values span more than this factor

let points = [];      // plans sorted by latency
let picked = null;    // the selected plan
let models = [];      // status of the loaded models
let ofModel = null;   // model of the front, if it names one
let state = "";       // message about the last switch
let switching = false;

/** Load the plans from the server. The section is hidden if there are none. */
export async function load() {
  try {
    const front = await get("v1/front");
    points = (front.points || []).filter(point => point.on_front !== false).map(pointOf)
      .filter(point => Number.isFinite(point.latency_s) && Number.isFinite(point.throughput_per_s))
      .sort((a, b) => a.latency_s - b.latency_s);
    ofModel = front.model ?? null;
  } catch (error) {
    points = [];
    if (error.status !== 404) $("models-notice").textContent = error.message;
  }
  $("front").hidden = !points.length;
  if (!points.length) return;
  mark();
  picked = points.find(point => picked && isSame(point.plan, picked.plan)) || points.find(point => point.chosen) ||
    points[0];
  watch();
  plot();
  describe();
}

// Return a plan with its figures: for output of `edge pareto --json`, the measured ones, or else the predicted ones.
function pointOf(point) {
  return {...point, ...point.predicted, ...point.measured};
}

/** Set the status of the loaded models, which includes the current plan. */
export function setModels(value) {
  models = value;
  if (mark()) { plot(); describe(); }
}

// Mark the plan in use if it is in the list. Return true if the mark changed.
function mark() {
  const plan = served()?.plan;
  const found = plan === undefined ? null : points.find(point => isSame(point.plan, plan));
  if (!found || found.chosen || switching) return false;
  for (const point of points) point.chosen = point === found;
  return true;
}

// Return the model of the plans: the one named in their file, or else the first.
function served() { return models.find(status => status.model.name === ofModel) ?? models[0]; }

// Return true if two plans are equal, regardless of the order of keys.
function isSame(a, b) {
  const sorted = (_, value) => value && typeof value === "object" && !Array.isArray(value)
    ? Object.fromEntries(Object.entries(value).sort(([one], [other]) => one < other ? -1 : 1)) : value;
  return JSON.stringify(a, sorted) === JSON.stringify(b, sorted);
}

let watched = false;

function watch() {
  if (watched) return;
  watched = true;
  new ResizeObserver(plot).observe($("plot").parentElement);
  $("plot").addEventListener("keydown", event => {
    const at = points.indexOf(picked);
    const next = {ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1};
    const to = {...next, Home: 0, End: points.length - 1}[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    pick(points[Math.min(Math.max(to, 0), points.length - 1)]);
  });
}

function pick(point) {
  picked = point;
  if (!switching) state = "";
  plot();
  describe();
}

function describe() {
  const memory = typeof picked.memory_bytes === "object" && picked.memory_bytes
    ? Math.max(...Object.values(picked.memory_bytes)) : picked.memory_bytes;
  const use = button(switching ? "Switching\u2026" : "Switch to this plan", "main", change);
  use.disabled = switching;
  $("plan").replaceChildren(
    make("h3", {}, picked.label || "Plan"),
    make("dl", {},
      ...[["latency", `${digits(1e3 * picked.latency_s)} ms a token`],
        ["throughput", `${digits(picked.throughput_per_s)} tokens/s`],
        ["memory", bytes(memory)]].map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)))),
    picked.chosen ? make("p", {class: "quiet"}, "This plan is in use.")
      : picked.plan ? use : make("p", {class: "quiet"}, "This plan uses only the server's own device."),
    make("p", {id: "switched"}, state),
  );
}

async function change() {
  const wanted = picked;
  switching = true;
  state = "Running answers continue with the new plan.";
  describe();
  try {
    const model = served()?.model.name ?? null;
    const answer = await post("v1/plan", {model, plan: wanted.plan}, PATIENCE_MS);
    state = typeof answer.message === "string" ? answer.message : `The model runs ${wanted.label || "this plan"} now.`;
    for (const point of points) point.chosen = point === wanted;
  } catch (error) {
    state = error.message;
  }
  switching = false;
  plot();
  describe();
  $("plot").focus();
}

function plot() {
  const svg = $("plot");
  if (!points.length || !svg.clientWidth) return;
  const width = svg.clientWidth, height = Math.round(Math.min(380, Math.max(240, 0.6 * width)));
  const [left, right, top, bottom] = [46, width - 14, 14, height - 44];
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
    draw("text", {x: (left + right) / 2, y: height - 6, "text-anchor": "middle"}, "latency (ms a token)"),
    draw("text", {x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`},
      "throughput (tokens/s)"));
  for (const point of points) {
    const [cx, cy] = [x.at(1e3 * point.latency_s), y.at(point.throughput_per_s)];
    const group = draw("g", {class: "point"}, draw("title", {}, point.label || "plan"),
      draw("circle", {cx, cy, r: 16, class: "target"}),
      point === picked ? draw("circle", {cx, cy, r: 11, class: "picked"}) : null,
      draw("circle", {cx, cy, r: 6, class: point.chosen ? "in-use" : "ring"}));
    group.addEventListener("click", () => pick(point));
    parts.push(group);
  }
  svg.replaceChildren(...parts);
}
