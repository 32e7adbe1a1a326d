// The browser's page without a browser: node joins a bridge as a page does. Prints each state as a line of JSON.
//
//     node node_page.mjs URL TOKEN --store FOLDER [--threads N] [--single] [--quota BYTES] [--memory BYTES]
//
// --single: as a page that is not cross-origin isolated, with the module without threads.
// --quota: bytes of the storage. --memory: bytes that a module really gets; the page reports 4 GB.
// FOLDER keeps the slices and the key, so a second start with the same folder needs no token.
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { parseArgs } from "node:util";
import { Worker } from "node:worker_threads";

const STATIC = new URL("../../edge/browser/static/", import.meta.url);
const { Link, join } = await import(new URL("link.js", STATIC));
const { newMemory } = await import(new URL("engine.js", STATIC));

const { values, positionals: [url, token] } = parseArgs({
  allowPositionals: true,
  options: {
    store: { type: "string" },
    threads: { type: "string", default: String(os.availableParallelism()) },
    single: { type: "boolean", default: false },
    quota: { type: "string", default: "Infinity" },
    memory: { type: "string", default: "4294967296" },
  },
});
const { store, single } = values;
const threads = single ? 1 : Number(values.threads);
const print = (fields) => fs.writeSync(1, JSON.stringify(fields) + "\n");

fs.mkdirSync(store, { recursive: true });
const keyFile = path.join(store, "key.json");
let key;
try {
  if (!fs.existsSync(keyFile)) fs.writeFileSync(keyFile, JSON.stringify(await join(url, token, "node")));
  ({ key } = JSON.parse(fs.readFileSync(keyFile, "utf8")));
} catch (error) {
  print({ state: "refused", text: error.message });
  process.exit(1);
}

const link = new Link({
  base: url,
  key,
  hello: async () => ({
    agent: `node ${process.version}`, threads, memory_bytes: newMemory(!single).most_bytes, isolated: !single, simd: true,
    battery: null, charging: null,
  }),
  startWorker(hear, failed) {
    const worker = new Worker(new URL("node_worker.mjs", import.meta.url), {
      workerData: { base: url, store, single, threads, quota: Number(values.quota), most_pages: values.memory / 65536 },
    });
    worker.on("message", hear);
    worker.on("error", (error) => failed(error.message));
    return { post: (message, transfer) => worker.postMessage(message, transfer), end: () => worker.terminate() };
  },
  onState: (state, text) => print({ state, text }),
});
process.on("SIGTERM", () => link.end("left"));
process.on("SIGUSR1", () => link.event("paused"));
await link.run();
process.exit(0);
