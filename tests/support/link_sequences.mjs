// Sequences of events at a page's Link, chosen by a seed: commands of the bridge, and replies, failures and silence of
// compute workers, also of workers that were replaced; frames to the bridge while POSTs fail. Ends with an error if the
// link is ever in a wrong state, or loses a frame.
//
//     node link_sequences.mjs SEQUENCES STEPS
import assert from "node:assert/strict";

const { FrameReader, Link } = await import(new URL("../../edge/browser/static/link.js", import.meta.url));
const [sequences, steps] = process.argv.slice(2).map(Number);
const OPS = ["ping", "decode", "load", "onnx_run", "unload"];
const SILENT_S = 300; // of onnx_run
const HUNG_S = 60;
const MOST_BYTES_UP = 8 << 20;
let now = 1e12;
Date.now = () => now;

// Returns a function that returns whole numbers below its argument (mulberry32).
function chance(seed) {
  let state = seed;
  return (below) => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) % below;
  };
}

function sequence(seed) {
  const pick = chance(seed);
  const workers = [], received = [], log = [];
  let stopped = false, loaded = "", failures = 0;
  const link = new Link({
    base: "http://bridge", key: "key", hello: async () => ({}),
    startWorker(hear, failed) {
      const worker = { hear, failed, posted: [], flag: null, ended: false };
      workers.push(worker);
      return { post: ({ header }) => worker.posted.push(header), end: () => { worker.ended = true; } };
    },
  });
  link.connected = true;

  const current = () => workers.at(-1);
  const busy = () => current().posted.at(-1);
  const answers = () => link.out.filter(({ id }) => id !== undefined).map(({ id }) => id);
  const unanswered = () => received.filter(({ id }) => !answers().includes(id));
  const state = () => [workers.length, link.busy, link.loaded, link.stopped, link.flag, link.out.length,
    link.lastSign, link.commands.map(({ header }) => header.id)];

  // Expects that the current worker was replaced, and its command was answered.
  function replaced() {
    [loaded, stopped] = ["", false];
    failures++;
  }

  function message() {
    const flag = { buffer: new SharedArrayBuffer(8), address: 4 };
    const id = received.length ? received[pick(received.length)].id : 1;
    return [{ beat: true }, { event: { event: "full" } }, { reply: { id } }, { reply: { id, error: "no" } }, { flag }][pick(5)];
  }

  const actions = {
    command() {
      const op = OPS[pick(OPS.length)];
      const id = received.length + 1;
      const header = { id, op, ...(op === "load" && { file: `file ${id}` }), ...(op === "onnx_run" && { silent_s: SILENT_S }) };
      const ends = op === "unload" && unanswered().length && busy().silent_s;
      received.push(header);
      link.take({ header, payload: new Uint8Array(0) });
      if (ends) replaced();
    },
    answer() {
      if (!unanswered().length) return;
      const { id, op, file } = busy();
      const error = pick(4) ? undefined : "no";
      current().hear({ reply: { id, error } });
      if (op === "load" && !error) loaded = file;
      if (op === "unload") [loaded, stopped] = ["", false];
    },
    fail() {
      current().failed("it ended");
      replaced();
    },
    flag() {
      const flag = current().flag = { buffer: new SharedArrayBuffer(8), address: 4 };
      current().hear({ flag });
    },
    stop() {
      link.take({ header: { op: "stop" }, payload: new Uint8Array(0) });
      stopped = true;
    },
    resume() {
      link.take({ header: { op: "resume" }, payload: new Uint8Array(0) });
      stopped = false;
    },
    event() {
      const before = link.out.length;
      now += 10;
      current().hear({ event: { event: "full" } });
      assert(link.out.slice(before).some(({ id }) => id === undefined), "an event was lost");
    },
    silence() {
      const limit_s = unanswered().length ? busy().silent_s ?? HUNG_S : Infinity;
      const silent_s = [1, HUNG_S + 1, SILENT_S + 1][pick(3)];
      current().hear({ beat: true });
      now += 1000 * silent_s;
      link.watch();
      if (silent_s > limit_s) replaced();
    },
    stale() {
      const old = workers[pick(workers.length)];
      if (old === current()) return;
      const before = state();
      if (pick(3)) old.hear(message());
      else old.failed("its thread has ended");
      assert.deepEqual(state(), before, "a replaced worker changed the link");
    },
  };

  const names = Object.keys(actions);
  for (let step = 0; step < steps; step++) {
    const name = pick(3) ? names[pick(3)] : names[pick(names.length)]; // mostly commands, answers and failures
    log.push(name);
    try {
      actions[name]();
      const waiting = unanswered();
      assert.deepEqual(answers(), received.slice(0, answers().length).map(({ id }) => id), "order of answers");
      assert.deepEqual(link.commands.map(({ header }) => header), waiting, "commands that wait");
      assert.equal(link.busy, waiting.length > 0);
      if (waiting.length) assert.equal(busy()?.id, waiting[0].id, "the worker's command");
      assert.deepEqual(workers.map(({ ended }) => ended), workers.map((worker) => worker !== current()), "ended workers");
      assert(workers.length >= 1 + failures, "a worker was not replaced");
      assert.equal(link.loaded, loaded);
      assert.equal(Boolean(link.stopped), stopped);
      assert.equal(link.flag, current().flag);
      if (link.flag) assert.equal(new Int32Array(link.flag.buffer)[1], stopped ? 1 : 0, "the stop flag");
    } catch (error) {
      throw new Error(`seed ${seed} after ${log.join(" ")}: ${error.message}`);
    }
  }
}

// Frames of random sizes, while POSTs fail and further frames arrive: all are confirmed in order, in POSTs of limited size.
async function sending(seed) {
  const pick = chance(seed), confirmed = [], posts = [];
  const count = 4 + pick(20);
  const link = new Link({ base: "http://bridge", key: "key", hello: async () => ({}), startWorker: () => ({ end() {} }) });
  link.connected = true;
  let sent = 0;
  const send = () => {
    const size = pick(3) ? pick(1000) : pick(1.5 * MOST_BYTES_UP);
    if (sent < count) link.send(pick(2) ? { id: sent++ } : { event: "full", number: sent++ }, new Uint8Array(size));
  };
  globalThis.fetch = async (_url, { body }) => {
    const frames = new FrameReader().add(body);
    posts.push([frames.length, body.length]);
    while (pick(2)) send();
    await null;
    const ok = pick(4) > 0;
    if (ok) confirmed.push(...frames.map(({ header }) => header.id ?? header.number));
    return { ok, status: ok ? 204 : 500 };
  };
  while (sent < count || link.out.length) {
    send();
    const cut = new AbortController();
    const ended = link.sendAll(cut.signal).catch(() => {});
    while (link.out.length && !(await Promise.race([ended.then(() => true), new Promise(setImmediate)])));
    cut.abort();
    link.filled?.();
    await ended;
  }
  assert.deepEqual(confirmed, [...Array(count).keys()], `seed ${seed}: confirmed frames`);
  assert(posts.every(([frames, bytes]) => frames === 1 || bytes <= MOST_BYTES_UP), `seed ${seed}: bytes of a POST`);
}

for (let seed = 0; seed < sequences; seed++) sequence(seed);
for (let seed = 0; seed < sequences / 10; seed++) await sending(seed);
