"use strict";
// The chosen plan, the table, and the event handlers. All text from the data is written as text, never as HTML.

const {result, view} = JSON.parse(document.getElementById("data").textContent);
const points = result.points;
const byId = new Map(points.map(point => [point.id, point]));
const [shown, near] = [new Set(view.shown), new Set(view.near)];
const KINDS = ["single", "pipeline", "tensor", "hybrid", "replicas"];
const UNIT = result.kind === "llm" ? "tokens" : "inputs";
const byLatency = (a, b) => latency(a) - latency(b) || throughput(b) - throughput(a);
const anyMeasured = points.some(point => point.measured);

const state = {kept: null, seen: null, which: "near", sort: "latency", up: true};
const $ = id => document.getElementById(id);

// Figures.

function latency(point) { return 1e3 * point.predicted.latency_s; }
function throughput(point) { return point.predicted.throughput_per_s; }
function needed(figures) { return Object.values((figures && figures.memory_bytes) || {}); }
function memory(point) { return Math.max(0, ...needed(point.predicted)); }

function digits(value) {
  if (value === null || value === undefined) return "-";
  return Math.abs(value) < 999.5 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
}

function bytes(value) {
  if (value === null || value === undefined) return "-";
  if (Math.abs(value) < 1024) return `${value} B`;
  let unit = -1;
  while ((Math.abs(value) >= 1023.5 || unit < 0) && unit < 3) { value /= 1024; unit += 1; }
  return `${Math.abs(value) < 999.5 ? value.toPrecision(3) : value.toFixed(0)} ${["KiB", "MiB", "GiB", "TiB"][unit]}`;
}

function off(predicted, measured) {
  if (!measured || predicted === null || predicted === undefined) return "";
  const percent = Math.round(100 * (predicted / measured - 1));
  return `${percent > 0 ? "+" : ""}${percent} %`;
}

// Elements.

function make(tag, attributes, ...children) { return fill(document.createElement(tag), attributes, children); }
function draw(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  const given = children.filter(child => child !== null && child !== undefined);
  element.append(...given.map(child => child instanceof Node ? child : String(child)));
  return element;
}
function kind(point) { return KINDS.includes(point.parallel) ? point.parallel : "single"; }

// The chosen plan.

function current() { return state.seen || state.kept; }

function show() {
  const point = current(), place = places.find(one => one.point === point);
  const ring = $("chosen");
  if (ring) {
    ring.setAttribute("visibility", place ? "visible" : "hidden");
    if (place) { ring.setAttribute("cx", place.x); ring.setAttribute("cy", place.y); }
  }
  for (const row of $("rows").children) row.setAttribute("aria-selected", String(row.dataset.id === point.id));
  if ($("details").dataset.id !== point.id) describe(point);
}

function describe(point) {
  const {predicted, measured} = point;
  const badges = [point.id, point.type, point.parallel, point.on_front ? "on the front" : "dominated",
    ...(view.roles[point.id] || []),
    point.measured_on_front ? "on the front as measured" : null,
    anyMeasured && !point.measured ? "not measured" : null];
  const rows = view.figures.filter(({key}) => (predicted[key] ?? null) !== null).map(({key, scale, name}) => {
    const [said, found] = [scale * predicted[key], measured && measured[key] && scale * measured[key]];
    return figureRow(name, digits(said), found ? digits(found) : "-", off(said, found));
  });
  const [said, found] = [predicted.memory_bytes || {}, (measured && measured.memory_bytes) || {}];
  for (const device of new Set([...Object.keys(said), ...Object.keys(found)])) {
    const [a, b] = [said[device], found[device]];
    rows.push(figureRow(`memory, ${device}`, bytes(a), bytes(b), off(a, b)));
  }
  const heads = ["", "predicted", measured ? "measured" : "", measured ? "error" : ""];
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((name, i) =>
    make("th", {class: i ? "number" : null}, name)))), make("tbody", {}, ...rows));
  if (!measured) table.querySelectorAll("tr").forEach(row => { row.children[3].remove(); row.children[2].remove(); });

  const copies = predicted.copies || [predicted];
  const stages = copies.flatMap(copy => copy.stages || []);
  const longest = Math.max(...stages.map(stage => stage.compute_s + stage.transfer_s));
  const batches = point.microbatches > 1 ? `${point.microbatches} microbatches` : "one batch";
  $("details").dataset.id = point.id;
  $("details").replaceChildren(...[
    make("h2", {}, point.label),
    make("div", {class: color(point)}, ...badges.filter(Boolean).map(text => make("span", {class: "badge"}, text))),
    table,
    point.error ? make("p", {class: "wrong"}, `Measuring failed: ${point.error}`) : null,
    predicted.bound ? make("p", {}, `Limit: ${predicted.bound}.`) : null,
    ...copies.length === 1
      ? [make("h3", {}, `${stages.length === 1 ? "One stage" : `${stages.length} stages`}, ${batches} under way`),
        ...stages.map((stage, i) => stageOf(stage, i, longest))]
      : copies.flatMap((copy, n) => [
        make("h3", {}, `Copy ${n + 1}: ${copy.in_flight === 1 ? "one request" : `${copy.in_flight} requests`}, ` +
          `${digits(copy.throughput_per_s)} tokens/s`),
        ...copy.stages.map((stage, i) => stageOf(stage, i, longest))]),
    make("p", {class: "quiet"}, "Bars: computing, then sending."),
    make("h3", {}, "Use it"),
    ...view.commands[point.id].map(command => make("code", {}, command)),
    point.plan
      ? make("details", {}, make("summary", {}, "The plan as JSON"),
        make("pre", {}, JSON.stringify(point.plan, null, 1)))
      : make("p", {class: "quiet"}, "This device alone needs no plan."),
  ].filter(Boolean));
}

function figureRow(name, ...cells) {
  return make("tr", {}, make("th", {scope: "row"}, name), ...cells.map(cell => make("td", {class: "number"}, cell)));
}

function stageOf(stage, i, longest) {
  const [compute, transfer] = [stage.compute_s, stage.transfer_s].map(seconds => 100 * seconds / (longest || 1));
  const held = Object.entries(stage.memory_bytes || {}).map(([device, size]) => `${bytes(size)} on ${device}`);
  return make("div", {class: "stage"},
    make("div", {class: "text"}, make("span", {}, `${i + 1}. ${stage.devices.join(" + ")}: ${stage.what}`),
      make("span", {class: "quiet"}, `${digits(1e3 * stage.compute_s)} + ${digits(1e3 * stage.transfer_s)} ms`)),
    draw("svg", {viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true"},
      draw("rect", {width: compute, height: 8, class: "compute"}),
      draw("rect", {x: compute, width: transfer, height: 8, class: "transfer"})),
    make("div", {class: "quiet"}, held.join(", ")));
}

// The table.

const measuredColumn = (name, what, factor) => ({
  name, head: "measured", value: point => point.measured && point.measured[what],
  text: point => point.measured ? digits(factor * point.measured[what]) : "-",
});
const COLUMNS = [
  {name: "id", text: point => point.id + (point.knee ? " *" : "")},
  {name: "latency", head: "latency, ms", value: latency, text: point => digits(latency(point))},
  anyMeasured ? measuredColumn("latency_measured", "latency_s", 1e3) : null,
  {name: "throughput", head: `${UNIT}/s`, value: throughput, text: point => digits(throughput(point))},
  anyMeasured ? measuredColumn("throughput_measured", "throughput_per_s", 1) : null,
  {name: "memory", head: "memory, fullest", value: memory, text: point => bytes(memory(point) || null)},
  view.types.length ? {name: "type", text: point => point.type || "-"} : null,
  view.by_type ? {name: "divergence", head: "divergence, nats", value: point => point.predicted.divergence,
    text: point => digits(point.predicted.divergence)} : null,
  {name: "kind", text: point => point.parallel},
  {name: "plan", text: point => point.label, style: "plan"},
].filter(Boolean);

function list() {
  $("heads").replaceChildren(make("tr", {}, ...COLUMNS.map(column => {
    if (!column.value) return make("th", {}, column.name);
    const sorted = state.sort === column.name;
    const button = make("button", {type: "button"}, column.head + (sorted ? (state.up ? " \u25b2" : " \u25bc") : ""));
    button.addEventListener("click", () => {
      // The best value comes first: the least latency and memory, the highest throughput.
      state.up = sorted ? !state.up : !column.name.startsWith("throughput");
      state.sort = column.name;
      list();
      [...$("heads").querySelectorAll("button")].find(one => one.textContent.startsWith(column.head) &&
        one.closest("th").hasAttribute("aria-sort")).focus();
    });
    return make("th", {class: "number", "aria-sort": sorted ? (state.up ? "ascending" : "descending") : null}, button);
  })));
  const value = COLUMNS.find(column => column.name === state.sort).value;
  const worst = state.up ? Infinity : -Infinity;  // what was not measured comes last
  const key = point => value(point) ?? worst;
  const rows = visible().sort((a, b) => key(a) === key(b) ? 0 : (key(a) < key(b)) === state.up ? -1 : 1);
  $("rows").replaceChildren(...rows.map(point => {
    const row = make("tr", {class: point.on_front ? null : "off"}, ...COLUMNS.map((column, i) => {
      const text = column.text(point);
      const style = column.value ? "number" : column.style;
      return make("td", {class: style}, i ? text : make("button", {type: "button"}, text));
    }));
    row.dataset.id = point.id;
    row.addEventListener("click", () => keep(point));
    return row;
  }));
  show();
}

// Event handlers.

function keep(point) {
  state.kept = point;
  state.seen = null;
  show();
}

function nearest(event) {
  const svg = $("plot"), box = svg.getBoundingClientRect();
  const zoom = svg.viewBox.baseVal.width / box.width;
  const [x, y] = [(event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom];
  // A prominent plan is preferred to a faint one.
  const far = place => Math.hypot(place.x - x, place.y - y) + (shown.has(place.point.id) ? 0 : 4);
  const best = places.reduce((a, b) => far(b) < far(a) ? b : a);
  return far(best) < 28 ? best.point : null;
}

function listen() {
  const svg = $("plot");
  svg.addEventListener("pointermove", event => {
    if (event.pointerType === "touch") return;
    state.seen = nearest(event);
    show();
  });
  svg.addEventListener("pointerleave", () => { state.seen = null; show(); });
  svg.addEventListener("click", event => { const point = nearest(event); if (point) keep(point); });
  svg.addEventListener("keydown", event => {
    const along = visible(), at = along.indexOf(current());
    const next = {ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1};
    const to = {...next, Home: 0, End: along.length - 1}[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    keep(along[Math.min(Math.max(to, 0), along.length - 1)]);
  });
  $("which").addEventListener("change", event => {
    state.which = event.target.value;
    if (!visible().includes(state.kept)) state.kept = byId.get(view.line[0]);
    list();
    plot();
  });
  new ResizeObserver(plot).observe(svg.parentElement);
}

function legend() {
  const icon = (name, drawn) => draw("svg", {viewBox: "0 0 14 14", class: name, "aria-hidden": "true"}, drawn);
  const sample = (name, shape) => icon(null, mark(7, 7, shape, 5, {class: name}));
  const entry = (drawn, text) => make("li", {}, drawn, text);
  const block = draw("rect", {y: 3, width: 14, height: 8, fill: "currentColor"});
  const kinds = KINDS.filter(name => points.some(point => point.parallel === name));
  $("legend").replaceChildren(
    ...(view.by_type
      ? [...view.types.map(type => entry(icon(typeColor(type), block.cloneNode()), view.type_labels[type])),
        ...kinds.map(name => entry(sample("mark", KINDS.indexOf(name)), name))]
      : [...kinds.map(name => entry(icon(name, block.cloneNode()), name)),
        ...view.types.map((type, i) => entry(sample("mark", i), type))]),
    entry(sample("ring", 0), "predicted"),
    ...(anyMeasured ? [entry(sample("mark", 0), "measured")] : []),
  );
}

for (const option of $("which").options) {
  state.which = option.value;
  option.textContent += ` (${visible().filter(point => !point.on_front).length})`;
}
state.which = "near";

$("model").textContent = result.model;
const atOnce = `${result.concurrency} ${UNIT === "tokens" ? "sequences" : "inputs"} at once`;
$("about").textContent = `on ${view.devices.join(", ")}; ${atOnce}`;
$("notes").replaceChildren(...view.notes.map(note => make("p", {}, note)));
state.kept = points.find(point => point.knee && point.on_front) || byId.get(view.line[0]);
legend();
list();
plot();
listen();
