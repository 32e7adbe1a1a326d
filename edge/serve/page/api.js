// Requests to the server of this page, with the API key.

import {$} from "./dom.js";

const KEY = "edge.key";
const PATIENCE_MS = 15000;  // timeout of requests that generate no text

/** An error with the server's message. `status`: HTTP status, or 0 if the server could not be reached. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Return the JSON from a path. Throws ApiError. */
export async function get(path) { return (await request(path, {signal: AbortSignal.timeout(PATIENCE_MS)})).json(); }

/** Post a value to a path and return the JSON of the response. `patience_ms`: timeout. Throws ApiError. */
export async function post(path, value, patience_ms = PATIENCE_MS) {
  const response = await request(path, {...asJson(value), signal: AbortSignal.timeout(patience_ms)});
  const text = await response.text();
  return text ? JSON.parse(text) : {};
}

/** Delete a path and return the JSON of the response. Throws ApiError. */
export async function remove(path) {
  const response = await request(path, {method: "DELETE", signal: AbortSignal.timeout(PATIENCE_MS)});
  const text = await response.text();
  return text ? JSON.parse(text) : {};
}

/** Post a value to a path and yield the objects of the response, one per line. `signal` aborts it. Throws ApiError. */
export async function* lines(path, value, signal) {
  const response = await request(path, {...asJson(value), signal});
  for await (const line of textLines(response.body)) {
    if (!line.trim()) continue;
    const message = JSON.parse(line);
    if (message.error) throw new ApiError(said(message) || "The server could not finish.", response.status);
    yield message;
  }
}

/** Yield the events of a streamed answer as objects, until its end event. `signal` aborts it. Throws ApiError. */
export async function* stream(path, value, signal) {
  const response = await request(path, {...asJson(value), signal});
  if (!(response.headers.get("content-type") || "").startsWith("text/event-stream")) {
    throw new ApiError("The server did not answer with a stream of events.", response.status);
  }
  for await (const event of serverSentEvents(response.body)) {
    if (event.data === "[DONE]") return;
    const message = JSON.parse(event.data);
    if (message.error || event.name === "error") throw new ApiError(said(message) || "The answer failed.", 200);
    yield message;
  }
  throw new ApiError("The connection ended before the answer did.", 0);
}

async function* serverSentEvents(body) {
  let name = "", data = [];
  for await (const line of textLines(body)) {
    if (line === "") {
      if (data.length) yield {name, data: data.join("\n")};
      [name, data] = ["", []];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(5).replace(/^ /, ""));
    } else if (line.startsWith("event:")) {
      name = line.slice(6).trim();
    }  // ignore comments, which keep the connection open, and unused fields
  }
}

// Yield the lines of a body. The last line may lack its line break.
async function* textLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      yield* lines;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});  // closes the connection, so that the server stops
  }
}

function asJson(value) {
  return {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(value)};
}

async function request(path, options) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
    let response;
    try {
      response = await fetch(path, {...options, headers, credentials: "omit", cache: "no-store"});
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (error.name === "TimeoutError") throw new ApiError("The server does not answer.", 0);
      throw new ApiError("The server cannot be reached.", 0);
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
      if (sessionStorage.getItem(KEY) !== key) {
        // The timeout expired while the user typed the key, so the request gets a new timeout.
        if (options.signal?.aborted && options.signal.reason.name === "TimeoutError") {
          options = {...options, signal: AbortSignal.timeout(PATIENCE_MS)};
        }
        continue;
      }
    }
    const text = await response.text();
    let reason = "";
    try { reason = said(JSON.parse(text)); } catch { /* not JSON: another program answered */ }
    throw new ApiError(reason || `The server answered ${response.status} ${response.statusText}`.trim() + ".",
      response.status);
  }
}

// Return the message of an API error, or "".
function said(value) {
  const error = value && (value.error ?? value);
  const text = typeof error === "string" ? error : error && (error.message ?? error.detail);
  return typeof text === "string" ? text : "";
}

let asking = null;  // promise of the open dialog, which all requests share

function askForKey(refused) {
  asking ??= new Promise(resolve => {
    const dialog = $("key-dialog");
    $("key-why").textContent = refused ? "The server refused this key." : "This server needs an API key.";
    $("key").value = "";
    const take = () => {
      const key = $("key").value.trim();
      $("key").value = "";
      if (dialog.returnValue === "use" && key) sessionStorage.setItem(KEY, key);
      asking = null;
      resolve();
    };
    dialog.returnValue = "";
    dialog.addEventListener("close", take, {once: true});
    $("no-key").onclick = () => dialog.close("");
    dialog.showModal();
  });
  return asking;
}
