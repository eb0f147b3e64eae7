/** Tensors, and the safetensors format in which bundles and updates store them. */

import { Failure } from "./faults.js";

export type Dtype = "float32" | "int64";
export type Numbers = Float32Array<ArrayBuffer> | BigInt64Array<ArrayBuffer>;

export interface Tensor {
  dtype: Dtype;
  shape: number[];
  data: Numbers;
}
export type Tensors = Map<string, Tensor>;

export const BYTES: Record<Dtype, number> = { float32: 4, int64: 8 };
const NAMES: Record<Dtype, string> = { float32: "F32", int64: "I64" };
/** The most bytes of a header: more than for a model with 100,000 tensors. */
const LONGEST_HEADER = 32 << 20;

export function sizeOf(shape: readonly number[]): number {
  return shape.reduce((product, size) => product * size, 1);
}

/** The quantile `share` of sorted numbers, with linear interpolation. */
export function quantile(sorted: ArrayLike<number>, share: number): number {
  const index = share * (sorted.length - 1);
  const [below, above] = [sorted[Math.floor(index)]!, sorted[Math.ceil(index)]!];
  return below + (above - below) * (index % 1);
}

export function numbers(dtype: Dtype, bytes: ArrayBuffer): Numbers {
  return dtype === "int64" ? new BigInt64Array(bytes) : new Float32Array(bytes);
}

export function zeros(dtype: Dtype, shape: readonly number[]): Tensor {
  return { dtype, shape: [...shape], data: numbers(dtype, new ArrayBuffer(sizeOf(shape) * BYTES[dtype])) };
}

export function bytesOf(data: Numbers | Uint16Array<ArrayBuffer>): Uint8Array<ArrayBuffer> {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

/** The type, shape and position of a tensor in a file. */
export interface Place {
  dtype: Dtype;
  shape: number[];
  start: number;
  bytes: number;
}

/** Reads `length` bytes from `start` of a file. */
export type ReadBytes = (start: number, length: number) => Uint8Array<ArrayBuffer>;

/** Reads the header of a safetensors file of `size` bytes. Returns the position of each tensor. */
export function readPlaces(read: ReadBytes, size: number, origin: string): Map<string, Place> {
  const wrong = (): Failure =>
    new Failure("bundle.unreadable-tensors", { file: origin });
  if (size < 8) throw wrong();
  const prefix = read(0, 8);
  const length = Number(new DataView(prefix.buffer, prefix.byteOffset).getBigUint64(0, true));
  if (length > Math.min(size - 8, LONGEST_HEADER)) throw wrong();
  const places = new Map<string, Place>();
  let header: unknown;
  try {
    header = JSON.parse(new TextDecoder().decode(read(8, length)));
  } catch {
    throw wrong();
  }
  for (const [name, entry] of Object.entries(header as Record<string, unknown>)) {
    if (name === "__metadata__") continue;
    const { dtype, shape, data_offsets } = entry as Record<string, unknown>;
    const known = dtype === "F32" ? "float32" : dtype === "I64" ? "int64" : null;
    if (known === null || !isSizes(shape) || !isSizes(data_offsets)) throw wrong();
    const [start = 0, stop = 0] = data_offsets;
    const bytes = stop - start;
    if (bytes !== sizeOf(shape) * BYTES[known] || 8 + length + stop > size) {
      throw wrong();
    }
    places.set(name, { dtype: known, shape, start: 8 + length + start, bytes });
  }
  return places;
}

function isSizes(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((size) => Number.isSafeInteger(size) && size >= 0);
}

export function readTensor(read: ReadBytes, place: Place): Tensor {
  const bytes = read(place.start, place.bytes);
  return { dtype: place.dtype, shape: place.shape, data: numbers(place.dtype, bytes.buffer) };
}

/** The bytes of a safetensors file, with wider types first, like `safetensors.numpy.save`. */
export function writeTensors(tensors: Tensors): Uint8Array<ArrayBuffer> {
  const ordered = [...tensors].sort(
    ([a, x], [b, y]) => BYTES[y.dtype] - BYTES[x.dtype] || (a < b ? -1 : 1),
  );
  const header: Record<string, unknown> = {};
  let end = 0;
  for (const [name, { dtype, shape, data }] of ordered) {
    header[name] = { dtype: NAMES[dtype], shape, data_offsets: [end, end + data.byteLength] };
    end += data.byteLength;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const length = Math.ceil(text.length / 8) * 8;
  const out = new Uint8Array(8 + length + end).fill(0x20, 8, 8 + length);
  new DataView(out.buffer).setBigUint64(0, BigInt(length), true);
  out.set(text, 8);
  let at = 8 + length;
  for (const [, { data }] of ordered) {
    out.set(bytesOf(data), at);
    at += data.byteLength;
  }
  return out;
}

export function readAllTensors(bytes: Uint8Array<ArrayBuffer>, origin: string): Tensors {
  const read: ReadBytes = (start, length) => bytes.slice(start, start + length);
  const places = readPlaces(read, bytes.length, origin);
  return new Map([...places].map(([name, place]) => [name, readTensor(read, place)]));
}
