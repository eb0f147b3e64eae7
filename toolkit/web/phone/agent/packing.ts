/**
 * Several arrays that a bundle takes as one: each is flattened to (n, k), and they lie side by side as
 * float32 numbers. The twin of device_agent/formats/packing.py and device_agent/data/packed_arrays.py.
 */

import { Failure } from "./faults.js";
import type { OutputForm, Part } from "./manifest.js";
import { checkArray } from "./preparation.js";
import type { Rows } from "./row_file.js";
import { sizeOf, type Tensor } from "./tensors.js";

/** float32 holds all integers below this number exactly. */
const LARGEST_ID = 2 ** 24;
const IGNORED = -100;

/** The `parts` that files hold. Labels with a limit of 0 do not exist: no loss reads them. */
export function inFiles(parts: readonly Part[]): Part[] {
  return parts.filter(({ limit }) => limit !== 0);
}

/** The names of the arrays that samples (`x`) or labels (`y`) are read from. */
export function arrayNames(prefix: "x" | "y", parts: readonly Part[]): string[] {
  if (parts.length === 0) return [prefix];
  return inFiles(parts).map(({ name }) => (name === "" ? prefix : `${prefix}_${name}`));
}

/** The rows of several arrays, side by side. Zeros take the place of labels that no file holds. */
export class PackedRows implements Rows {
  readonly dtype = "float32";
  readonly rowShape: number[];

  /** @param arrays The arrays of `parts` that files hold, in their order, each with `rows` rows. */
  constructor(
    private readonly arrays: readonly Rows[],
    parts: readonly Part[],
    readonly rows: number,
  ) {
    this.rowShape = [parts.reduce((size, { shape }) => size + sizeOf(shape), 0)];
  }

  read(indices: Int32Array): Tensor {
    const width = this.rowShape[0]!;
    const data = new Float32Array(indices.length * width);
    let column = 0;
    for (const array of this.arrays) {
      const own = array.read(indices).data;
      const size = sizeOf(array.rowShape);
      own.forEach((value: number | bigint, i: number) => {
        data[Math.floor(i / size) * width + column + (i % size)] = Number(value);
      });
      column += size;
    }
    return { dtype: "float32", shape: [indices.length, width], data };
  }

  close(): void {
    for (const array of this.arrays) array.close();
  }
}

/**
 * Checks the type and shape of arrays, and the range of integers. Other numbers were checked when they
 * were copied.
 *
 * @param file Name of the owner's file.
 */
export function checkParts(prefix: "x" | "y", file: string, parts: readonly Part[], arrays: readonly Rows[]): void {
  const names = arrayNames(prefix, parts);
  for (const [i, { shape, dtype, limit }] of inFiles(parts).entries()) {
    const [array, name] = [arrays[i]!, `${file} (${names[i]!})`];
    checkArray(prefix, name, [dtype, shape], [array.dtype, array.rowShape]);
    if (dtype === "float32") continue;
    const mayIgnore = prefix === "y" && shape.length > 0;
    for (let sample = 0; sample < array.rows; sample++) {
      const row = array.read(Int32Array.of(sample)).data as BigInt64Array;
      const fits = (number: bigint): boolean =>
        (number >= 0 && number < (limit ?? LARGEST_ID)) || (mayIgnore && number === BigInt(IGNORED));
      if (!row.every(fits)) throw new Failure("data.number-out-of-range", { name, sample });
    }
  }
}

/** An output of a model with several, for a single sample. */
export interface PartOutput {
  name: string;
  form: OutputForm;
  output: Tensor;
}

/** Cuts a packed output (1, k) into the outputs of the model. */
export function outputsOf(packed: Tensor, parts: readonly Part[]): PartOutput[] {
  let at = 0;
  return parts.map(({ name, shape, output }) => {
    const data = packed.data.slice(at, (at += sizeOf(shape)));
    return { name, form: output ?? "numbers", output: { dtype: packed.dtype, shape: [1, ...shape], data } };
  });
}
