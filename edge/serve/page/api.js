// Requests to the server of this page, with the API key.

import {$} from "./dom.js";

const KEY = "edge.key";
const PATIENCE_MS = 15000;  // timeout of requests that generate no text
const STREAM_PATIENCE_MS = 120000;  // timeout until a stream begins
const SILENCE_MS = 35000;  // a stream without a byte for this time is broken; the server sends pings more often
const PASSING = [502, 504];  // status of gateways whose server is away

/** An error with the server's message. `status`: HTTP status, or 0 if the server could not be reached or the connection
 * broke. `again`: the same request may succeed soon. */
export class ApiError extends Error {
  constructor(message, status, again = status === 0 || PASSING.includes(status)) {
    super(message);
    this.status = status;
    this.again = again;
  }
}

/** Return the JSON from a path. Throws ApiError. */
export async function get(path) { return json(await request(path, {}, PATIENCE_MS)); }

/** Post a value to a path and return the JSON of the response. `patience_ms`: timeout. Throws ApiError. */
export async function post(path, value, patience_ms = PATIENCE_MS) {
  return json(await request(path, asJson(value), patience_ms));
}

/** Delete a path and return the JSON of the response. Throws ApiError. */
export async function remove(path) { return json(await request(path, {method: "DELETE"}, PATIENCE_MS)); }

/** Post a value to a path and yield the objects of the response, one per line. `signal` aborts it. Throws ApiError. */
export async function* lines(path, value, signal) {
  const response = await request(path, {...asJson(value), signal}, STREAM_PATIENCE_MS);
  for await (const line of textLines(response.body)) {
    if (!line.trim()) continue;
    const message = JSON.parse(line);
    if (message.error) throw new ApiError(said(message) || "The server could not finish.", response.status);
    yield message;
  }
}

/** Yield the events of a streamed answer as objects, until its end event. `signal` aborts it. Throws ApiError. */
export async function* stream(path, value, signal) {
  const response = await request(path, {...asJson(value), signal}, STREAM_PATIENCE_MS);
  if (!(response.headers.get("content-type") || "").startsWith("text/event-stream")) {
    throw new ApiError("The server did not answer with a stream of events.", response.status);
  }
  for await (const event of serverSentEvents(response.body)) {
    if (event.data === "[DONE]") return;
    const message = JSON.parse(event.data);
    if (message.error || event.name === "error") {
      throw new ApiError(said(message) || "The answer failed.", 200, message.error?.code === "interrupted");
    }
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
  let rest = "";
  for await (const text of texts(body)) {
    const lines = (rest + text).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    yield* lines;
  }
  if (rest) yield rest;
}

// Yield the text of a body in pieces as they arrive. Throws ApiError if the connection breaks.
async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let timer;
  const silence = () => new Promise((_, failed) => {
    timer = setTimeout(() => failed(new ApiError("The connection is silent.", 0)), SILENCE_MS);
  });
  try {
    for (;;) {
      const {value, done} = await Promise.race([reader.read(), silence()]);
      clearTimeout(timer);
      if (done) return;
      yield value;
    }
  } catch (error) {
    throw error.name === "AbortError" || error instanceof ApiError ? error
      : new ApiError("The connection broke.", 0);
  } finally {
    clearTimeout(timer);
    reader.cancel().catch(() => {});  // closes the connection, so that the server stops
  }
}

async function json(response) {
  let text = "";
  for await (const part of texts(response.body)) text += part;
  return text ? JSON.parse(text) : {};
}

function asJson(value) {
  return {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(value)};
}

// Return a successful response. `patience_ms`: timeout until it begins, for each attempt with another key.
async function request(path, options, patience_ms) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
    const control = new AbortController();
    const abort = () => control.abort();
    if (options.signal?.aborted) abort();
    options.signal?.addEventListener("abort", abort);
    const timer = setTimeout(abort, patience_ms);
    let response;
    try {
      const {signal} = control;
      response = await fetch(path, {...options, headers, signal, credentials: "omit", cache: "no-store"});
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError(`The server ${error.name === "AbortError" ? "does not answer" : "cannot be reached"}.`, 0);
    } finally {
      clearTimeout(timer);
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (sessionStorage.getItem(KEY) === key) {
        await askForKey(key === null ? "This server needs an API key." : "The server refused this key.");
      }
      if (sessionStorage.getItem(KEY) !== key) continue;
    }
    const text = await response.text();
    let reason = "";
    try { reason = said(JSON.parse(text)); } catch { /* not JSON: another program answered */ }
    if (response.status === 403 && reason.includes("only an administrator")) {
      if (sessionStorage.getItem(KEY) === key) await askForKey("This needs the key of an administrator.");
      if (sessionStorage.getItem(KEY) !== key) continue;
    }
    throw new ApiError(reason || `The server answered ${response.status} ${response.statusText}`.trim() + ".",
      response.status, PASSING.includes(response.status) || response.headers.has("retry-after"));
  }
}

// Return the message of an API error, or "".
function said(value) {
  const error = value && (value.error ?? value);
  const text = typeof error === "string" ? error : error && (error.message ?? error.detail);
  return typeof text === "string" ? text : "";
}

let asking = null;  // promise of the open dialog, which all requests share

function askForKey(why) {
  asking ??= new Promise(resolve => {
    const dialog = $("key-dialog");
    $("key-why").textContent = why;
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
