// The compute worker in node: a browser's surroundings for worker.js, and a folder in place of the browser's storage.
import { webcrypto } from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import { Worker, parentPort, workerData } from "node:worker_threads";

const STATIC = new URL("../../edge/browser/static/", import.meta.url);
const locate = (name) => new URL(name, STATIC).href;

// What a thread of emscripten needs of a browser.
const THREAD = `
const { parentPort } = require("node:worker_threads");
globalThis.self = globalThis;
self.location = { href: ${JSON.stringify(STATIC.href)} };
self.postMessage = (message) => parentPort.postMessage(message);
parentPort.on("message", (data) => self.onmessage({ data }));
`;

globalThis.self = globalThis;
globalThis.crypto ??= webcrypto; // node 18 does not have it here
globalThis.crossOriginIsolated = !workerData.single;
const { Memory } = WebAssembly;
WebAssembly.Memory = class extends Memory {
  constructor(sizes) {
    super({ ...sizes, maximum: Math.min(sizes.maximum, workerData.most_pages) });
  }
};
// onnxruntime-web starts threads only from scripts of the page's own origin, and a file has none.
globalThis.URL = class extends URL {
  get origin() {
    return this.protocol === "file:" ? "file://" : super.origin;
  }
};
self.location = { href: STATIC.href, origin: "file://" };
self.Worker = class {
  constructor(url) {
    this.worker = new Worker(THREAD + fs.readFileSync(new URL(url), "utf8"), { eval: true });
    this.worker.on("message", (data) => this.onmessage({ data }));
    this.worker.on("error", (error) => this.onerror(error));
  }
  postMessage(message) {
    this.worker.postMessage(message);
  }
  terminate() {
    this.worker.terminate();
  }
};

// A folder whose open files have the methods of FileSystemSyncAccessHandle.
function nodeFolder(folder, quota) {
  const place = (name) => {
    fs.mkdirSync(folder, { recursive: true });
    return path.join(folder, name);
  };
  const used = () => fs.readdirSync(place("")).reduce((sum, name) => sum + fs.statSync(place(name)).size, 0);
  return {
    names: async () => fs.readdirSync(place("")),
    size: async (name) => fs.statSync(place(name)).size,
    async open(name) {
      const file = fs.openSync(place(name), fs.constants.O_RDWR | fs.constants.O_CREAT);
      return {
        getSize: () => fs.fstatSync(file).size,
        read: (buffer, { at }) => fs.readSync(file, buffer, 0, buffer.length, at),
        write(buffer, { at }) {
          const more = Math.max(0, at + buffer.length - fs.fstatSync(file).size);
          if (used() + more > quota) throw new Error("the quota is exceeded");
          return fs.writeSync(file, buffer, 0, buffer.length, at);
        },
        truncate: (size) => fs.ftruncateSync(file, size),
        flush: () => fs.fsyncSync(file),
        close() {
          if (!fs.existsSync(place(name))) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0); // as Chromium does
          fs.closeSync(file);
        },
      };
    },
    remove: async (name) => fs.rmSync(place(name), { force: true }),
    async free() {
      const { bavail, bsize } = fs.statfsSync(folder);
      return bavail * bsize;
    },
  };
}

// Fetches onnxruntime-web from the bridge, as a browser does.
async function onnxRuntime() {
  const folder = path.join(workerData.store, "ort");
  fs.mkdirSync(folder, { recursive: true });
  for (const name of ["ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"]) {
    const response = await fetch(new URL(`/ort/${name}`, workerData.base));
    if (!response.ok) throw new Error(`the bridge answered ${response.status} for ${name}`);
    fs.writeFileSync(path.join(folder, name), new Uint8Array(await response.arrayBuffer()));
  }
  const ort = await import(pathToFileURL(path.join(folder, "ort.wasm.min.mjs")).href);
  ort.env.wasm.wasmBinary = fs.readFileSync(path.join(folder, "ort-wasm-simd-threaded.wasm")); // node fetches no files
  return ort;
}

const { serve } = await import(locate("worker.js"));
const take = serve(parentPort, {
  threads: workerData.threads,
  folder: async () => nodeFolder(path.join(workerData.store, "slices"), workerData.quota),
  host: { locate, onnxRuntime, compile: async (name) => WebAssembly.compile(fs.readFileSync(new URL(locate(name)))) },
});
parentPort.on("message", take);
