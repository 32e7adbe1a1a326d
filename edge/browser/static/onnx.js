// ONNX Runtime in WebAssembly: a stage of a network. It runs in the compute worker. The owner's machine fetches
// onnxruntime-web when it first needs it, and serves it under /ort/.

import { canShare } from "./engine.js";

// What holds the values of each type. A float16 is passed on as its bits.
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, bool: Uint8Array,
  int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
};

export class Network {
  // content: bytes of the stage's file. host: `onnxRuntime()` returns the module of onnxruntime-web.
  static async load(content, threads, host) {
    const ort = await host.onnxRuntime();
    ort.env.wasm.numThreads = canShare() ? Math.max(1, threads) : 1;
    ort.env.logLevel = "error";
    const network = new Network();
    network.ort = ort;
    network.session = await ort.InferenceSession.create(content, { executionProviders: ["wasm"] });
    return network;
  }

  // inputs: {name, type, dims} of each input, whose values follow one another in the payload. Returns the same of the
  // outputs.
  async run(inputs, payload) {
    const feeds = {};
    let at = 0;
    for (const { name, type, dims } of Array.isArray(inputs) ? inputs : []) {
      if (!Object.hasOwn(ARRAYS, type) || !Array.isArray(dims) || !dims.every((dim) => Number.isSafeInteger(dim) && dim >= 0)) {
        throw new Error(`input ${String(name).slice(0, 80)} has a type or dimensions that are not known here`);
      }
      const Values = ARRAYS[type];
      const size = dims.reduce((product, dim) => product * dim, Values.BYTES_PER_ELEMENT);
      if (at + size > payload.length) throw new Error(`the inputs need more than ${payload.length} bytes of data`);
      feeds[name] = new this.ort.Tensor(type, new Values(payload.slice(at, at + size).buffer), dims);
      at += size;
    }
    if (at !== payload.length) throw new Error(`the inputs need ${at} bytes of data instead of ${payload.length}`);
    const results = Object.entries(await this.session.run(feeds));
    const parts = results.map(([, { data }]) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    const values = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
    parts.reduce((start, part) => (values.set(part, start), start + part.length), 0);
    return [{ outputs: results.map(([name, { type, dims }]) => ({ name, type, dims: [...dims] })) }, values];
  }
}
