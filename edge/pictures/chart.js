"use strict";
// The chart of the plans, as SVG. What it uses of figures and elements is in the other script.

// Colors and shapes are of kinds and types; where types are chosen between, the other way round.
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

// The plans that the chart and the table show, as the person chose; by latency.
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
  // As measured, where it was; else as predicted.
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
    parts.push(mark(at.get(point.id).x, at.get(point.id).y, shape(point), 3.2, {class: `faint ${color(point)}`}));
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
      rings.push(mark(px, py, shape(point), 5.5, {class: `ring ${color(point)}`}));
      places.push({point, x: px, y: py});
    }
    rings.push(mark(place.x, place.y, shape(point), 5.5, {class: `${point.measured ? "mark" : "ring"} ${color(point)}`}));
  }
  svg.replaceChildren(...parts, ...rings, draw("circle", {id: "chosen", class: "chosen", r: 11}));
  label(svg, out, at, {left, right, top, bottom});
  show();
}

// A few words beside the knee, the best single device and the ends, where they cover least.
function label(svg, out, at, inside) {
  const words = new Map();
  const say = (id, text) => { if (at.has(id)) words.set(id, [...(words.get(id) || []), text]); };
  const choice = points.filter(point => point.on_front).length > 1;
  if (choice) points.filter(point => point.knee && point.on_front).forEach(point => say(point.id, "knee"));
  if (view.best_single !== null) say(view.best_single, "best single device");
  if (choice) {
    say(view.line[0], "least latency");
    say(view.line.at(-1), "most throughput");
  }
  const taken = places.filter(place => shown.has(place.point.id))
    .map(({x, y}) => ({x0: x - 8, x1: x + 8, y0: y - 8, y1: y + 8}));
  const stairs = view.line.map(id => at.get(id));

  function cost(box) {
    const overlaps = taken.filter(o => box.x0 < o.x1 && o.x0 < box.x1 && box.y0 < o.y1 && o.y0 < box.y1).length;
    const outside = box.x0 < inside.left || box.x1 > inside.right || box.y0 < inside.top || box.y1 > inside.bottom;
    let crossed = 0;
    stairs.forEach((corner, i) => {
      const before = i ? stairs[i - 1].y : inside.bottom;
      const after = i + 1 < stairs.length ? stairs[i + 1].x : inside.right;
      crossed += box.x0 < corner.x && corner.x < box.x1 && box.y0 < before && corner.y < box.y1;
      crossed += box.y0 < corner.y && corner.y < box.y1 && box.x0 < after && corner.x < box.x1;
    });
    return 1000 * outside + 300 * overlaps + 60 * crossed + box.far;
  }

  for (const [id, said] of words) {
    const {x, y, point} = at.get(id);
    const text = draw("text", {class: `word ${color(point)}${said.includes("knee") ? " knee" : ""}`},
      `${id}: ${said.join(", ")}`);
    svg.append(text);
    const {width, height} = text.getBBox();
    const boxes = [];
    for (const far of [12, 24, 38]) {
      for (const [dx, dy] of [[-1, -1], [1, 1], [-1, 0], [1, 0], [0, -1], [0, 1], [1, -1], [-1, 1]]) {
        const x0 = dx < 0 ? x - far - width : dx > 0 ? x + far : x - width / 2;
        const y0 = y + dy * (far + (dx ? -4 : 4)) - height / 2;
        boxes.push({x0, y0, x1: x0 + width, y1: y0 + height, far});
      }
    }
    const best = boxes.map(box => ({box, cost: cost(box)})).reduce((a, b) => b.cost < a.cost ? b : a).box;
    taken.push(best);
    text.setAttribute("x", best.x0);
    text.setAttribute("y", best.y0 + 0.78 * height);
  }
}
