// Helpers for elements and numbers. Text is inserted as text, never as HTML.

// Characters that reorder text, by which a name could look like another one.
const REORDERING = /[\u202a-\u202e\u2066-\u2069]/g;

const ICONS = {
  pencil: "M4 20l1-5L16 4l4 4L9 19zM14 6l4 4", bin: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  left: "M15 5l-7 7 7 7", right: "M9 5l7 7-7 7",
};

const SVG = "http://www.w3.org/2000/svg";

export const $ = id => document.getElementById(id);

/** Return a text whose reordering characters are visible. Every text that is shown passes through this function. */
export function plain(text) { return String(text).replace(REORDERING, "\ufffd"); }

/** Create an element. Children may be nested in lists. Null children are skipped, and values become text nodes. */
export function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function draw(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, plain(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : plain(child));
  }
  return element;
}

/** Create a button that calls `act`. */
export function button(text, style, act) {
  const element = make("button", {type: "button", class: style}, text);
  element.addEventListener("click", act);
  return element;
}

/** Create a button with an icon of this page. `name`: what it does. */
export function iconButton(icon, name, act) {
  const element = button(draw("svg", {viewBox: "0 0 24 24", "aria-hidden": "true"}, draw("path", {d: ICONS[icon]})),
    "icon", act);
  element.setAttribute("aria-label", plain(name));
  element.title = plain(name);
  return element;
}

/** Format a number with three significant digits; "-" if it is not a number. */
export function digits(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  return Math.abs(value) < 999.5 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
}

/** Format an integer with thin spaces between thousands; "-" if it is not a number. */
export function count(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** Focus the question field, except on touch screens, where a keyboard would cover half of the screen. */
export function toQuestion() {
  if (matchMedia("(pointer: fine)").matches) $("question").focus();
}

/** Format a number of bytes in B, KiB, MiB, GiB or TiB. */
export function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  if (Math.abs(value) < 1024) return `${value} B`;
  let unit = -1;
  while ((Math.abs(value) >= 1023.5 || unit < 0) && unit < 3) { value /= 1024; unit += 1; }
  const number = Math.abs(value) < 999.5 ? Number(value.toPrecision(3)) : value.toFixed(0);
  return `${number} ${["KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** Format a time in seconds. */
export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  if (value < 1) return `${digits(1e3 * value)} ms`;
  if (value < 90) return `${digits(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** Format a number with a noun: "1 token", "2 tokens". */
export function plural(number, word) { return `${count(number)} ${word}${number === 1 ? "" : "s"}`; }

/** Announce a text to screen readers. */
export function announce(text) { $("announce").textContent = plain(text); }

/** Copy a text to the clipboard. Return false if the browser does not allow it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no clipboard object, so use the older method.
    const area = make("textarea", {class: "unseen", readonly: ""});
    area.value = text;
    (document.querySelector("dialog[open]") || document.body).append(area);  // a dialog disables all else
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Create a button that copies the result of `text()` and shows whether that worked. */
export function copyButton(text, style) {
  const element = button("Copy", style, async () => {
    element.textContent = await copy(text()) ? "Copied" : "Not copied";
    setTimeout(() => { element.textContent = "Copy"; }, 1500);
  });
  return element;
}
