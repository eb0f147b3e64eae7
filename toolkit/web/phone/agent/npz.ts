/** numpy's `.npz`: a zip of `.npy` files, stored or deflated. */

import { Failure } from "./failure.js";
import type { Dtype } from "./tensors.js";

const END_OF_ZIP = 0x06054b50;
const LONGEST_END = 65557; // with the longest comment
const STORED = 0;
const DEFLATED = 8;

/** An array whose numbers are still in the file. */
export interface StoredArray {
  dtype: Dtype;
  shape: number[];
  /** The array's bytes, in C order. */
  bytes: () => ReadableStream<Uint8Array<ArrayBuffer>>;
}

function wrong(file: File): Failure {
  return new Failure("data.unreadable", { file: file.name });
}

/** The arrays of `file` by name. Their numbers are read later, piece by piece. */
export async function readNpz(file: File): Promise<Map<string, StoredArray>> {
  const tail = file.slice(Math.max(0, file.size - LONGEST_END));
  const end = new DataView(await tail.arrayBuffer());
  let at = end.byteLength - 22;
  while (at >= 0 && end.getUint32(at, true) !== END_OF_ZIP) at--;
  if (at < 0) throw wrong(file);
  const count = end.getUint16(at + 10, true);
  const directory = new DataView(
    await file.slice(end.getUint32(at + 16, true), file.size).arrayBuffer(),
  );
  const arrays = new Map<string, StoredArray>();
  let entry = 0;
  for (let i = 0; i < count; i++) {
    if (entry + 46 > directory.byteLength) throw wrong(file);
    const method = directory.getUint16(entry + 10, true);
    const packed = directory.getUint32(entry + 20, true);
    const nameLength = directory.getUint16(entry + 28, true);
    const more = directory.getUint16(entry + 30, true) + directory.getUint16(entry + 32, true);
    const header = directory.getUint32(entry + 42, true);
    const name = new TextDecoder().decode(
      new Uint8Array(directory.buffer, entry + 46, nameLength),
    );
    entry += 46 + nameLength + more;
    if (method !== STORED && method !== DEFLATED) throw wrong(file);
    const local = new DataView(await file.slice(header, header + 30).arrayBuffer());
    const start = header + 30 + local.getUint16(26, true) + local.getUint16(28, true);
    const body = file.slice(start, start + packed);
    const open = (): ReadableStream<Uint8Array<ArrayBuffer>> =>
      method === STORED
        ? body.stream()
        : body.stream().pipeThrough(new DecompressionStream("deflate-raw"));
    arrays.set(name.replace(/\.npy$/, ""), await readNpy(file, open));
  }
  return arrays;
}

async function readNpy(
  file: File,
  open: () => ReadableStream<Uint8Array<ArrayBuffer>>,
): Promise<StoredArray> {
  const head = await first(open(), 12);
  const view = new DataView(head.buffer, head.byteOffset, head.length);
  if (head.length < 12 || view.getUint32(0) !== 0x934e554d) throw wrong(file);
  const start = head[6] === 1 ? 10 + view.getUint16(8, true) : 12 + view.getUint32(8, true);
  if (start > 1 << 16) throw wrong(file);
  const text = new TextDecoder().decode((await first(open(), start)).subarray(10));
  const type = /'descr': '([^']+)'/.exec(text)?.[1];
  const sizes = /'shape': \(([^)]*)\)/.exec(text)?.[1];
  if (type === undefined || sizes === undefined) throw wrong(file);
  if (text.includes("'fortran_order': True")) {
    throw new Failure("data.unreadable/fortran", { file: file.name });
  }
  if (type !== "<f4" && type !== "<i8") {
    throw new Failure("data.wrong-type", { file: file.name, type });
  }
  return {
    dtype: type === "<f4" ? "float32" : "int64",
    shape: sizes.split(",").map((size) => size.trim()).filter(Boolean).map(Number),
    bytes: () => open().pipeThrough(skipping(start)),
  };
}

/** The first bytes of a stream: `length`, or fewer if it ends before. */
async function first(
  stream: ReadableStream<Uint8Array<ArrayBuffer>>,
  length: number,
): Promise<Uint8Array<ArrayBuffer>> {
  const reader = stream.getReader();
  const out = new Uint8Array(length);
  let filled = 0;
  while (filled < length) {
    const { value, done } = await reader.read();
    if (done) break;
    const taken = value.subarray(0, length - filled);
    out.set(taken, filled);
    filled += taken.length;
  }
  await reader.cancel();
  return out.subarray(0, filled);
}

function skipping(bytes: number): TransformStream<Uint8Array<ArrayBuffer>, Uint8Array<ArrayBuffer>> {
  let left = bytes;
  return new TransformStream({
    transform(piece, out) {
      const skipped = Math.min(left, piece.length);
      left -= skipped;
      if (skipped < piece.length) out.enqueue(piece.subarray(skipped));
    },
  });
}
