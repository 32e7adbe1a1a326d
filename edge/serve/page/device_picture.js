// A picture of the devices: those of a plan in the order of their stages, below them the others, and the links.

import {linkText, partText, WORDS} from "./devices.js";
import {draw, plain} from "./dom.js";

const [WIDTH, HEIGHT, GAP, BELOW] = [178, 84, 92, 62];  // of a device, and the space beside and below it
const LEAST = 560;    // a narrower view shows only the cards
const MOST = 16;      // with more devices, the cards alone are clearer
const LETTERS = 20;   // of a name

/** A picture that is drawn again when the devices change. */
export class DevicePicture {
  constructor(svg) {
    this.svg = svg;
    this.state = null;
    new ResizeObserver(() => this.state && this.draw()).observe(svg.parentElement);
  }

  /** Show devices and links as GET /v1/cluster has them. */
  show(devices, links, models) {
    this.state = {devices, links, models};
    this.draw();
  }

  draw() {
    const {devices, links, models} = this.state, width = this.svg.parentElement.clientWidth - 32;
    const room = Math.min(width, 1088);
    this.svg.toggleAttribute("hidden", room < LEAST || devices.length < 2 || devices.length > MOST);
    if (this.svg.hasAttribute("hidden")) return;
    const active = models.some(status => (status.slots || []).some(slot => slot.is_processing));
    const places = placed(devices, room);
    const shown = JSON.stringify([room, active, links.map(link => [link.from, link.to, linkText(link)]), devices.map(device =>
      [device.name, device.state, device.text, Math.round(20 * device.busy), device.models.map(partText)])]);
    if (shown === this.shown) return;
    this.shown = shown;
    const height = Math.max(...[...places.values()].map(place => place.y)) + HEIGHT + 4;
    this.svg.setAttribute("viewBox", `0 0 ${room} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("aria-label", plain(words(devices, links)));
    const main = mainModel(devices);
    this.svg.replaceChildren(...links.map(link => line(link, places, devices, active)).filter(Boolean),
      ...devices.map(device => node(device, places.get(device.name), main)));
  }
}

// Return the place of each device: first those that hold parts of models, by rank, then the others in further rows.
function placed(devices, room) {
  const rank = device => Math.min(...device.models.map(part => part.rank ?? 99));
  const used = devices.filter(device => device.models.length).sort((a, b) => rank(a) - rank(b));
  const others = devices.filter(device => !device.models.length);
  const columns = Math.max(1, Math.floor((room + GAP) / (WIDTH + GAP)));
  const places = new Map();
  let y = 30;  // room for the arcs
  for (const group of [used, others]) {
    for (let i = 0; i < group.length; i += columns) {
      const row = group.slice(i, i + columns);
      const left = (room - row.length * WIDTH - (row.length - 1) * GAP) / 2;
      row.forEach((device, k) => places.set(device.name, {x: left + k * (WIDTH + GAP), y}));
      y += HEIGHT + BELOW;
    }
  }
  return places;
}

// Return the name of the model that most devices have a part of: a node has room for one part.
function mainModel(devices) {
  const names = devices.flatMap(device => [...new Set(device.models.map(part => part.model))]);
  const uses = name => names.filter(other => other === name).length;
  return names.reduce((best, name) => best === undefined || uses(name) > uses(best) ? name : best, undefined);
}

function node(device, {x, y}, main) {
  const parts = device.models.filter(part => part.model === main);
  const part = parts.find(({layers}) => layers?.[1] > layers?.[0]) || parts[0] || device.models[0];
  const short = device.name.length > LETTERS ? `${device.name.slice(0, LETTERS - 1)}\u2026` : device.name;
  const layers = part?.layers || [0, 0], all = part?.n_layers || 1, inner = WIDTH - 24;
  return draw("g", {class: `node ${device.state}`, transform: `translate(${x} ${y})`},
    draw("title", {}, `${device.name}: ${device.text}`),
    draw("rect", {class: "glow", width: WIDTH, height: HEIGHT, rx: 9, opacity: Math.min(1, device.busy).toFixed(2)}),
    draw("rect", {class: "box", width: WIDTH, height: HEIGHT, rx: 9}),
    draw("circle", {class: "dot", cx: 17, cy: 21, r: 5}),
    draw("text", {class: "name", x: 29, y: 25}, short),
    draw("text", {class: "tick", x: 12, y: 46}, part ? partText(part) : WORDS[device.state] || device.state),
    part ? draw("text", {class: "tick", x: WIDTH - 12, y: 46, "text-anchor": "end"}, `${Math.round(100 * device.busy)} %`) : null,
    part ? draw("rect", {class: "all", x: 12, y: 60, width: inner, height: 8, rx: 4}) : null,
    part ? draw("rect", {class: "part", x: 12 + inner * layers[0] / all, y: 60,
      width: Math.max(2, inner * (layers[1] - layers[0]) / all), height: 8, rx: 4}) : null);
}

function line(link, places, devices, active) {
  const [a, b] = [places.get(link.from), places.get(link.to)];
  if (!a || !b) return null;
  const [left, right] = a.x <= b.x ? [a, b] : [b, a];
  const state = name => devices.find(device => device.name === name);
  const both = [link.from, link.to].map(state);
  const flows = active && both.every(device => device?.models.length && device.state === "computing");
  const label = linkText(link).split(", ");
  let path, at;
  if (a.y !== b.y) {
    const [top, low] = a.y < b.y ? [a, b] : [b, a];
    path = `M${top.x + WIDTH / 2} ${top.y + HEIGHT} L${low.x + WIDTH / 2} ${low.y}`;
    at = {x: low.x + WIDTH / 2, y: low.y - 24};
  } else if (right.x - left.x <= WIDTH + GAP + 1) {
    path = `M${left.x + WIDTH} ${left.y + HEIGHT / 2} H${right.x}`;
    at = {x: left.x + WIDTH + GAP / 2, y: left.y + HEIGHT / 2 - 18};
  } else {
    const [from, to, top] = [left.x + WIDTH / 2, right.x + WIDTH / 2, left.y - 22];
    path = `M${from} ${left.y} C${from} ${top - 8} ${to} ${top - 8} ${to} ${left.y}`;
    at = {x: (from + to) / 2, y: top + 7};
    label.splice(0, label.length, linkText(link));
  }
  return draw("g", {class: flows ? "wire flows" : "wire"}, draw("path", {d: path}),
    ...label.map((text, i) => draw("text", {class: "tick", x: at.x, y: at.y + (i ? 34 : 9), "text-anchor": "middle"}, text)));
}

// Describe the picture for screen readers, which read the cards for more.
function words(devices, links) {
  const each = devices.map(device => `${device.name} is ${WORDS[device.state] || device.state}`);
  return `Devices and links. ${each.join(", ")}. ${links.length} links.`;
}
