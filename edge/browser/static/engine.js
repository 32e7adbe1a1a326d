// llama.cpp in WebAssembly: a slice, its KV cache, and the operations of shim.cpp. It runs in the compute worker.
// An engine cannot be used again after llama.cpp has ended the module; a new worker makes a new one.

const PAGE = 65536; // bytes of a page of WebAssembly memory
const START_MS = 60_000;
const SLICE = "/slice.gguf";
const MEMORY_COLUMNS = 1, COMPUTE_COLUMNS = 64; // columns of the products that measure memory and arithmetic
const BLOCK = 32, BLOCK_BYTES = 18; // weights and bytes of a block in Q4_0

// True if this page may share memory between threads: it is cross-origin isolated.
export const canShare = () => typeof SharedArrayBuffer !== "undefined" && globalThis.crossOriginIsolated !== false;

// Creates the largest memory that this device allows, up to 4 GB. It grows when it is used.
export function newMemory(shared) {
  for (let maximum = 65536; ; maximum -= 4096) {
    try {
      return { memory: new WebAssembly.Memory({ initial: 1024, maximum, shared }), most_bytes: maximum * PAGE };
    } catch (error) {
      if (maximum <= 4096) throw error;
    }
  }
}

export class Engine {
  // host: how the module is found (`compile(name)`, `locate(name)`). hooks: `onBeat` while a computation runs,
  // `onLoading(fraction)`.
  static async start(threads, host, hooks) {
    const shared = canShare();
    const engine = new Engine();
    engine.threads = shared ? Math.max(1, threads) : 1;
    engine.memory = newMemory(shared).memory;
    const name = shared ? "llama-threads" : "llama-single";
    const { default: create } = await import(`./${name}.js`);
    const compiled = await host.compile(`${name}.wasm`);
    engine.module = await new Promise((done, failed) => {
      setTimeout(() => failed(new Error("the threads of this page did not start")), START_MS);
      create({
        ...hooks,
        wasmMemory: engine.memory,
        threads: Math.max(1, engine.threads - 1), // emscripten's start waits for ever for no thread
        instantiateWasm: (imports, receive) => {
          WebAssembly.instantiate(compiled, imports).then((instance) => receive(instance, compiled), failed);
          return {};
        },
        locateFile: host.locate,
        mainScriptUrlOrBlob: host.locate(`${name}.js`),
        print: () => {},
        printErr: () => {},
      }).then(done, failed);
    });
    engine.call("start", engine.threads);
    return engine;
  }

  // The place of the flag that stops a computation, for other threads; null without shared memory.
  get stopFlag() {
    return canShare() ? { buffer: this.memory.buffer, address: this.module._shim_stop_flag() } : null;
  }

  get heapBytes() {
    return this.memory.buffer.byteLength;
  }

  // Loads a slice from an open file, tensor by tensor, straight into llama.cpp's buffers.
  load(file, { n_ctx, n_batch, n_seq_max, n_outputs_max, n_rs_seq, type_k, type_v, flash }) {
    const { FS } = this.module;
    FS.writeFile(SLICE, "");
    const { node } = FS.lookupPath(SLICE);
    node.usedBytes = file.getSize();
    node.stream_ops = {
      ...node.stream_ops,
      read: (_stream, heap, offset, length, at) => file.read(heap.subarray(offset, offset + length), { at }),
    };
    try {
      this.call("load", this.text(SLICE), n_ctx, n_batch, n_seq_max, n_outputs_max, n_rs_seq, type_k, type_v, flash);
    } finally {
      if (!this.dead) FS.unlink(SLICE);
    }
    const facts = JSON.parse(this.read(this.module._shim_facts()));
    const meta = (key) => this.read(this.module._shim_meta(this.text(key)));
    Object.assign(facts.model, {
      architecture: meta("general.architecture"),
      pre_tokenizer: meta("tokenizer.ggml.pre"),
    });
    return { ...facts, heap_bytes: this.heapBytes };
  }

  // Computes rows. Returns {code, rows, width} and the values, or the `top` largest of each row if that is not 0.
  decode({ n, tokens, embeddings = 0, sections = 1, write = "", stop_at = "", threads = 0, top = 0 }, payload) {
    const counts = [tokens ? 4 * n : 0, 4 * n * embeddings, 4 * n * sections, 4 * n, n];
    const size = counts.reduce((sum, count) => sum + count);
    if (!(n > 0) || payload.length !== size) {
      throw new Error(`a batch of ${n} rows needs ${size} bytes of data instead of ${payload.length}`);
    }
    const data = this.scratch(payload);
    const [at_tokens, at_embeddings, at_positions, at_sequences, at_outputs] = counts.map((_count, index) =>
      data + counts.slice(0, index).reduce((sum, count) => sum + count, 0));
    const code = this.call("decode", n, tokens ? at_tokens : 0, embeddings ? at_embeddings : 0, embeddings, at_positions,
      at_sequences, at_outputs, this.text(write), this.text(stop_at, 1), threads);
    const [rows, width] = [this.module._shim_rows(), this.module._shim_width()];
    const values = this.bytes(this.module._shim_values(), 4 * rows * width);
    return [{ code, rows, width }, top > 0 ? largest(new Float32Array(values.buffer), width, top) : values];
  }

  stateGet(sequence, flags) {
    const size = this.call("state_size", sequence, flags);
    const data = this.scratch(new Uint8Array(0), size);
    this.call("state_get", data, size, sequence, flags);
    return this.bytes(data, size);
  }

  stateSet(sequence, flags, state) {
    return this.call("state_set", this.scratch(state), state.length, sequence, flags);
  }

  // Returns what the kernels of a slice reach here.
  measure(seconds) {
    const reach = (k, rows, columns) => {
      const products = this.module._shim_products_per_s(k, rows, columns, seconds / 2);
      if (products < 0) throw new Error(`cannot measure: ${this.read(this.module._shim_error())}`);
      return products;
    };
    return {
      memory_bytes_per_s: reach(4096, 28672, MEMORY_COLUMNS) * 4096 * 28672 * BLOCK_BYTES / BLOCK,
      flops: reach(2048, 2048, COMPUTE_COLUMNS) * 2 * 2048 * 2048 * COMPUTE_COLUMNS,
      threads: this.threads,
    };
  }

  // Calls an operation of the shim and returns its result. Throws if it failed.
  call(name, ...values) {
    if (this.dead) throw new Error(this.dead);
    let result;
    try {
      result = this.module[`_shim_${name}`](...values);
    } catch (error) {
      // ggml gives its reason before it ends the module.
      const reason = this.read(this.module._shim_error()) || error.message;
      this.dead = `llama.cpp ended in this page: ${reason.trim()}`;
      throw new Error(this.dead);
    }
    if (result <= -1000) throw new Error(this.read(this.module._shim_error()));
    return result;
  }

  // Copies data into a buffer that grows to the largest size, and returns its address. The buffer has `size` bytes.
  scratch(data, size = data.length) {
    if (!(size <= this.scratchSize)) {
      if (this.scratchAt) this.module._free(this.scratchAt);
      this.scratchSize = 0;
      this.scratchAt = this.module._malloc(size) >>> 0;
      if (!this.scratchAt) throw new Error(`no memory for ${size} bytes; the page has ${this.heapBytes}`);
      this.scratchSize = size;
    }
    new Uint8Array(this.memory.buffer, this.scratchAt, size).set(data);
    return this.scratchAt;
  }

  // Copies a short text into the module, and returns its address. There are two places, which are used again.
  text(value, place = 0) {
    this.texts ??= [this.module._malloc(256) >>> 0, this.module._malloc(256) >>> 0];
    const { written } = new TextEncoder().encodeInto(String(value).slice(0, 80), this.room);
    const bytes = new Uint8Array(this.memory.buffer, this.texts[place], 256);
    bytes.set(this.room.subarray(0, written));
    bytes[written] = 0;
    return this.texts[place];
  }

  room = new Uint8Array(255);

  read(address) {
    const bytes = new Uint8Array(this.memory.buffer, address >>> 0);
    return new TextDecoder().decode(bytes.slice(0, bytes.subarray(0, 4096).indexOf(0)));
  }

  // Returns a copy of the module's memory.
  bytes(address, size) {
    return new Uint8Array(this.memory.buffer, address >>> 0, size).slice();
  }
}

// Returns the places in a row of the `top` largest values of each row, and then these values.
function largest(values, width, top) {
  const rows = values.length / width;
  const places = new Uint32Array(2 * rows * top);
  const most = new Float32Array(places.buffer, 4 * rows * top).fill(-Infinity); // ascending in each row
  for (let row = 0; row < rows; row++) {
    const own = values.subarray(row * width, (row + 1) * width);
    const [last, first] = [(row + 1) * top - 1, row * top];
    for (let place = 0; place < width; place++) {
      if (!(own[place] > most[first])) continue;
      let at = first;
      for (; at < last && most[at + 1] < own[place]; at++) {
        most[at] = most[at + 1];
        places[at] = places[at + 1];
      }
      most[at] = own[place];
      places[at] = place;
    }
  }
  return new Uint8Array(places.buffer);
}
