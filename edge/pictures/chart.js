"use strict";
// Chart of the plans, as SVG. The other script has the functions for figures and elements.

// Kinds have colors and types have shapes; the reverse if plans have several types.
function color(point) { return view.by_type ? typeColor(point.type) : kind(point); }
function typeColor(type) { return `type${Math.max(0, view.types.indexOf(type)) % 7}`; }
function shape(point) { return view.by_type ? KINDS.indexOf(kind(point)) : view.types.indexOf(point.type); }

function mark(x, y, shape, size, attributes) {
  const at = Math.max(0, shape) % 5, s = size;
  const path = [
    `M${x - s},${y}a${s},${s} 0 1 0 ${2 * s},0a${s},${s} 0 1 0 ${-2 * s},0z`,
    `M${x - s},${y - s}h${2 * s}v${2 * s}h${-2 * s}z`,
    `M${x},${y - 1.2 * s}l${1.2 * s},${2.1 * s}h${-2.4 * s}z`,
    `M${x},${y - 1.35 * s}l${1.35 * s},${1.35 * s}l${-1.35 * s},${1.35 * s}l${-1.35 * s},${-1.35 * s}z`,
    `M${x},${y + 1.2 * s}l${1.2 * s},${-2.1 * s}h${-2.4 * s}z`,
  ][at];
  return draw("path", {d: path, ...attributes});
}

// A mark with hover text that describes its plan.
function named(point, mark) {
  const figures = `${digits(latency(point))} ms, ${digits(throughput(point))} ${UNIT}/s`;
  const words = [point.id, ...(view.roles[point.id] || [])].join(", ");
  mark.append(draw("title", {}, `${words}: ${point.label}; ${figures}`));
  return mark;
}

// The plans that the chart and the table show, by the user's choice, sorted by latency.
function visible() {
  const wanted = {all: () => true, near: point => near.has(point.id), none: () => false}[state.which];
  return points.filter(point => shown.has(point.id) || wanted(point)).sort(byLatency);
}

let places = [];  // what the pointer can be near: {point, x, y}

function plot() {
  const svg = $("plot"), width = Math.max(280, svg.clientWidth), height = Math.min(540, Math.max(320, 0.6 * width));
  const [left, right, top, bottom] = [52, width - 12, 12, height - 44];
  const all = visible(), faint = all.filter(point => !shown.has(point.id));
  const out = all.filter(point => shown.has(point.id));
  const measured = out.filter(point => point.measured);
  const x = scale([...all.map(latency), ...measured.map(point => 1e3 * point.measured.latency_s)], left, right, view.log_from);
  const y = scale([...all.map(throughput), ...measured.map(point => point.measured.throughput_per_s)], bottom, top, view.log_from);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  // The measured value if available, else the predicted one.
  const seen = point => point.measured
    ? {point, x: x.at(1e3 * point.measured.latency_s), y: y.at(point.measured.throughput_per_s)}
    : {point, x: x.at(latency(point)), y: y.at(throughput(point))};
  places = all.map(seen);
  const at = new Map(places.map(place => [place.point.id, place]));

  const stairs = ids =>
    `M${at.get(ids[0]).x},${bottom}${ids.map(id => `H${at.get(id).x}V${at.get(id).y}`).join("")}H${right}`;
  const corners = stairs(view.line);
  const parts = [draw("path", {d: `${corners}V${bottom}z`, class: "area"})];
  for (const value of x.ticks) {
    parts.push(draw("line", {x1: x.at(value), x2: x.at(value), y1: top, y2: bottom, class: "grid"}));
    parts.push(draw("text", {x: x.at(value), y: bottom + 17, "text-anchor": "middle", class: "tick"}, digits(value)));
  }
  for (const value of y.ticks) {
    parts.push(draw("line", {x1: left, x2: right, y1: y.at(value), y2: y.at(value), class: "grid"}));
    parts.push(draw("text", {x: left - 6, y: y.at(value) + 4, "text-anchor": "end", class: "tick"}, digits(value)));
  }
  parts.push(draw("path", {d: `M${left},${top}V${bottom}H${right}`, fill: "none", class: "axis"}));
  const under = result.kind === "llm" ? "latency (ms a token)" : "latency (ms)";
  parts.push(draw("text", {x: (left + right) / 2, y: height - 6, "text-anchor": "middle"}, under));
  const middle = (top + bottom) / 2;
  const beside = {x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`};
  parts.push(draw("text", beside, `throughput (${UNIT}/s)`));

  for (const point of faint) {
    parts.push(named(point, mark(at.get(point.id).x, at.get(point.id).y, shape(point), 3.2, {class: `faint ${color(point)}`})));
  }
  parts.push(draw("path", {d: corners, class: "front"}));
  for (const [type, ids] of Object.entries(view.lines)) {
    parts.push(draw("path", {d: stairs(ids), class: `front colored ${typeColor(type)}`}));
  }
  const rings = [];
  for (const point of out) {
    const place = at.get(point.id);
    if (point.knee) parts.push(draw("circle", {cx: place.x, cy: place.y, r: 14, class: `halo ${color(point)}`}));
    if (point.measured) {
      const [px, py] = [x.at(latency(point)), y.at(throughput(point))];
      parts.push(draw("line", {x1: px, y1: py, x2: place.x, y2: place.y, class: `joined ${color(point)}`}));
      rings.push(named(point, mark(px, py, shape(point), 5.5, {class: `ring ${color(point)}`})));
      places.push({point, x: px, y: py});
    }
    const style = `${point.measured ? "mark" : "ring"} ${color(point)}`;
    rings.push(named(point, mark(place.x, place.y, shape(point), 5.5, {class: style})));
  }
  const ids = out.map(point => draw("text", {x: at.get(point.id).x - 8, y: at.get(point.id).y - 7,
    "text-anchor": "end", class: `id ${color(point)}${point.knee ? " knee" : ""}`}, point.id));
  svg.replaceChildren(...parts, ...rings, ...ids, draw("circle", {id: "chosen", class: "chosen", r: 11}));
  show();
}
