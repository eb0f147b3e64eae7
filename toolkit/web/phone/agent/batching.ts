/** Which samples form each batch: the same choice as a native agent's. */

import type { NumpyRandom } from "./numpy_random.js";

/**
 * Splits `samples` samples into batches of `size`, shuffled by `order` if it is given. A single
 * sample that remains at the end joins the batch before it: batch normalisation cannot train on one.
 */
export function batches(samples: number, size: number, order: NumpyRandom | null): Int32Array[] {
  const indices = order?.permutation(samples) ?? Int32Array.from({ length: samples }, (_, i) => i);
  const starts: number[] = [];
  for (let at = 0; at < samples; at += size) starts.push(at);
  if (starts.length > 1 && samples - starts[starts.length - 1]! === 1) starts.pop();
  return starts.map((start, i) => indices.subarray(start, starts[i + 1] ?? samples));
}
