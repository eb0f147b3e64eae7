/**
 * Makes samples from the owner's files, as the federation's file describes.
 *
 * Agents make the same numbers from the same files (device_agent/data/preparation.py).
 */

import { Failure } from "./faults.js";
import { readNpz, type StoredArray } from "./npz.js";
import { picturesOf } from "./pictures.js";
import type { OnProgress, Prepared, SampleForm, Samples, Source } from "./sample_form.js";
import { sha256, type Bytes } from "./storage.js";
import { bytesOf, sizeOf, type Dtype } from "./tensors.js";
import { windowsOf } from "./windows.js";

/** A file is hashed in pieces of this many bytes. */
const HASHED = 1 << 22;

export interface Chosen {
  /** The name of the first file. */
  name: string;
  /** SHA-256 of each file. Files with the same content count once. */
  hashes: string[];
  bytes: number;
  /** `x` and `y`, or several `x_NAME` or `y_NAME` in their place. */
  arrays: Map<string, StoredArray>;
}

/**
 * Opens the files that the owner has chosen. Their numbers are computed when they are read.
 *
 * @param known SHA-256 of the files that the page already has. They are left out.
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
    arrays: new Map<string, StoredArray>([
      [
        "x",
        {
          dtype: "float32",
          shape: [count, ...form.sample_shape],
          bytes: () => bytesOfAll(prepared.samples()),
        },
      ],
      ["y", { dtype: form.label_type, shape: [count], bytes: () => [bytesOf(prepared.y)] }],
    ]),
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

/** The files whose content is not `known` and not the content of an earlier file. */
async function distinct(
  given: readonly { file: File; label: string }[],
  known: readonly string[],
  onProgress: OnProgress,
): Promise<Hashed[]> {
  const seen = new Set(known);
  const kept: Hashed[] = [];
  const of = given.reduce((sum, { file }) => sum + file.size, 0);
  let done = 0;
  for (const { file, label } of given) {
    onProgress({ unit: "bytes", done, of });
    const hash = await hashOf(file);
    done += file.size;
    if (seen.has(hash)) continue;
    seen.add(hash);
    kept.push({ file, label, hash });
  }
  return kept;
}

/** SHA-256 of the SHA-256s of a file's pieces, because a file may be larger than the memory. */
async function hashOf(file: File): Promise<string> {
  const digests: string[] = [];
  try {
    for (let at = 0; at < file.size; at += HASHED) {
      digests.push(await sha256(new Uint8Array(await file.slice(at, at + HASHED).arrayBuffer())));
    }
  } catch {
    // The file was removed, or is in a cloud that does not answer.
    throw new Failure("data.unreadable-file/gone", { file: file.name });
  }
  return sha256(new TextEncoder().encode(digests.join("")));
}

async function openNpz(file: File, form: SampleForm): Promise<Omit<Chosen, "hashes">> {
  const all = await readNpz(file);
  const names = [...namesOf("x", all), ...(form.labels ? namesOf("y", all) : [])];
  const arrays = new Map(names.map((name) => [name, all.get(name)!]));
  const [x, y] = [arrays.get("x"), arrays.get("y")];
  // A federation of an earlier version does not send the shape. Several arrays are checked with a bundle.
  if (form.sample_shape.length > 0 && x !== undefined && y !== undefined) {
    const rows = { x: x.shape.slice(1), y: y.shape.slice(1) };
    checkArray("x", file.name, [x.dtype, form.sample_shape], [x.dtype, rows.x]);
    checkArray("y", file.name, [form.label_type, rows.y], [y.dtype, rows.y]);
  }
  return { name: file.name, bytes: file.size, arrays };

  function namesOf(prefix: "x" | "y", given: Map<string, StoredArray>): string[] {
    if (given.has(prefix)) return [prefix];
    const several = [...given.keys()].filter((name) => name.startsWith(`${prefix}_`)).sort();
    if (several.length === 0) throw new Failure("data.missing-array", { file: file.name });
    return several;
  }
}

/** Refuses an array whose type, or the shape of its rows, is not the wanted one. */
export function checkArray(
  array: "x" | "y",
  name: string,
  [wanted, wantedShape]: readonly [Dtype, readonly number[]],
  [found, foundShape]: readonly [Dtype, readonly number[]],
): void {
  if (found === wanted && `${foundShape}` === `${wantedShape}`) return;
  throw new Failure(`data.wrong-shape/${array}`, { name, wanted, wantedShape, found, foundShape });
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

async function* bytesOfAll(samples: Samples): AsyncGenerator<Bytes, void> {
  for await (const piece of samples) yield bytesOf(piece);
}
