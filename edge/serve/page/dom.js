// Elements and figures. Text is always written as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = id => document.getElementById(id);

/** An element. Children may be in lists; those that are null are left out; what is no node becomes text. */
export function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An element of SVG. */
export function draw(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** A button that calls `act`. */
export function button(text, style, act) {
  const element = make("button", {type: "button", class: style}, text);
  element.addEventListener("click", act);
  return element;
}

/** A number with three digits that count, or "-" for none. */
export function digits(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  return Math.abs(value) < 999.5 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
}

/** A whole number with thin spaces between thousands, or "-" for none. */
export function count(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** Put the cursor where questions are written. Not where that would cover half the screen with a keyboard. */
export function toQuestion() {
  if (matchMedia("(pointer: fine)").matches) $("question").focus();
}

/** How many bytes, in KiB, MiB, GiB or TiB. */
export function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  if (Math.abs(value) < 1024) return `${value} B`;
  let unit = -1;
  while ((Math.abs(value) >= 1023.5 || unit < 0) && unit < 3) { value /= 1024; unit += 1; }
  const number = Math.abs(value) < 999.5 ? Number(value.toPrecision(3)) : value.toFixed(0);
  return `${number} ${["KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** A time in seconds, as people say it. */
export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  if (value < 1) return `${digits(1e3 * value)} ms`;
  if (value < 90) return `${digits(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** "1 token", "2 tokens". */
export function plural(number, word) { return `${count(number)} ${word}${number === 1 ? "" : "s"}`; }

/** Tell people who hear the page. */
export function announce(text) { $("announce").textContent = text; }

/** Put a text on the clipboard; false where the browser does not let us. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no clipboard object, but the old way works.
    const area = make("textarea", {class: "unseen", readonly: ""});
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A button that copies what `text()` gives, and says that it did. */
export function copyButton(text, style) {
  const element = button("Copy", style, async () => {
    element.textContent = await copy(text()) ? "Copied" : "Not copied";
    setTimeout(() => { element.textContent = "Copy"; }, 1500);
  });
  return element;
}
