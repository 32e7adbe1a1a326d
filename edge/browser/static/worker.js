// The compute worker: executes the bridge's commands one after the other. docs/architecture.md describes the parts.
//
// Messages to the worker: {header, payload}. Messages from the worker: {reply, payload}, {event}, {beat} while the worker
// is alive, and {flag}: the place of the flag that stops a computation.

import { Engine } from "./engine.js";
import { Network } from "./onnx.js";
import { Store, browserFolder } from "./store.js";

const BEAT_MS = 1000;

// Serves a port (`postMessage`) and returns the function that takes its messages.
export function serve(port, { folder, host, threads }) {
  let engine = null, network = null, loaded = "", store = null, usual = 0;

  const post = (message, payload) =>
    payload?.length ? port.postMessage({ ...message, payload }, [payload.buffer]) : port.postMessage(message);

  async function started() {
    if (engine) return engine;
    let lastLoading = 0;
    engine = await Engine.start(threads, host, {
      onBeat: () => post({ beat: true }),
      onLoading: (fraction) => {
        if (Date.now() - lastLoading < 200 && fraction < 1) return;
        lastLoading = Date.now();
        post({ event: { event: "loading", fraction } });
      },
    });
    if (engine.stopFlag) post({ flag: engine.stopFlag });
    return engine;
  }

  function running() {
    if (!loaded || network) throw new Error("no slice is loaded");
    return engine;
  }

  const operations = {
    ping: (_header, payload) => [{}, payload], // the bridge measures the network
    file: async (header) => ({ missing: await store.prepare(header) }),
    chunk: async ({ name, index }, payload) => (await store.chunk(name, index, payload), {}),
    files: () => store.files(),
    drop: async ({ name }) => (await store.drop(name), {}),
    async load(header) {
      if (loaded) throw new Error("a slice is loaded already; unload it first");
      const file = await store.open(header.file);
      try {
        const sizes = whole(header, SIZES);
        const facts = (await started()).load(file, sizes);
        usual = sizes.threads;
        loaded = header.file;
        return facts;
      } finally {
        await store.release(header.file, file);
      }
    },
    decode: (header, payload) =>
      running().decode({ ...header, ...whole({ threads: usual, ...header }, ROWS, 0) }, payload),
    seq_rm: (header) => ({ result: running().call("seq_rm", ...positions(header, "sequence", "start", "end")) === 1 }),
    seq_cp: (header) => (running().call("seq_cp", ...positions(header, "source", "target", "start", "end")), {}),
    seq_add: (header) => (running().call("seq_add", ...positions(header, "sequence", "start", "end", "delta")), {}),
    clear: () => (running().call("clear"), {}),
    ends: (header) => ({ result: [0, 1].map((last) => running().call("end", ...positions(header, "sequence"), last)) }),
    state_get: (header) => [{}, running().stateGet(...positions(header, "sequence", "flags"))],
    state_set: (header, payload) =>
      ({ result: running().stateSet(...positions(header, "sequence", "flags"), payload) }),
    async onnx_load({ file: name, threads: most }) {
      if (loaded) throw new Error("a slice is loaded already; unload it first");
      const file = await store.open(name);
      try {
        const content = new Uint8Array(file.getSize());
        file.read(content, { at: 0 });
        network = await Network.load(content, Math.min(threads, whole({ most }, ["most"]).most), host);
        loaded = name;
        return {};
      } finally {
        await store.release(name, file);
      }
    },
    onnx_run({ inputs }, payload) {
      if (!network) throw new Error("no stage of an ONNX model is loaded");
      return network.run(inputs, payload);
    },
    measure: async ({ seconds = 2 }) => (await started()).measure(Math.min(10, Math.max(0.1, Number(seconds) || 2))),
    // The page ends this worker after the reply.
    unload: async () => (await store.close(), {}),
  };

  async function execute({ header, payload }) {
    try {
      store ??= new Store(await folder(), () => post({ event: { event: "full" } }));
      if (!Object.hasOwn(operations, header.op)) throw new Error(`unknown operation ${String(header.op).slice(0, 40)}`);
      const result = await operations[header.op](header, payload ?? new Uint8Array(0));
      const [reply, data] = Array.isArray(result) ? result : [result];
      post({ reply: { id: header.id, ...reply } }, data);
    } catch (error) {
      post({ reply: { id: header.id, error: oneLine(error), incomplete: error?.incomplete } });
    }
  }

  setInterval(() => post({ beat: true }), BEAT_MS);
  let last = Promise.resolve();
  return (message) => {
    last = last.then(() => execute(message));
  };
}

const SIZES = ["threads", "n_ctx", "n_batch", "n_seq_max", "n_outputs_max", "n_rs_seq", "type_k", "type_v", "flash"];
const ROWS = ["n", "embeddings", "sections", "threads", "top"];

// Returns the named values of a header, which must be whole numbers.
function whole(header, names, fallback) {
  const values = {};
  for (const name of names) {
    const value = header[name] ?? (name === "sections" ? 1 : fallback);
    if (!Number.isSafeInteger(value) || Math.abs(value) > 0x7fffffff) {
      throw new Error(`${name} must be a whole number, not ${JSON.stringify(value)?.slice(0, 40)}`);
    }
    values[name] = value;
  }
  return values;
}

const positions = (header, ...names) => Object.values(whole(header, names, names.includes("flags") ? 0 : undefined));

const oneLine = (error) => String(error?.message ?? error).replace(/\s+/g, " ").trim() || "unknown error";

if (typeof WorkerGlobalScope !== "undefined" && self instanceof WorkerGlobalScope) {
  const locate = (name) => new URL(name, import.meta.url).href;
  const compile = async (name) => WebAssembly.compile(await (await fetch(locate(name))).arrayBuffer());
  const onnxRuntime = () => import(locate("ort/ort.wasm.min.mjs"));
  let take = null;
  self.onmessage = ({ data }) => {
    const host = { locate, compile, onnxRuntime };
    if (data.threads) take = serve(self, { folder: browserFolder, host, threads: data.threads });
    else take(data);
  };
}
