/**
 * Samples of the owner's files, as the federation's file describes them.
 *
 * Agents make the same numbers of the same files (device_agent/data/preparation.py).
 */

import { Failure } from "./failure.js";
import { readNpz, type StoredArray } from "./npz.js";
import { picturesOf } from "./pictures.js";
import type { Prepared, SampleForm, Samples } from "./sample_form.js";
import { bytesOf, sizeOf } from "./tensors.js";
import { windowsOf } from "./windows.js";

/** What the owner has chosen. */
export type Source =
  | { kind: "npz"; file: File }
  | { kind: "images"; pictures: { file: File; label: string }[] }
  | { kind: "series"; files: File[] };

export interface Chosen {
  /** Of the first file. */
  name: string;
  files: number;
  bytes: number;
  x: StoredArray;
  y: StoredArray;
}

/** Opens what the owner has chosen; the numbers are made when they are read. */
export async function open(
  source: Source,
  form: SampleForm,
  onProgress: (done: number, of: number) => void,
): Promise<Chosen> {
  if (source.kind === "npz") return openNpz(source.file);
  const files = source.kind === "images" ? source.pictures.map(({ file }) => file) : source.files;
  const [first] = files;
  if (first === undefined) throw new Failure("data.missing-file", {});
  const prepared = await prepare(source, form, onProgress);
  const count = prepared.y.length;
  return {
    name: first.name,
    files: files.length,
    bytes: files.reduce((sum, file) => sum + file.size, 0),
    x: {
      dtype: "float32",
      shape: [count, ...form.sample_shape],
      bytes: () => streamOf(prepared.samples()),
    },
    y: {
      dtype: form.label_type,
      shape: [count],
      bytes: () => new Blob([bytesOf(prepared.y)]).stream(),
    },
  };
}

async function openNpz(file: File): Promise<Chosen> {
  const arrays = await readNpz(file);
  const [x, y] = [arrays.get("x"), arrays.get("y")];
  if (x === undefined || y === undefined) {
    throw new Failure("data.missing-array", { file: file.name });
  }
  return { name: file.name, files: 1, bytes: file.size, x, y };
}

function prepare(
  source: Exclude<Source, { kind: "npz" }>,
  { preprocessing, sample_shape, label_type }: SampleForm,
  onProgress: (done: number, of: number) => void,
): Promise<Prepared> | Prepared {
  if (source.kind === "images" && preprocessing?.kind === "images") {
    return picturesOf(source.pictures, preprocessing, sample_shape, onProgress);
  }
  if (source.kind === "series" && preprocessing?.kind === "series") {
    return windowsOf(source.files, preprocessing, sizeOf(sample_shape), label_type);
  }
  throw new Failure("data.not-prepared", {});
}

function streamOf(samples: Samples): ReadableStream<Uint8Array<ArrayBuffer>> {
  return new ReadableStream({
    async pull(controller) {
      const next = await samples.next();
      if (next.done) controller.close();
      else controller.enqueue(bytesOf(next.value));
    },
  });
}
