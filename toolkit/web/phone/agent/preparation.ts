/**
 * Samples of the owner's files, as the federation's file describes them.
 *
 * Agents make the same numbers of the same files (device_agent/data/preparation.py).
 */

import { Failure } from "./failure.js";
import { readNpz, type StoredArray } from "./npz.js";
import { picturesOf } from "./pictures.js";
import type { OnProgress, Prepared, SampleForm, Samples, Source } from "./sample_form.js";
import { sha256 } from "./storage.js";
import { bytesOf, sizeOf } from "./tensors.js";
import { windowsOf } from "./windows.js";

/** Bytes of a piece of a file. */
const HASHED = 1 << 22;

export interface Chosen {
  /** Of the first file. */
  name: string;
  /** SHA-256 of each file: the same content counts once. */
  hashes: string[];
  bytes: number;
  x: StoredArray;
  y: StoredArray;
}

/**
 * Opens what the owner has chosen; the numbers are made when they are read.
 *
 * @param known SHA-256 of the files that the page has already: they are left out.
 */
export async function open(
  source: Source,
  form: SampleForm,
  known: readonly string[],
  onProgress: OnProgress,
): Promise<Chosen> {
  const given = source.kind === "images" ? source.pictures : filesOf(source).map((file) => ({ file, label: "" }));
  const once = await distinct(given, known, onProgress);
  const files = once.map(({ file }) => file);
  const hashes = once.map(({ hash }) => hash);
  const [first] = files;
  if (first === undefined) throw new Failure(given.length === 0 ? "data.missing-file" : "data.nothing-new", {});
  if (source.kind === "npz") return { hashes, ...(await openNpz(first, form)) };
  const left: Source =
    source.kind === "images" ? { kind: "images", pictures: once } : { kind: "series", files };
  const prepared = await prepare(left, form, onProgress);
  const count = prepared.y.length;
  return {
    name: first.name,
    hashes,
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

function filesOf(source: Exclude<Source, { kind: "images" }>): File[] {
  return source.kind === "npz" ? [source.file] : source.files;
}

interface Hashed {
  file: File;
  label: string;
  hash: string;
}

/** Those with a content that is neither `known` nor that of an earlier one. */
async function distinct(
  given: readonly { file: File; label: string }[],
  known: readonly string[],
  onProgress: OnProgress,
): Promise<Hashed[]> {
  const seen = new Set(known);
  const found: Hashed[] = [];
  const of = given.reduce((sum, { file }) => sum + file.size, 0);
  let done = 0;
  for (const { file, label } of given) {
    onProgress({ unit: "bytes", done, of });
    const hash = await hashOf(file);
    done += file.size;
    if (seen.has(hash)) continue;
    seen.add(hash);
    found.push({ file, label, hash });
  }
  return found;
}

/** SHA-256 of the SHA-256s of a file's pieces: a file may be larger than the memory. */
async function hashOf(file: File): Promise<string> {
  const digests: string[] = [];
  try {
    for (let at = 0; at < file.size; at += HASHED) {
      digests.push(await sha256(new Uint8Array(await file.slice(at, at + HASHED).arrayBuffer())));
    }
  } catch {
    // It has gone, or is in a cloud that does not answer.
    throw new Failure("data.unreadable-file/gone", { file: file.name });
  }
  return sha256(new TextEncoder().encode(digests.join("")));
}

async function openNpz(file: File, form: SampleForm): Promise<Omit<Chosen, "hashes">> {
  const arrays = await readNpz(file);
  const [x, y] = [arrays.get("x"), arrays.get("y")];
  if (x === undefined || y === undefined) {
    throw new Failure("data.missing-array", { file: file.name });
  }
  // A federation of an earlier version does not say its shape.
  const known = form.sample_shape.length > 0;
  if (known && `${x.shape.slice(1)}` !== `${form.sample_shape}`) {
    throw new Failure("data.wrong-shape/x", {
      name: file.name,
      wanted: x.dtype,
      wantedShape: form.sample_shape,
      found: x.dtype,
      foundShape: x.shape.slice(1),
    });
  }
  if (known && y.dtype !== form.label_type) {
    const shape = y.shape.slice(1);
    const types = { wanted: form.label_type, wantedShape: shape, found: y.dtype, foundShape: shape };
    throw new Failure("data.wrong-shape/y", { name: file.name, ...types });
  }
  return { name: file.name, bytes: file.size, x, y };
}

function prepare(
  source: Exclude<Source, { kind: "npz" }>,
  { preprocessing, sample_shape, label_type }: SampleForm,
  onProgress: OnProgress,
): Promise<Prepared> | Prepared {
  if (source.kind === "images" && preprocessing?.kind === "images") {
    return picturesOf(source.pictures, preprocessing, sample_shape, onProgress);
  }
  if (source.kind === "series" && preprocessing?.kind === "series") {
    return windowsOf(source.files, preprocessing, sizeOf(sample_shape), label_type, onProgress);
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
