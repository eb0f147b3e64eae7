/** Chooses the samples that a device keeps apart and never trains on, as a native agent does. */

import { NumpyRandom } from "./numpy_random.js";

/** The fewest samples to train on. */
export const LEAST_SAMPLES = 2;

/**
 * The indices of the samples that are kept apart, ascending; none if too few would remain.
 *
 * The choice depends only on the arguments, so all rounds keep the same samples apart.
 *
 * @param share Share of the samples, from 0 to 1.
 */
export function heldOut(samples: number, share: number): Int32Array {
  const count = roundedToEven(samples * share);
  if (count < 1 || samples - count < LEAST_SAMPLES) return new Int32Array();
  return new NumpyRandom([samples]).permutation(samples).slice(0, count).sort();
}

/** Rounds as Python does: of two integers that are equally near, to the even one. */
function roundedToEven(value: number): number {
  const below = Math.floor(value);
  return value - below === 0.5 ? below + (below % 2) : Math.round(value);
}

/** The indices of all samples except `apart`, ascending. */
export function withoutHeldOut(samples: number, apart: Int32Array): Int32Array {
  const kept = new Set(apart);
  return Int32Array.from({ length: samples }, (_, i) => i).filter((index) => !kept.has(index));
}
