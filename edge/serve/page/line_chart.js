// Line chart of recent values, drawn on a canvas.

import {digits, make} from "./dom.js";

const KEPT = 120;  // number of values; one is added each second
const HEIGHT = 72;

/** Chart of one value over time. `unit`: unit of its labels. */
export class LineChart {
  constructor(unit) {
    this.unit = unit;
    this.values = [];
    this.canvas = make("canvas", {role: "img"});
    this.element = make("div", {class: "chart"}, this.canvas);
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Add the next value. Anything but a number counts as 0. */
  add(value) {
    this.values.push(Number.isFinite(value) ? value : 0);
    if (this.values.length > KEPT) this.values.shift();
    const highest = digits(Math.max(...this.values));
    this.canvas.setAttribute("aria-label", `${this.unit} over the last two minutes; the maximum was ${highest}`);
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth, zoom = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.width = Math.round(width * zoom);
    this.canvas.height = Math.round(HEIGHT * zoom);
    const context = this.canvas.getContext("2d"), colors = getComputedStyle(this.element);
    const color = name => colors.getPropertyValue(name).trim();
    context.scale(zoom, zoom);
    const top = Math.max(1, ...this.values) * 1.1, bottom = HEIGHT - 1;
    const x = i => width - 1 - (this.values.length - 1 - i) * (width - 2) / (KEPT - 1);
    const y = value => bottom - value / top * (bottom - 14);
    context.strokeStyle = color("--grid");
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(bottom - part * (bottom - 14)) + 0.5;
      context.beginPath();
      context.moveTo(0, at);
      context.lineTo(width, at);
      context.stroke();
    }
    context.fillStyle = color("--quiet");
    context.font = `11px ${colors.fontFamily}`;
    context.fillText(`${digits(Number(top.toPrecision(2)))} ${this.unit}`, 0, 10);
    context.textAlign = "right";
    context.fillText("last 2 minutes", width, 10);
    if (!this.values.length) return;
    context.beginPath();
    this.values.forEach((value, i) => context.lineTo(x(i), y(value)));
    context.strokeStyle = color("--good");
    context.lineWidth = 1.8;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(this.values.length - 1), bottom);
    context.lineTo(x(0), bottom);
    context.globalAlpha = 0.12;
    context.fillStyle = color("--good");
    context.fill();
  }
}
