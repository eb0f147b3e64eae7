/**
 * The tensors in a secure sum: the products of low-rank factors in place of the factors, as in
 * device_agent/privacy/factor_products.py.
 */

import { sizeOf, type Numbers, type Tensor, type Tensors } from "./tensors.js";

/** A tensor of an update. A factor "u" or "v" belongs to the parameter `stands_for`. */
export interface Entry {
  name: string;
  shape: number[];
  stands_for?: string | null;
  factor?: string | null;
}

/** The number of elements of all tensors in the sum of updates with the tensors in `table`. */
export function summedElements(table: readonly Entry[]): number {
  return parts(table).reduce((sum, [{ shape }, v]) => sum + (v === undefined ? sizeOf(shape) : productSize(shape, v)), 0);
}

/** The tensors in the sum, in order. */
export function* summedTensors(table: readonly Entry[], tensors: Tensors): Generator<Numbers | Float64Array> {
  for (const [{ name }, v] of parts(table)) {
    const own = tensors.get(name)!;
    yield v === undefined ? own.data : product(own, tensors.get(v.name)!);
  }
}

/** Each tensor in the sum: an entry, or the entries of U and V. */
function parts(table: readonly Entry[]): [Entry, Entry | undefined][] {
  const seconds = new Map(table.filter(({ factor }) => factor === "v").map((entry) => [entry.stands_for, entry]));
  return table
    .filter(({ factor }) => factor !== "v")
    .map((entry) => [entry, entry.factor === "u" ? seconds.get(entry.stands_for) : undefined]);
}

function productSize(u: readonly number[], v: Entry): number {
  const [outputs, , ...columns] = v.shape;
  return sizeOf(u.slice(1, 3)) * outputs! * sizeOf(columns.slice(1));
}

/** U V^T of each group, in the layout of the dense weight. */
function product(u: Tensor, v: Tensor): Float64Array {
  const [outputs, rank] = [v.shape[0]!, v.shape[1]!];
  const [rows, columns] = [sizeOf(u.shape.slice(1, 3)), sizeOf(v.shape.slice(3))];
  const perGroup = outputs / (u.shape[0]! / rank);
  const result = new Float64Array(outputs * rows * columns);
  for (let output = 0; output < outputs; output++) {
    const group = Math.floor(output / perGroup);
    for (let r = 0; r < rank; r++) {
      for (let column = 0; column < columns; column++) {
        const right = Number(v.data[(output * rank + r) * columns + column]);
        const left = (group * rank + r) * rows;
        for (let row = 0; row < rows; row++) {
          const at = (output * rows + row) * columns + column;
          result[at] = result[at]! + Number(u.data[left + row]) * right;
        }
      }
    }
  }
  return result;
}
