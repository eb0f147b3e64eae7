/** Reads numpy's `.npz`: a zip of `.npy` files, stored or deflated. */

import { BlobReader, configure, ZipReader, type FileEntry } from "@zip.js/zip.js/lib/zip-core-custom.js";
import { Failure } from "./faults.js";
import { piecesOf, type Bytes } from "./storage.js";
import { BYTES, sizeOf, type Dtype } from "./tensors.js";

configure({ useWebWorkers: false }); // this is a worker already

/** The most bytes of the header before an array's numbers. */
const LONGEST_HEADER = 1 << 16;

/** The bytes of an array in C order, piece by piece. */
export type Pieces = AsyncIterable<Bytes> | Iterable<Bytes>;

/** An array whose numbers are still in the file. */
export interface StoredArray {
  dtype: Dtype;
  shape: number[];
  bytes: () => Pieces;
}

function wrong(file: File): Failure {
  return new Failure("data.unreadable", { file: file.name });
}

/** The arrays of `file`, by name. Their numbers are read later, piece by piece. */
export async function readNpz(file: File): Promise<Map<string, StoredArray>> {
  const entries = await new ZipReader(new BlobReader(file)).getEntries().catch(() => {
    throw wrong(file);
  });
  const arrays = new Map<string, StoredArray>();
  for (const entry of entries) {
    if (entry.directory) throw wrong(file);
    arrays.set(entry.filename.replace(/\.npy$/, ""), await readNpy(file, entry));
  }
  return arrays;
}

async function readNpy(file: File, entry: FileEntry): Promise<StoredArray> {
  const head = await firstBytes(contentOf(file, entry), LONGEST_HEADER);
  const view = new DataView(head.buffer);
  if (head.length < 12 || view.getUint32(0) !== 0x934e554d) throw wrong(file);
  const start = head[6] === 1 ? 10 + view.getUint16(8, true) : 12 + view.getUint32(8, true);
  if (start > head.length) throw wrong(file);
  const text = new TextDecoder().decode(head.subarray(10, start));
  const type = /'descr': '([^']+)'/.exec(text)?.[1];
  const sizes = /'shape': \(([^)]*)\)/.exec(text)?.[1];
  if (type === undefined || sizes === undefined) throw wrong(file);
  if (text.includes("'fortran_order': True")) {
    throw new Failure("data.unreadable/fortran", { file: file.name });
  }
  if (type !== "<f4" && type !== "<i8") {
    throw new Failure("data.wrong-type", { file: file.name, type });
  }
  const dtype = type === "<f4" ? "float32" : "int64";
  const shape = sizes.split(",").map((size) => size.trim()).filter(Boolean).map(Number);
  if (entry.uncompressedSize !== start + sizeOf(shape) * BYTES[dtype]) throw wrong(file);
  return { dtype, shape, bytes: () => after(start, contentOf(file, entry)) };
}

/** The content of an entry. Its checksum is checked at the end. */
async function* contentOf(file: File, entry: FileEntry): AsyncGenerator<Bytes, void> {
  const { readable, writable } = new TransformStream<Bytes, Bytes>();
  const copied = entry.getData(writable, { checkSignature: true });
  copied.catch((error) => writable.abort(error)).catch(() => undefined);
  try {
    yield* piecesOf(readable);
    await copied;
  } catch {
    throw wrong(file);
  }
}

/** The first `length` bytes of `content`, or all if it is shorter. */
export async function firstBytes(content: Pieces, length: number): Promise<Bytes> {
  const out = new Uint8Array(length);
  let filled = 0;
  for await (const piece of content) {
    const taken = piece.subarray(0, length - filled);
    out.set(taken, filled);
    filled += taken.length;
    if (filled === length) break;
  }
  return out.subarray(0, filled);
}

/** The bytes of `content` after the first `start`. */
async function* after(start: number, content: AsyncIterable<Bytes>): AsyncGenerator<Bytes, void> {
  let left = start;
  for await (const piece of content) {
    const skipped = Math.min(left, piece.length);
    left -= skipped;
    yield piece.subarray(skipped);
  }
}
