/**
 * The page's own files in the browser's private file system (OPFS). They survive a killed tab.
 *
 * If a file must never be read half-written, it is a Sealed file: its SHA-256 comes before its
 * content. A Sealed file has two copies, which are written in turn. So the older copy stays complete
 * while the newer one is written.
 */

import { Failure } from "./faults.js";
import type { ReadBytes } from "./tensors.js";

export type Bytes = Uint8Array<ArrayBuffer>;

export async function sha256(bytes: Bytes | Bytes[]): Promise<string> {
  const whole = Array.isArray(bytes) ? new Uint8Array(await new Blob(bytes).arrayBuffer()) : bytes;
  return hex(new Uint8Array(await crypto.subtle.digest("SHA-256", whole)));
}

function hex(bytes: Bytes): string {
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Yields the pieces of `stream`, because not every browser can iterate over a stream. */
export async function* piecesOf(stream: ReadableStream<Bytes>): AsyncGenerator<Bytes, void> {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/** How long a file may stay open in a worker that the browser is ending. Chromium ends a long run after 2 s. */
const RELEASE_MS = 20_000;
const RELEASE_CHECK_MS = 100;

/** Repeats `use`, which fails while another worker has the file open, and returns its result. */
async function released<T>(use: () => Promise<T>): Promise<T> {
  for (const begun = performance.now(); ; ) {
    try {
      return await use();
    } catch (error) {
      const held = error instanceof DOMException && error.name === "NoModificationAllowedError";
      if (!held || performance.now() - begun > RELEASE_MS) throw error;
      await new Promise((done) => setTimeout(done, RELEASE_CHECK_MS));
    }
  }
}

/** An open file. Only a worker can open files, and a file can be open only once. */
export class OpenFile {
  private constructor(private readonly handle: FileSystemSyncAccessHandle) {}

  static async at(folder: FileSystemDirectoryHandle, name: string): Promise<OpenFile> {
    const file = await folder.getFileHandle(name, { create: true });
    return new OpenFile(await released(() => file.createSyncAccessHandle()));
  }

  get size(): number {
    return this.handle.getSize();
  }

  readonly read: ReadBytes = (start, length) => {
    const bytes = new Uint8Array(length);
    if (this.handle.read(bytes, { at: start }) !== length) {
      throw new Failure("storage.lost", {});
    }
    return bytes;
  };

  write(bytes: Bytes, start: number): void {
    let written = 0;
    while (written < bytes.length) {
      const more = this.handle.write(bytes.subarray(written), { at: start + written });
      if (more === 0) throw new Failure("storage.disk-full", {});
      written += more;
    }
  }

  truncate(size: number): void {
    this.handle.truncate(size);
  }

  flush(): void {
    this.handle.flush();
  }

  close(): void {
    this.handle.close();
  }
}

export async function folderOf(...names: string[]): Promise<FileSystemDirectoryHandle> {
  let folder = await navigator.storage.getDirectory();
  for (const name of names) folder = await folder.getDirectoryHandle(name, { create: true });
  return folder;
}

export async function remove(folder: FileSystemDirectoryHandle, name: string): Promise<void> {
  try {
    await released(() => folder.removeEntry(name, { recursive: true }));
  } catch (error) {
    if (!(error instanceof DOMException && error.name === "NotFoundError")) throw error;
  }
}

export async function names(folder: FileSystemDirectoryHandle): Promise<string[]> {
  const names = [];
  for await (const name of folder.keys()) names.push(name);
  return names;
}

/** Bytes before the content: its SHA-256, then the number of the copy (8 bytes). */
const SEAL = 32 + 8;

/** A file that is replaced as a whole, or not at all. */
export class Sealed {
  private serial = 0n;

  constructor(
    private readonly folder: FileSystemDirectoryHandle,
    private readonly name: string,
  ) {}

  async save(content: Bytes): Promise<void> {
    const serial = this.serial + 1n;
    const body = new Uint8Array(8 + content.length);
    new DataView(body.buffer).setBigUint64(0, serial);
    body.set(content, 8);
    const seal = new Uint8Array(await crypto.subtle.digest("SHA-256", body));
    const file = await OpenFile.at(this.folder, this.copy(serial));
    try {
      file.truncate(0);
      file.write(seal, 0);
      file.write(body, seal.length);
      file.flush();
    } finally {
      file.close();
    }
    this.serial = serial;
  }

  /** The newest complete content; null if there is none. */
  async load(): Promise<Bytes | null> {
    let newest: Bytes | null = null;
    let latest = 0n;
    for (const turn of [0n, 1n]) {
      const file = await OpenFile.at(this.folder, this.copy(turn));
      const bytes = file.read(0, file.size);
      file.close();
      if (bytes.length < SEAL) continue;
      const body = bytes.subarray(32);
      const seal = hex(new Uint8Array(await crypto.subtle.digest("SHA-256", body)));
      const serial = new DataView(bytes.buffer).getBigUint64(32);
      if (seal === hex(bytes.subarray(0, 32)) && serial > latest) {
        latest = serial;
        newest = bytes.slice(SEAL);
      }
    }
    // A save may have ended meanwhile.
    if (latest > this.serial) this.serial = latest;
    return newest;
  }

  async remove(): Promise<void> {
    for (const turn of [0n, 1n]) await remove(this.folder, this.copy(turn));
    this.serial = 0n;
  }

  private copy(serial: bigint): string {
    return `${this.name}.${serial % 2n}`;
  }
}

/** Packs JSON and bytes: the length of the JSON (4 bytes), the JSON, then `parts`. */
export function packed(head: object, ...parts: Bytes[]): Bytes {
  const text = new TextEncoder().encode(JSON.stringify(head));
  const all = [new Uint8Array(4), text, ...parts];
  const content = new Uint8Array(all.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of all) {
    content.set(part, at);
    at += part.length;
  }
  new DataView(content.buffer).setUint32(0, text.length);
  return content;
}

/** The JSON in packed bytes, and the bytes of all its parts. */
export function unpacked<T>(content: Bytes): [T, Bytes] {
  const end = 4 + new DataView(content.buffer).getUint32(0);
  return [JSON.parse(new TextDecoder().decode(content.subarray(4, end))) as T, content.slice(end)];
}

const STORE = "values";

const DATABASE = "edgetailor";

/** A database for small values, and for the key: it cannot be written to a file or leave the browser. */
export class Values {
  private opened: IDBDatabase | null = null;

  async get<T>(name: string): Promise<T | null> {
    const database = await this.open(false);
    if (database === null) return null;
    const store = database.transaction(STORE).objectStore(STORE);
    return ((await answer(store.get(name))) as T | undefined) ?? null;
  }

  /** Stores all values, or none if it fails. A null removes the value. */
  async put(values: Record<string, unknown>): Promise<void> {
    const database = (await this.open(true))!;
    const transaction = database.transaction(STORE, "readwrite", { durability: "strict" });
    const store = transaction.objectStore(STORE);
    for (const [name, value] of Object.entries(values)) {
      if (value === null) store.delete(name);
      else store.put(value, name);
    }
    await new Promise<void>((done, failed) => {
      transaction.oncomplete = () => done();
      transaction.onabort = () => failed(transaction.error ?? new Error("storage"));
    });
  }

  async erase(): Promise<void> {
    this.opened?.close();
    this.opened = null;
    await answer(indexedDB.deleteDatabase(DATABASE));
  }

  /** Opens the database. Only with `make` creates it: a page that was only looked at stores nothing. */
  private async open(make: boolean): Promise<IDBDatabase | null> {
    if (this.opened !== null) return this.opened;
    const request = indexedDB.open(DATABASE, 1);
    let none = false;
    request.onupgradeneeded = () => {
      if (make) request.result.createObjectStore(STORE);
      else request.transaction!.abort();
      none = !make;
    };
    return answer(request).then(
      (database) => (this.opened = database),
      (error: unknown) => {
        if (none) return null;
        throw error;
      },
    );
  }
}

function answer<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((done, failed) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error ?? new Error("storage"));
  });
}

/** Removes everything that this page has stored. The page itself removes its own copy. */
export async function eraseAll(values: Values): Promise<void> {
  const root = await folderOf();
  for (const name of await names(root)) await remove(root, name);
  await values.erase();
}
