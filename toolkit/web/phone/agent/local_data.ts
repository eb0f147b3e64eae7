/** The owner's samples and labels, copied into the page's own files. They never leave the device. */

import { Failure } from "./faults.js";
import { LEAST_SAMPLES } from "./held_out.js";
import { labelAsRead, labelPort, sampleParts, SAMPLES, type Manifest, type Part } from "./manifest.js";
import type { StoredArray } from "./npz.js";
import { arrayNames, checkParts, PackedRows } from "./packing.js";
import { checkArray, open } from "./preparation.js";
import { RowFile, type Rows } from "./row_file.js";
import { textOf, type OnProgress, type SampleForm, type Source } from "./sample_form.js";
import { folderOf, names, OpenFile, piecesOf, remove, sha256, type Values } from "./storage.js";
import { BYTES, sizeOf, type Dtype, type Tensor } from "./tensors.js";

const FOLDER = "data";
/** The label of a position that does not count. */
export const IGNORED = -100n;

interface Kind {
  dtype: Dtype;
  rowShape: number[];
}
interface Kinds {
  /** `x` and `y`, or several `x_NAME` or `y_NAME` in their place. */
  arrays: Record<string, Kind>;
  /** The form in which the samples were prepared; null for arrays. */
  form: string | null;
}

/** The stored description of the local data. Checkpoints refer to the numbers by `sha256`. */
export interface DataRecord extends Kinds {
  /** The folder of the files. */
  id: string;
  name: string;
  /** SHA-256 of the files from which the samples come; `name` is the name of the first. */
  hashes?: string[];
  samples: number;
  bytes: number;
  sha256: string;
  /** Earlier versions of the page stored these in place of `arrays`. */
  x?: Kind;
  y?: Kind;
}

/** The kinds of the arrays in `record`, by name. */
function arraysOf({ arrays, x, y }: DataRecord): Record<string, Kind> {
  return x === undefined || y === undefined ? arrays : { x, y };
}

/**
 * Copies the owner's samples into the page's files. The old data stay until the new data are complete.
 *
 * @param adding Whether to keep the old samples, before the new ones.
 */
export async function importData(
  source: Source,
  form: SampleForm,
  adding: boolean,
  values: Values,
  onProgress: OnProgress,
): Promise<DataRecord> {
  const before = adding ? await values.get<DataRecord>("data") : null;
  const known = before?.hashes ?? [];
  const { name, hashes, bytes, arrays } = await open(source, form, known, onProgress);
  const labels = [...arrays.values()].at(-1)!.shape[0] ?? 0;
  const samples = labels + (before?.samples ?? 0);
  for (const { shape } of arrays.values()) {
    if (shape[0] === labels && samples >= LEAST_SAMPLES) continue;
    const counts = { samples: shape[0] ?? 0, labels };
    throw new Failure("data.wrong-shape/count", { name, ...counts, least: LEAST_SAMPLES });
  }
  const kindOf = ({ dtype, shape }: StoredArray): Kind => ({ dtype, rowShape: shape.slice(1) });
  const kinds = {
    arrays: Object.fromEntries([...arrays].map(([array, stored]) => [array, kindOf(stored)])),
    form: source.kind === "npz" ? null : textOf(form),
  };
  if (before !== null && textOfKinds({ ...before, arrays: arraysOf(before) }) !== textOfKinds(kinds)) throw new Failure("data.other-form", { name });
  // Write to a new folder, so that a training can use the old data until its round is over.
  const id = crypto.randomUUID();
  const folder = await folderOf(FOLDER, id);
  const old = before && (await folderOf(FOLDER, before.id));
  const copied: string[] = [];
  for (const [array, stored] of arrays) copied.push(await copy(folder, array, stored, name, old));
  const all = Object.values(kinds.arrays).map(({ rowShape }) => [samples, ...rowShape]);
  const record: DataRecord = {
    id,
    name: before?.name ?? name,
    hashes: [...known, ...hashes],
    samples,
    bytes: bytes + (before?.bytes ?? 0),
    sha256: await sha256(new TextEncoder().encode(JSON.stringify([...all, ...copied]))),
    ...kinds,
  };
  await values.put({ data: record });
  return record;
}

/** Removes data that were replaced, or that are incomplete because a tab was killed. No round may read them. */
export async function removeReplaced(values: Values): Promise<void> {
  const kept = await values.get<DataRecord>("data");
  const all = await folderOf(FOLDER);
  for (const name of await names(all)) if (name !== kept?.id) await remove(all, name);
}

/** Equal kinds give equal texts. */
function textOfKinds({ arrays, form }: Kinds): string {
  return JSON.stringify([Object.entries(arrays).map(([name, { dtype, rowShape }]) => [name, dtype, rowShape]), form]);
}

/**
 * Writes the numbers of `array` to a file, after the numbers of the file with this name in `old`.
 *
 * @returns SHA-256 of the SHA-256s of the file's pieces.
 */
async function copy(
  folder: FileSystemDirectoryHandle,
  name: string,
  array: StoredArray,
  origin: string,
  old: FileSystemDirectoryHandle | null,
): Promise<string> {
  const file = await OpenFile.at(folder, name);
  const earlier = old === null ? [] : [piecesOf((await (await old.getFileHandle(name)).getFile()).stream())];
  const rowBytes = sizeOf(array.shape.slice(1)) * BYTES[array.dtype];
  const digests: string[] = [];
  let at = 0;
  // Use pieces of a fixed size, because the pieces of a stream differ from run to run.
  const piece = new Uint8Array(1 << 20);
  let filled = 0;
  const put = async (): Promise<void> => {
    const bytes = piece.slice(0, filled);
    digests.push(await sha256(bytes));
    if (array.dtype === "float32") {
      const wrong = new Float32Array(bytes.buffer).findIndex((number) => !Number.isFinite(number));
      const sample = Math.floor((at + BYTES.float32 * wrong) / rowBytes);
      if (wrong >= 0) throw new Failure("data.number-out-of-range", { name: origin, sample });
    }
    file.write(bytes, at);
    at += filled;
    filled = 0;
  };
  try {
    for (const content of [...earlier, array.bytes()]) {
      for await (const bytes of content) {
        for (let from = 0; from < bytes.length; ) {
          const taken = bytes.subarray(from, from + piece.length - filled);
          piece.set(taken, filled);
          filled += taken.length;
          from += taken.length;
          if (filled === piece.length) await put();
        }
      }
    }
    await put();
    file.flush();
  } finally {
    file.close();
  }
  return sha256(new TextEncoder().encode(digests.join("")));
}

/** The samples and labels of a training. */
export class LocalData {
  private constructor(
    readonly record: DataRecord,
    readonly x: Rows,
    private readonly labelRows: Rows,
    /** All labels. */
    private readonly y: Tensor,
  ) {}

  /** Opens the data and checks whether they fit `manifest`. */
  static async open(record: DataRecord, manifest: Manifest): Promise<LocalData> {
    const x = await openArrays("x", record, sampleParts(manifest));
    // There is one prepared label for each sample. A model may need it in the shape (1,).
    const wanted = labelAsRead(manifest)?.shape ?? [];
    const one = record.form !== null && sizeOf(wanted) === 1 ? wanted : null;
    const labels = await openArrays("y", record, labelPort(manifest)?.parts ?? [], one).catch((error: unknown) => {
      x.close();
      throw error;
    });
    const y = labels.read(Int32Array.from({ length: record.samples }, (_, i) => i));
    const data = new LocalData(record, x, labels, y);
    try {
      data.check(manifest);
    } catch (error) {
      data.close();
      throw error;
    }
    return data;
  }

  get samples(): number {
    return this.record.samples;
  }

  labels(indices: Int32Array): Tensor {
    return this.labelRows.read(indices);
  }

  /** 1 for each class that occurs among the labels of the samples `of`, otherwise 0. */
  classes(count: number, of: Int32Array): Tensor {
    const data = new Float32Array(count);
    for (const label of this.labels(of).data) data[Number(label)] = 1;
    return { dtype: "float32", shape: [count], data };
  }

  close(): void {
    this.x.close();
    this.labelRows.close();
  }

  private check(manifest: Manifest): void {
    const { x, y } = this;
    const { name } = this.record;
    checkArray("x", name, [manifest.sample_dtype, manifest.sample_shape], [x.dtype, x.rowShape]);
    const port = labelPort(manifest);
    const shape = (port?.shape.slice(1) ?? []) as number[];
    if (port !== null) checkArray("y", name, [port.dtype, shape], [y.dtype, y.shape.slice(1)]);
    if (y.dtype === "int64") this.checkClasses(manifest.classes);
    if (port !== null && port.sequence) this.checkSequences(Number(shape[0]));
    if (x.dtype === "int64") this.checkWholeNumbers(manifest.sample_limit);
  }

  private checkClasses(classes: number): void {
    const highest = Math.max(classes, 2) - 1;
    const several = this.y.shape.length > 1;
    let counted = 0;
    for (const label of this.y.data as BigInt64Array) {
      if (several && label === IGNORED) continue;
      counted++;
      if (label < 0n || label > BigInt(highest)) {
        const { name } = this.record;
        throw new Failure("data.label-out-of-range", { name, label: Number(label), highest });
      }
    }
    if (counted === 0) {
      throw new Failure("data.no-labels", { name: this.record.name, ignored: Number(IGNORED) });
    }
  }

  /** Checks labels for the loss ctc: the sequence of a sample without blanks (0), then IGNORED. */
  private checkSequences(columns: number): void {
    const labels = this.y.data as BigInt64Array;
    for (const [index, label] of labels.entries()) {
      const late = index % columns > 0 && label !== IGNORED && labels[index - 1] === IGNORED;
      if (label !== 0n && !late) continue;
      const sample = Math.floor(index / columns);
      throw new Failure("data.not-a-sequence", { name: this.record.name, sample, ignored: Number(IGNORED) });
    }
  }

  /** Checks integers. Other numbers were checked when they were copied. */
  private checkWholeNumbers(limit: number | null): void {
    for (let sample = 0; sample < this.samples; sample++) {
      const data = this.x.read(Int32Array.of(sample)).data as BigInt64Array;
      const fits = data.every((number) => number >= 0n && (limit === null || number < BigInt(limit)));
      if (!fits) throw new Failure("data.number-out-of-range", { name: this.record.name, sample });
    }
  }
}

/**
 * Opens the samples (`x`) or labels (`y`). With `parts`, several arrays are packed into one.
 *
 * @param rowShape The shape of each row; null for that of the files.
 */
async function openArrays(
  prefix: "x" | "y",
  record: DataRecord,
  parts: readonly Part[],
  rowShape: number[] | null = null,
): Promise<Rows> {
  const folder = await folderOf(FOLDER, record.id);
  const names = arrayNames(prefix, parts);
  const kinds = arraysOf(record);
  const arrays: RowFile[] = [];
  try {
    for (const name of names) {
      const kind = kinds[name];
      if (kind === undefined) throw new Failure("data.missing-array/several", { name: record.name, arrays: names });
      arrays.push(await RowFile.open(folder, name, kind.dtype, rowShape ?? kind.rowShape, record.samples));
    }
    if (parts.length === 0) return arrays[0]!;
    checkParts(prefix, record.name, parts, arrays);
    return new PackedRows(arrays, parts, record.samples);
  } catch (error) {
    for (const array of arrays) array.close();
    if (error instanceof DOMException && error.name === "NotFoundError") throw new Failure("storage.lost/data", {});
    throw error;
  }
}

/** The samples of a step: the owner's samples, or recorded activations. */
export function sourceOf(data: LocalData, recordings: Map<string, RowFile>, name: string): Rows {
  if (name === SAMPLES) return data.x;
  const recording = recordings.get(name);
  if (recording === undefined) throw new Failure("bundle.malformed", { where: `schedule: ${name}` });
  return recording;
}
