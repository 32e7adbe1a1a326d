// The connection of a page to its bridge: one endless response brings commands, POSTs carry replies and events. Used by
// the browser's page and by node in tests.
//
// A frame is: u32 of the bytes that follow, u32 of the header's bytes, the header as JSON, and a payload.

const LARGEST_FRAME = 512 << 20; // bytes
const MOST_BYTES_UP = 8 << 20; // frames that wait are sent together up to this size
const ALIVE_MS = 2000;
const HUNG_S = 60; // a worker that is silent for this long is replaced, unless its command has `silent_s`
const UP_TIMEOUT_MS = 20_000;
const SLOWEST_UP = 10; // bytes per ms
const RETRY_MS = [300, 600, 1000, 2000, 4000, 8000];

export function encodeFrame(header, payload = new Uint8Array(0)) {
  const text = new TextEncoder().encode(JSON.stringify(header));
  const frame = new Uint8Array(8 + text.length + payload.length);
  const view = new DataView(frame.buffer);
  view.setUint32(0, 4 + text.length + payload.length, true);
  view.setUint32(4, text.length, true);
  frame.set(text, 8);
  frame.set(payload, 8 + text.length);
  return frame;
}

// Splits the bytes of a stream into frames.
export class FrameReader {
  parts = [];
  length = 0;

  // Adds bytes of the stream, and returns the frames that are complete now.
  add(bytes) {
    this.parts.push(bytes);
    this.length += bytes.length;
    const frames = [];
    while (this.length >= 4) {
      const size = this.peek();
      if (size < 4 || size > LARGEST_FRAME) throw new Error(`the bridge sent a frame of ${size} bytes`);
      if (this.length < 4 + size) break;
      frames.push(parse(this.take(4 + size)));
    }
    return frames;
  }

  peek() {
    if (this.parts[0].length < 4) this.parts = [joined(this.parts)];
    const [first] = this.parts;
    return new DataView(first.buffer, first.byteOffset).getUint32(0, true);
  }

  take(size) {
    const whole = this.parts.length === 1 ? this.parts[0] : joined(this.parts);
    this.parts = whole.length > size ? [whole.subarray(size)] : [];
    this.length -= size;
    return whole.subarray(0, size);
  }
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

function parse(frame) {
  const size = new DataView(frame.buffer, frame.byteOffset).getUint32(4, true);
  if (size > frame.length - 8) throw new Error("the bridge sent a frame with a broken header");
  const header = JSON.parse(new TextDecoder().decode(frame.subarray(8, 8 + size)));
  if (header === null || typeof header !== "object") throw new Error("the bridge sent a frame without a header");
  return { header, payload: frame.slice(8 + size) };
}

// Exchanges a one-time token for {name, key}. Throws with the bridge's sentence if the bridge refuses.
export async function join(base, token, agent) {
  const response = await fetch(new URL("/api/join", base), {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token, agent }),
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || `the owner's machine answered ${response.status}`);
  return answer;
}

export class Link {
  // base: the bridge's address. key: this device's key.
  // hello: async function that returns the fields of the first event.
  // startWorker: function that starts a compute worker and returns {post(message, transfer), end()}; it receives the
  //     function for the worker's messages and the function for its failure.
  // onState(state, text): "connecting", "connected", "lost", "replaced", "refused" or "left".
  // onActivity(name, fields): "command", "reply", "loading" or "show", for the page.
  constructor({ base, key, hello, startWorker, onState = () => {}, onActivity = () => {} }) {
    Object.assign(this, { base, key, hello, startWorker, onState, onActivity });
    this.commands = []; // received and not answered; the worker executes the first one
    this.busy = false;
    this.out = []; // frames that the bridge has not confirmed
    this.unsent = 0;
    this.flag = null;
    this.loaded = "";
    this.ended = false;
    this.lastAlive = this.lastSign = 0;
    this.upDeadline = Infinity;
    this.newWorker();
  }

  // Connects, and connects again after each failure, until the link has ended.
  async run() {
    const watch = setInterval(() => this.watch(), 5000);
    for (let failures = 0; !this.ended; ) {
      this.onState("connecting");
      try {
        await this.connection(() => { failures = 0; });
        if (this.ended) break;
        this.onState("lost", "the connection to the owner's machine ended");
      } catch (error) {
        if (this.ended) break;
        this.onState("lost", error.message);
      }
      await this.pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)] * (0.75 + Math.random() / 2));
    }
    clearInterval(watch);
    this.worker.end();
  }

  // Tries again at once, since the device has a network again.
  retry() {
    this.wake?.();
  }

  // Says that the page is closed, so that the bridge need not wait for signs of life, and ends the connection. `run`
  // connects again if the page comes back.
  close() {
    if (this.connected) this.post(encodeFrame({ event: "closed" }), { keepalive: true }).catch(() => {});
    this.cut?.abort(new Error("the page is closed"));
  }

  // Ends the link with a state that the person sees.
  end(state, text) {
    if (this.ended) return;
    this.ended = true;
    this.onState(state, text);
    this.cut?.abort();
    this.wake?.();
  }

  async leave() {
    this.send({ event: "leave" });
    await Promise.race([this.emptied(), new Promise((done) => setTimeout(done, 2000))]);
    this.end("left");
  }

  event(name) {
    this.send({ event: name });
  }

  async connection(connected) {
    this.cut = new AbortController();
    const { signal } = this.cut;
    const response = await fetch(new URL("/api/down", this.base), {
      headers: { Authorization: `Bearer ${this.key}` }, cache: "no-store", signal,
    });
    if (response.status === 401 || response.status === 403) {
      const { error } = await response.json().catch(() => ({}));
      this.end("refused", error || "the owner's machine does not know this device any more");
      return;
    }
    if (!response.ok) throw new Error(`the owner's machine answered ${response.status}`);
    const bridge = response.headers.get("Edge-Bridge") ?? "";
    if (this.bridge !== undefined && bridge !== this.bridge) this.startAfresh();
    this.bridge = bridge;
    const pending = this.commands.map(({ header }) => header.id).concat(this.out.map(({ id }) => id ?? []).flat());
    const hello = { event: "hello", ...(await this.hello()), loaded: this.loaded, pending };
    this.out = [{ frame: encodeFrame(hello) }, ...this.out.filter(({ id }) => id !== undefined)];
    this.connected = true;
    this.stopped = false; // a `resume` may be lost with the old connection
    this.setFlag();
    const sending = this.sendAll(signal);
    sending.catch((error) => this.cut.abort(error));
    try {
      this.onState("connected");
      const frames = new FrameReader();
      for (const reader = response.body.getReader(); ; ) {
        const { done, value } = await reader.read();
        if (done) return;
        connected();
        for (const frame of frames.add(value)) this.take(frame);
      }
    } finally {
      this.connected = false;
      this.upDeadline = Infinity;
      this.cut.abort();
      this.filled?.();
      await sending.catch(() => {});
    }
  }

  // Sends frames in order until the connection ends. A frame stays until the bridge has confirmed it.
  async sendAll(signal) {
    while (!signal.aborted) {
      if (!this.out.length) {
        await new Promise((done) => { this.filled = done; });
        continue;
      }
      let count = 0, size = 0;
      while (count < this.out.length && (!count || size + this.out[count].frame.length <= MOST_BYTES_UP)) {
        size += this.out[count++].frame.length;
      }
      this.upDeadline = Date.now() + UP_TIMEOUT_MS + size / SLOWEST_UP;
      const body = count === 1 ? this.out[0].frame : joined(this.out.slice(0, count).map(({ frame }) => frame));
      const response = await this.post(body, { signal });
      this.upDeadline = Infinity;
      if (!response.ok) throw new Error(`the owner's machine answered ${response.status} to a reply`);
      this.out.splice(0, count);
      if (!this.out.length) this.whenEmpty?.();
    }
  }

  post(body, options) {
    const headers = { Authorization: `Bearer ${this.key}`, "Content-Type": "application/octet-stream" };
    return fetch(new URL("/api/up", this.base), { method: "POST", headers, body, ...options });
  }

  send(header, payload) {
    if (header.id === undefined && !this.connected) return; // events are about now
    this.out.push({ frame: encodeFrame(header, payload), id: header.id });
    this.filled?.();
  }

  emptied() {
    return this.out.length ? new Promise((done) => { this.whenEmpty = done; }) : Promise.resolve();
  }

  // Takes a frame of the bridge.
  take({ header, payload }) {
    if (header.id === undefined) {
      if (header.op === "stop" || header.op === "resume") {
        this.stopped = header.op === "stop";
        this.setFlag();
      } else if (header.op === "alive") {
        if (this.limit() && !this.hangs()) this.send({ event: "alive" });
      } else if (header.op === "replaced") this.end("replaced");
      else if (header.op === "show") this.onActivity("show", header);
      return;
    }
    this.commands.push({ header, payload });
    if (header.op === "unload" && this.limit()) this.failed("the session has ended"); // nothing else stops it
    this.next();
  }

  // Returns for how many seconds the current command may be silent, or undefined for the usual time.
  limit() {
    return this.busy ? this.commands[0].header.silent_s : undefined;
  }

  hangs() {
    return this.busy && Date.now() - this.lastSign > 1000 * (this.limit() ?? HUNG_S);
  }

  // Lets the worker execute the next command.
  next() {
    if (this.busy || !this.commands.length) return;
    this.busy = true;
    this.lastSign = Date.now();
    const { header, payload } = this.commands[0];
    this.onActivity("command", header);
    this.worker.post({ header, payload }, payload.length ? [payload.buffer] : []);
  }

  // Answers the command that the worker executes.
  reply(reply, payload) {
    const { header } = this.commands.shift();
    this.busy = false;
    if (["load", "onnx_load"].includes(header.op) && !reply.error) this.loaded = header.file;
    // WebAssembly memory never shrinks, so the memory is freed with its worker.
    if (header.op === "unload") this.newWorker();
    this.send(reply, payload);
    this.onActivity("reply", { header, reply });
    this.next();
  }

  newWorker() {
    this.worker?.end();
    this.flag = null;
    this.stopped = false; // the session that stopped has ended
    this.loaded = "";
    let worker = null;
    const current = () => this.worker === worker;
    worker = this.startWorker(
      (message) => current() && this.hear(message),
      (text) => current() && this.failed(text),
    );
    this.worker = worker;
  }

  hear({ reply, payload, event, beat, flag }) {
    const now = this.lastSign = Date.now();
    if (now - this.lastAlive >= ALIVE_MS - 100 && this.connected) {
      this.lastAlive = now;
      this.send({ event: "alive" });
    }
    if (beat) return;
    if (flag) {
      this.flag = flag;
      this.setFlag();
    } else if (event) {
      this.send(event);
      this.onActivity(event.event, event);
    } else if (reply) this.reply(reply, payload);
  }

  setFlag() {
    if (this.flag) Atomics.store(new Int32Array(this.flag.buffer), this.flag.address >>> 2, this.stopped ? 1 : 0);
  }

  // Replaces a worker that ended or hangs. Its slice is lost.
  failed(text) {
    const wasBusy = this.busy;
    this.busy = false;
    this.newWorker();
    if (!wasBusy) return;
    const { header } = this.commands.shift();
    const reply = { id: header.id, error: `the compute worker was restarted: ${text}` };
    this.send(reply);
    this.onActivity("reply", { header, reply });
    this.next();
  }

  // Looks for what will never answer: a network that a phone has left, and a worker that hangs.
  watch() {
    if (Date.now() > this.upDeadline) this.cut.abort(new Error("the network does not answer"));
    if (this.hangs()) this.failed(`it gave no sign for ${this.limit() ?? HUNG_S} s`);
  }

  // Forgets everything of another bridge process.
  startAfresh() {
    this.commands = [];
    this.out = [];
    this.busy = false;
    this.newWorker();
  }

  pause(ms) {
    return new Promise((done) => {
      const timer = setTimeout(done, ms);
      this.wake = () => (clearTimeout(timer), done());
    });
  }
}
