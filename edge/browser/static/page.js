// The page that a person sees: joins with the link's token, keeps the device's key, and shows what this device computes.

import { newMemory, canShare } from "./engine.js";
import { Link, join } from "./link.js";

const KEY = "edge-key";
const GIB = 2 ** 30, MIB = 2 ** 20;
const PHONE_BYTES = 1.5 * GIB; // what tabs on phones may use, if the browser does not tell more
const SPEED_WINDOW_MS = 4000;
const COMPUTE = ["decode", "onnx_run"];
const REFUSED = "This device cannot help"; // begin of the bridge's text
const AWAKE_MS = 60_000; // the screen stays on for this long after the last computation
// A module with one SIMD instruction.
const SIMD = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11,
]);

const element = (id) => document.getElementById(id);
let link = null, paused = false, connected = false, loading = 0, lastDecode = 0, awake = null, battery = null;
let lastWork = 0;
let problem = ""; // sentence about the slice that arrived last
let passes = []; // [time, rows] of the last decodes

function show(text, wrong = false) {
  element("state").textContent = text;
  element("state").classList.toggle("wrong", wrong);
}

// Returns why this browser cannot compute, or "".
function obstacle() {
  if (!isSecureContext) return "This page needs an address that begins with https. Open the link exactly as it was shown.";
  if (typeof WebAssembly !== "object" || !WebAssembly.validate(SIMD)) {
    return "This browser has no WebAssembly with SIMD. Use a current Chrome, Firefox, Edge or Safari.";
  }
  if (!navigator.storage?.getDirectory || !crypto.subtle) {
    return "This browser cannot store parts of a model, perhaps since the window is private. Use a normal window.";
  }
  return "";
}

// Returns the bytes that this page may use.
function memoryBytes() {
  const { most_bytes } = newMemory(canShare());
  const apple = /iPhone|iPad/.test(navigator.userAgent) || (/Mac/.test(navigator.userAgent) && navigator.maxTouchPoints > 1);
  const device = navigator.deviceMemory ? navigator.deviceMemory * GIB / 2 : Infinity;
  const phone = apple || (/Android/.test(navigator.userAgent) && !navigator.deviceMemory) ? PHONE_BYTES : Infinity;
  return Math.min(most_bytes, device, phone);
}

const threads = () => (canShare() ? navigator.hardwareConcurrency || 1 : 1);

async function hello() {
  return {
    agent: navigator.userAgent, threads: threads(), memory_bytes: memoryBytes(), isolated: canShare(), simd: true,
    battery: battery?.level ?? null, charging: battery?.charging ?? null,
  };
}

function startWorker(hear, failed) {
  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => hear(data);
  worker.onerror = (event) => failed(event.message || "the script of the worker did not load");
  worker.postMessage({ threads: threads() });
  return { post: (message, transfer) => worker.postMessage(message, transfer), end: () => worker.terminate() };
}

function onState(state, text) {
  connected = state === "connected";
  const ended = ["replaced", "refused", "left"].includes(state);
  element("pause").disabled = element("leave").disabled = ended;
  if (connected && problem.startsWith(REFUSED)) problem = ""; // the bridge tries again
  if (state === "lost") show(`Connection lost, trying again: ${text}.`, true);
  else if (state === "replaced") {
    element("here").hidden = false;
    show("Another tab or window of this browser has taken over.");
  } else if (state === "refused") show(`Not a member: ${text}. Ask the owner for a new link.`, true);
  else if (state === "left") show("This device has left. You can close this page.");
  else update();
  if (paused && connected) link.event("paused"); // the bridge may be a new process
}

function onActivity(name, fields) {
  if (name === "loading") {
    loading = fields.fraction;
  } else if (name === "show") {
    if (fields.text) problem = `${fields.text}. Reload this page to try again.`;
    element("model").textContent = fields.model || "nothing yet";
    element("layers").textContent = fields.layers || "–";
  } else if (name === "full") {
    problem = "The storage for this page is full. Its part of the model is not kept, and is sent again next time.";
  } else if (name === "command") {
    if (COMPUTE.includes(fields.op)) lastDecode = Infinity; // it is running
    if (fields.op === "file") problem = "";
  } else if (name === "reply") {
    const { header, reply } = fields;
    if (reply.heap_bytes) element("memory").textContent = `${Math.round(reply.heap_bytes / MIB)} MB`;
    if (["load", "onnx_load"].includes(header.op)) {
      loading = 0;
      if (reply.error) problem = `This device cannot load its part of the model: ${reply.error}.`;
    }
    if (header.op === "unload") {
      element("memory").textContent = "–";
      element("model").textContent = "nothing yet";
      element("layers").textContent = "–";
    }
    if (COMPUTE.includes(header.op)) lastDecode = Date.now();
    if (header.op === "decode" && reply.code === 0) passes.push([Date.now(), header.n]);
  }
  if (name !== "show") lastWork = Date.now();
  keepAwake();
  update();
}

// Shows the state, if the device is connected, and figures of the last seconds.
function update() {
  const now = Date.now();
  passes = passes.filter(([time]) => now - time < SPEED_WINDOW_MS);
  const rows = passes.reduce((sum, [, count]) => sum + count, 0);
  const span = passes.length ? Math.max(now - passes[0][0], 500) / 1000 : 1;
  element("speed").textContent = rows ? `${(rows / span).toFixed(1)} tokens/s` : "–";
  element("progress").hidden = !loading;
  element("progress").value = loading;
  if (!connected) return;
  if (paused) show("Paused. This device computes nothing.");
  else if (loading) show(`Loading, ${Math.round(loading * 100)} %.`);
  else if (now - lastDecode < 3000) show("Computing.");
  else if (problem) show(problem, true);
  else show(canShare() ? "Ready, waiting for work." : "Ready with one thread, since this page is not isolated.");
}

// Keeps the screen on while this device computes.
async function keepAwake() {
  const wanted = !paused && connected && Date.now() - lastWork < AWAKE_MS;
  if (wanted && !awake && document.visibilityState === "visible") {
    awake = navigator.wakeLock?.request("screen").catch(() => null) ?? null;
    (await awake)?.addEventListener("release", () => { awake = null; });
  } else if (!wanted && awake) {
    (await awake)?.release();
    awake = null;
  }
}

async function watchBattery() {
  battery = (await navigator.getBattery?.().catch(() => null)) ?? null;
  if (!battery) return;
  const report = () => {
    element("battery").parentElement.hidden = false;
    element("battery").textContent = `${Math.round(battery.level * 100)} %${battery.charging ? ", charging" : ""}`;
  };
  battery.addEventListener("levelchange", report);
  battery.addEventListener("chargingchange", report);
  report();
}

// Deletes the slices of this device. The ended worker may hold a file for a moment.
async function dropSlices() {
  const root = await navigator.storage.getDirectory();
  for (let tries = 0; tries < 50; tries++) {
    try {
      return await root.removeEntry("slices", { recursive: true });
    } catch (error) {
      if (error.name === "NotFoundError") return undefined;
      await new Promise((done) => setTimeout(done, 100));
    }
  }
  return undefined;
}

async function run(token) {
  let key = localStorage.getItem(KEY);
  if (!key) {
    if (!token) {
      show("Open the link that the owner's machine shows.", true);
      return;
    }
    show("Joining…");
    ({ key } = await join(location.href, token, navigator.userAgent));
    localStorage.setItem(KEY, key);
  }
  let ended = "";
  link = new Link({
    base: location.href, key, hello, startWorker, onActivity,
    onState: (state, text) => {
      ended = state;
      onState(state, text);
    },
  });
  element("pause").disabled = element("leave").disabled = false;
  await link.run();
  connected = false;
  keepAwake();
  if (ended === "refused" || ended === "left") localStorage.removeItem(KEY);
  if (ended === "left") await dropSlices();
  if (ended === "refused" && token) await run(token);
}

async function start() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  const reason = obstacle();
  if (reason) {
    show(reason, true);
    return;
  }
  element("threads").textContent = String(threads());
  watchBattery();
  navigator.storage.persist?.();
  try {
    await run(token);
  } catch (error) {
    // A person may try again, since a token that did not arrive was not used.
    if (token) history.replaceState(null, "", `${location.pathname}#${token}`);
    show(`This device could not join: ${error.message}.`, true);
  }
}

element("pause").onclick = () => {
  paused = !paused;
  element("pause").textContent = paused ? "Resume" : "Pause";
  link.event(paused ? "paused" : "resumed");
  keepAwake();
  update();
};
element("leave").onclick = () => link.leave();
element("here").onclick = () => location.reload();
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") link?.retry();
  keepAwake();
});
addEventListener("online", () => link?.retry());
// A page that its user has left may stay in memory with its connection, and come back.
addEventListener("pagehide", () => link?.close());
addEventListener("pageshow", () => link?.retry());
setInterval(() => (update(), keepAwake()), 1000);
start();
