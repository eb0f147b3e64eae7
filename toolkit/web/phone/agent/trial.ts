/** "Try the model": the model on this device answers for a file of the owner. The file is not stored. */

import { answerOf } from "./answer.js";
import { openStored, type Bundle } from "./bundle.js";
import { Failure } from "./faults.js";
import { sampleParts, type Manifest } from "./manifest.js";
import type { Trial } from "./messages.js";
import { modelInUse } from "./model_in_use.js";
import { firstBytes, readNpz, type StoredArray } from "./npz.js";
import { arrayNames } from "./packing.js";
import { pictureOf } from "./pictures.js";
import { outputOf } from "./prediction.js";
import { checkArray } from "./preparation.js";
import type { Values } from "./storage.js";
import { BYTES, numbers, sizeOf, type Dtype, type Numbers, type Tensor, type Tensors } from "./tensors.js";
import type { Results } from "./update.js";
import { lastWindow } from "./windows.js";

/** What the runtime says if memory is missing. */
const NO_MEMORY = /bad_alloc|memory|allocat/i;

interface Model {
  bundle: Bundle;
  /** Tensors that replace those of the bundle. */
  state: Tensors;
}

/** The model that answers. */
async function chosenModel(values: Values, results: Results): Promise<Model> {
  const stored = await modelInUse(values);
  if (stored === null) throw new Failure("trial.no-model", {});
  const bundle = await openStored(stored, values);
  const own = stored.personal ? await results.personalModel(bundle.manifest) : null;
  return { bundle, state: own ?? new Map<string, Tensor>() };
}

/** `error`, or the failure for owners if memory is missing. */
export function outOfMemory(error: unknown): unknown {
  // Without room, browsers cannot make an array, and the runtime writes beyond its memory.
  const noMemory = error instanceof RangeError || NO_MEMORY.test(String(error));
  return noMemory && !(error instanceof Failure) ? new Failure("trial.no-memory", {}) : error;
}

/** The answer of the model for the picture, the last lines or the first array in `file`. */
export async function tryModel(file: File, values: Values, results: Results): Promise<Trial> {
  try {
    const { bundle, state } = await chosenModel(values, results);
    const { manifest } = bundle;
    const { sample, data, dtype } = await sampleOf(file, manifest);
    const x = { dtype, shape: [1, ...manifest.sample_shape], data };
    const answer = answerOf(await outputOf(bundle, x, state), manifest);
    return { file: file.name, sample, answer, names: manifest.preprocessing?.classes ?? [] };
  } catch (error) {
    throw outOfMemory(error);
  }
}

interface Sample {
  sample: Trial["sample"];
  dtype: Dtype;
  data: Numbers;
}

async function sampleOf(file: File, manifest: Manifest): Promise<Sample> {
  const { preprocessing, sample_shape } = manifest;
  if (preprocessing === null) return firstOf(file, manifest);
  if (preprocessing.kind === "images") {
    const data = await pictureOf(file, preprocessing, sample_shape);
    return { sample: { is: "picture" }, dtype: "float32", data };
  }
  const { sample: data, lines } = await lastWindow(file, preprocessing, sizeOf(sample_shape));
  return { sample: { is: "window", lines }, dtype: "float32", data };
}

/** The first example of the array x, or of all arrays x_NAME, in a numpy file. It needs no labels. */
async function firstOf(file: File, manifest: Manifest): Promise<Sample> {
  const { sample_dtype: dtype, sample_shape: shape, sample_limit: limit } = manifest;
  const parts = sampleParts(manifest);
  const arrays = await readNpz(file);
  const [first, ...others] = arrayNames("x", parts).map((name) => arrays.get(name));
  const of = first?.shape[0] ?? 0;
  if (first === undefined || others.includes(undefined) || of === 0) {
    if (parts.length === 0) throw new Failure("data.missing-array/x", { file: file.name });
    throw new Failure("data.missing-array/several", { name: file.name, arrays: arrayNames("x", parts) });
  }
  const sample = { is: "array", of } as const;
  if (parts.length === 0) return { sample, dtype, data: await firstRow(file, "x", first, { dtype, shape, limit }) };
  const rows: number[] = [];
  for (const [i, name] of arrayNames("x", parts).entries()) {
    const row = await firstRow(file, name, arrays.get(name)!, parts[i]!);
    for (const number of row) rows.push(Number(number));
  }
  return { sample, dtype, data: Float32Array.from(rows) };
}

interface RowKind {
  dtype: Dtype;
  shape: number[];
  limit: number | null;
}

async function firstRow(file: File, array: string, stored: StoredArray, kind: RowKind): Promise<Numbers> {
  const { dtype, shape, limit } = kind;
  const name = array === "x" ? file.name : `${file.name} (${array})`;
  checkArray("x", name, [dtype, shape], [stored.dtype, stored.shape.slice(1)]);
  const bytes = await firstBytes(stored.bytes(), sizeOf(shape) * BYTES[dtype]);
  if (bytes.length < bytes.buffer.byteLength) throw new Failure("data.unreadable", { file: file.name });
  const data = numbers(dtype, bytes.buffer);
  const fits = (number: number | bigint): boolean =>
    Number.isFinite(Number(number)) && (dtype === "float32" || (number >= 0 && number < (limit ?? Infinity)));
  if (![...data].every(fits)) throw new Failure("data.number-out-of-range", { name, sample: 0 });
  return data;
}
