// Models to download: what fits the devices, and the downloads with their progress.

import {ApiError, get, lines, remove} from "./api.js";
import {$, announce, button, bytes, digits, make, plain, plural} from "./dom.js";

const EVERY_MS = 1000;
const AGAIN_MS = 60000;  // the advice changes with the devices
const CANCELLED = "Cancelled. The next download of it continues here.";
const FEW = 8;           // rows until all are shown

let changed = () => {};  // called when a model has arrived
let advice = {rows: [], state: "computing"};
let here = new Set();    // names of the models on the server
let allowed = true;
let all = false;         // show all rows
let looking = false;
let pullTimer = null, adviceTimer = null;
const items = new Map(); // Download by name

/** Install the event handlers. `then` is called when a model has arrived. */
export function start(then) {
  changed = then;
  $("pull-form").addEventListener("submit", event => {
    event.preventDefault();
    const name = $("pull-name").value.trim();
    if (!name) return $("pull-name").focus();
    $("pull-name").value = "";
    pull(name);
  });
  $("all-models").addEventListener("click", () => { all = !all; table(); });
}

/** Begin to refresh. */
export function look() {
  if (looking) return;
  looking = true;
  askAdvice();
  askPulls();
}

/** Stop refreshing. Downloads go on. */
export function lookAway() {
  looking = false;
  clearTimeout(pullTimer);
  clearTimeout(adviceTimer);
}

/** Set the models of the server, items of GET v1/models. */
export function setModels(models) {
  const names = models.map(model => model.id);
  if (names.length === here.size && names.every(name => here.has(name))) return;
  here = new Set(names);
  table();
}

// --- downloads ---

async function askPulls() {
  clearTimeout(pullTimer);
  const began = performance.now();
  try {
    const pulls = await get("v1/pulls");
    allowed = pulls.allowed;
    $("pull-form").hidden = !allowed;
    $("no-pulls").hidden = allowed;
    for (const {model, completed, total} of pulls.data) {
      if (!(items.get(model)?.endedAt > began)) item(model).progress(completed, total);  // otherwise the answer is old
    }
    const running = new Set(pulls.data.map(entry => entry.model));
    for (const [name, download] of items) {
      if (!running.has(name) && download.isWatched && !download.isOwn) {
        download.end(download.isCancelled ? CANCELLED : "", here.has(name));
      }
    }
    if (!allowed) table();
  } catch (error) {
    if (error.status === 401) return;
  }
  clearTimeout(pullTimer);
  if (looking) pullTimer = setTimeout(askPulls, items.size ? EVERY_MS : 5 * EVERY_MS);
}

function item(name) {
  if (!items.has(name)) {
    items.set(name, new Download(name));
    $("pulls").append(items.get(name).element);
  }
  return items.get(name);
}

async function pull(name) {
  const download = item(name);
  if (download.isOwn) return;
  download.isOwn = true;
  download.begin();
  table();
  askPulls();
  announce(`${name} is being downloaded.`);
  try {
    for await (const {completed, total} of lines("api/pull", {model: name})) {
      if (total) download.progress(completed, total);
    }
    download.end("", true);
    announce(`${name} is here now.`);
    changed();
  } catch (error) {
    if (!(error instanceof ApiError) && error.name !== "TypeError") throw error;
    download.end(download.isCancelled ? CANCELLED : error.message, false);
  }
  download.isOwn = false;
  table();
}

class Download {
  constructor(name) {
    this.name = name;
    this.isOwn = this.isCancelled = this.isWatched = false;
    this.endedAt = 0;
    this.bar = make("progress", {"aria-label": `Download of ${name}`});
    this.text = make("span", {class: "quiet"});
    this.wrong = make("p", {class: "wrong", role: "status"});
    this.cancel = button("Cancel", "framed", () => this.stop());
    this.cancel.setAttribute("aria-label", `Cancel the download of ${name}`);
    this.again = button("Try again", "framed", () => pull(name));
    this.again.setAttribute("aria-label", `Try the download of ${name} again`);
    this.close = button("Close", "framed", () => { items.delete(name); this.element.remove(); $("pull-name").focus(); });
    this.close.setAttribute("aria-label", `Close the message about ${name}`);
    this.element = make("li", {class: "card"}, make("div", {class: "bar"}, make("strong", {}, name), this.text),
      this.bar, this.wrong, make("div", {class: "actions"}, this.cancel, this.again, this.close));
    this.begin();
  }

  begin() {
    this.isCancelled = false;
    this.wrong.textContent = "";
    this.text.textContent = "Asking where it is";
    this.bar.removeAttribute("value");
    this.bar.hidden = this.cancel.hidden = false;
    this.close.hidden = this.again.hidden = true;
  }

  progress(done, total) {
    if (!this.close.hidden) this.begin();  // another tab began it again
    this.isWatched = true;
    if (!total) return;
    this.bar.max = total;
    this.bar.value = done;
    this.text.textContent = `${bytes(done)} of ${bytes(total)}`;
  }

  end(error, arrived) {
    this.isWatched = false;
    this.endedAt = performance.now();
    this.wrong.textContent = error;
    this.text.textContent = arrived ? "Downloaded" : "";
    this.bar.hidden = this.cancel.hidden = true;
    this.close.hidden = this.again.hidden = false;
    if (!arrived && !error) this.wrong.textContent = "The download has ended, but the model is not here.";
    if (arrived) {
      this.element.remove();
      items.delete(this.name);
      changed();
    }
  }

  async stop() {
    this.isCancelled = true;
    this.text.textContent = "Cancelling\u2026";
    try {
      await remove(`v1/pulls/${this.name.split("/").map(encodeURIComponent).join("/")}`);
    } catch (error) {
      if (error.status !== 404) this.wrong.textContent = error.message;
    }
  }
}

// --- advice ---

async function askAdvice() {
  clearTimeout(adviceTimer);
  try {
    advice = await get("v1/advice");
    table();
  } catch (error) {
    $("advice-state").textContent = error.message;
    if (error.status === 401) return;
  }
  clearTimeout(adviceTimer);
  if (looking) adviceTimer = setTimeout(askAdvice, advice.state === "computing" ? EVERY_MS : AGAIN_MS);
}

function table() {
  const rows = advice.rows || [];
  const words = {computing: "Comparing published models with the devices\u2026", failed: advice.error,
    ready: `Expected speeds on ${deviceWords()}, from estimates. Larger models usually answer better.`};
  $("advice-state").textContent = words[advice.state] ?? "";
  const shown = all ? rows : best(rows);
  const text = JSON.stringify([shown.map(row => [row.model, row.type, row.tokens_per_s, isHere(row)]), allowed,
    [...items].filter(([, download]) => download.isOwn || download.isWatched).map(([name]) => name)]);
  $("all-models").hidden = rows.length <= shown.length && !all;
  $("all-models").textContent = all ? "Show fewer" : `Show all ${rows.length} models`;
  if ($("advice").dataset.shown === text) return;
  $("advice").dataset.shown = text;
  $("advice").replaceChildren(...shown.map(rowItem));
}

function deviceWords() {
  const names = (advice.devices || []).map(name => name === "local" ? "this device" : name);
  return names.length > 3 ? plural(names.length, "device") : new Intl.ListFormat("en").format(names.map(plain)) || "this device";
}

// The rows that a person most likely wants: those that no other model beats, fast enough to read along.
function best(rows) {
  const fitting = rows.filter(row => row.on_front && row.tokens_per_s >= 3);
  return (fitting.length ? fitting : rows.filter(row => row.tokens_per_s)).slice(-FEW);
}

function isHere(row) { return here.has(row.pull) || (row.pull === row.model && here.has(row.source)); }

function rowItem(row) {
  const [fits, kind] = fitWords(row);
  const download = items.get(row.pull);
  const busy = download && (download.isOwn || download.isWatched);
  const get = button(`Download ${bytes(row.size_bytes)}`, "framed", () => pull(row.pull));
  get.setAttribute("aria-label", `${get.textContent}: ${row.model} ${row.type}`);
  get.disabled = busy;
  return make("li", {class: "card"},
    make("div", {class: "bar"}, make("strong", {}, row.model), make("span", {class: "quiet"}, row.type)),
    make("p", {}, make("span", {class: "state", "data-value": kind}, fits),
      row.tokens_per_s ? `, about ${digits(row.tokens_per_s)} tokens/s` : ""),
    make("p", {class: "quiet"}, [row.licence ? `Licence: ${row.licence}` : null,
      row.placement === "none" ? row.why : null].filter(Boolean).join(". ")),
    isHere(row) ? make("p", {class: "quiet"}, "On this server") : row.pull && allowed ? get : null);
}

function fitWords(row) {
  const own = (advice.devices || [])[0], devices = Object.keys(row.memory_bytes || {});
  if (row.placement === "none") return ["Too large", "failed"];
  if (row.placement === "paged") return ["Larger than the memory: slow", "slow"];
  if (devices.length > 1) {
    const needed = Object.values(row.memory_bytes).reduce((sum, n) => sum + n, 0);
    const room = advice.memory_bytes?.[own];
    return [needed > room ? `Needs ${devices.length} devices` : `Faster on ${devices.length} devices`, "loaded"];
  }
  return [devices[0] === own ? "Fits this device" : `Fits on ${devices[0]}`, "loaded"];
}
