// Slices on this device, in chunks whose digests are checked. It runs in the compute worker, which reads slices without
// waiting. A folder holds the files: of the browser (`browserFolder`), or of node in tests. A folder has `names()`,
// `size(name)`, `open(name)`, `remove(name)` and `free()`; an open file has the methods of FileSystemSyncAccessHandle.

const LARGEST_CHUNK = 64 << 20; // bytes
const OPEN_S = 10; // an ended worker may still hold a file for a moment

export class Store {
  // onFull: called when a file does not fit into the storage. It is then in memory until it was loaded.
  constructor(folder, onFull) {
    Object.assign(this, { folder, onFull });
    this.arriving = null; // the file that arrives: {name, size, chunk_bytes, chunks, missing, handle, unstored}
  }

  // Returns the files and the free bytes.
  async files() {
    const names = await this.folder.names();
    const files = [];
    for (const name of names.filter(isDigest)) {
      files.push({ name, size: await this.folder.size(name), complete: names.includes(`${name}.done`) });
    }
    return { files, free_bytes: await this.folder.free() };
  }

  // Prepares a file to arrive, and returns the chunks that are missing. Every stored chunk is checked.
  async prepare({ name, size, chunk_bytes, chunks }) {
    checkName(name);
    if (!isCount(size) || !isCount(chunk_bytes) || !chunk_bytes || chunk_bytes > LARGEST_CHUNK) {
      throw new Error(`a file of ${size} bytes in chunks of ${chunk_bytes}, which may have 1 to ${LARGEST_CHUNK} bytes`);
    }
    const count = Math.ceil(size / chunk_bytes);
    if (!Array.isArray(chunks) || chunks.length !== count || !chunks.every(isDigest)) {
      throw new Error(`a file of ${size} bytes needs the digests of ${count} chunks`);
    }
    await this.close();
    const handle = await this.folder.open(name);
    this.arriving = { name, size, chunk_bytes, chunks, missing: new Set(), handle, unstored: new Map() };
    if (handle.getSize() > size) handle.truncate(size);
    for (let index = 0; index < count; index++) {
      const buffer = new Uint8Array(chunkSize(this.arriving, index));
      const read = handle.read(buffer, { at: index * chunk_bytes });
      if (read !== buffer.length || (await digest(buffer)) !== chunks[index]) this.arriving.missing.add(index);
    }
    const missing = [...this.arriving.missing];
    if (missing.length) await this.folder.remove(`${name}.done`);
    else await this.finish();
    return missing;
  }

  // Stores a chunk of the file that was prepared last.
  async chunk(name, index, data) {
    const file = this.arriving;
    if (file?.name !== name) throw incomplete(`no chunk of ${name} is expected; send its digests first`);
    if (!isCount(index) || index >= file.chunks.length) throw new Error(`the file has no chunk ${index}`);
    const size = chunkSize(file, index);
    if (data.length !== size) throw new Error(`chunk ${index} has ${data.length} bytes instead of ${size}`);
    if ((await digest(data)) !== file.chunks[index]) throw new Error(`chunk ${index} has another digest; send it again`);
    const isStored = () => works(() => file.handle.write(data, { at: index * file.chunk_bytes }) === size);
    if (file.unstored.size || !(isStored() || ((await this.dropOthers(name)) && isStored()))) {
      if (!file.unstored.size) this.onFull();
      file.unstored.set(index, data);
    }
    file.missing.delete(index);
    if (!file.missing.size) await this.finish();
  }

  // Opens a complete file to read.
  async open(name) {
    checkName(name);
    const file = this.arriving;
    if (file?.name === name && !file.missing.size) {
      this.arriving = null;
      return withUnstored(file);
    }
    if (!(await this.folder.names()).includes(`${name}.done`)) throw incomplete(`the file ${name} is not complete here`);
    await this.close();
    return this.folder.open(name);
  }

  // Closes an open file. If its user has cleared the storage, the file closes with the worker: Chromium never returns
  // from closing a file that no longer exists.
  async release(name, file) {
    const names = await this.folder.names().catch(() => []);
    if (names.includes(name)) file.close();
  }

  // Deletes all other files, since one does not fit beside them. Returns whether there were any.
  async dropOthers(name) {
    const others = (await this.folder.names()).filter((other) => isDigest(other) && other !== name);
    for (const other of others) await this.drop(other).catch(() => {});
    return others.length > 0;
  }

  async drop(name) {
    checkName(name);
    if (this.arriving?.name === name) await this.close();
    await this.folder.remove(`${name}.done`);
    await this.folder.remove(name);
  }

  async close() {
    const file = this.arriving;
    this.arriving = null;
    if (file) await this.release(file.name, file.handle);
  }

  async finish() {
    const { name, handle, unstored } = this.arriving;
    if (!unstored.size && works(() => (handle.flush(), true))) {
      await this.folder.open(`${name}.done`).then((done) => done.close(), this.onFull);
    }
  }
}

// The origin private file system of the browser. Its user may clear it at any time.
export async function browserFolder() {
  const folder = async () => (await navigator.storage.getDirectory()).getDirectoryHandle("slices", { create: true });
  await folder();
  return {
    async names() {
      const names = [];
      for await (const name of (await folder()).keys()) names.push(name);
      return names;
    },
    size: async (name) => (await (await (await folder()).getFileHandle(name)).getFile()).size,
    async open(name) {
      const file = await (await folder()).getFileHandle(name, { create: true });
      for (const end = Date.now() + OPEN_S * 1000; ; ) {
        try {
          return await file.createSyncAccessHandle();
        } catch (error) {
          if (Date.now() > end) throw new Error(`another tab of this page uses the file: ${error.message}`);
          await new Promise((done) => setTimeout(done, 100));
        }
      }
    },
    remove: async (name) => (await folder()).removeEntry(name).catch((error) => {
      if (error.name !== "NotFoundError") throw error;
    }),
    async free() {
      const { quota = 0, usage = 0 } = await navigator.storage.estimate();
      return Math.max(0, quota - usage);
    },
  };
}

// Returns an open file whose chunks are partly in memory.
function withUnstored({ size, chunk_bytes, handle, unstored }) {
  if (!unstored.size) return handle;
  return {
    getSize: () => size,
    read(buffer, { at }) {
      let read = 0;
      for (const end = Math.min(buffer.length, size - at); read < end; ) {
        const index = Math.floor((at + read) / chunk_bytes);
        const start = at + read - index * chunk_bytes;
        const part = buffer.subarray(read, Math.min(end, read + chunk_bytes - start));
        const data = unstored.get(index);
        if (data) part.set(data.subarray(start, start + part.length));
        else if (handle.read(part, { at: at + read }) !== part.length) break;
        read += part.length;
      }
      return read;
    },
    close: () => handle.close(),
  };
}

// Returns the result of an action, or false if it throws.
function works(action) {
  try {
    return action();
  } catch {
    return false;
  }
}

// Returns an error after which the owner sends the file again: another session unloaded, or sent a file of its own.
const incomplete = (text) => Object.assign(new Error(text), { incomplete: true });

const isDigest = (text) => typeof text === "string" && /^[0-9a-f]{64}$/.test(text);
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const chunkSize = (file, index) => Math.min(file.chunk_bytes, file.size - index * file.chunk_bytes);

function checkName(name) {
  if (!isDigest(name)) throw new Error("a file's name is its SHA-256 digest in hexadecimal digits");
}

async function digest(data) {
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
