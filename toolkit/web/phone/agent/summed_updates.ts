/**
 * An update as the vector that a device adds to a secure sum: whole numbers modulo 2^32. The same numbers as those of
 * device_agent/privacy/summed_updates.py and fixed_point.py for the same update and seed.
 */

import type { Counts } from "./evaluation_counts.js";
import { summedElements, summedTensors, type Entry } from "./factor_products.js";
import type { SecureTerms } from "./messages.js";
import { levels, noisedNumbers } from "./noised_change.js";
import { NumpyRandom } from "./numpy_random.js";
import { roundedToEven } from "./secure_group.js";
import type { Tensors } from "./tensors.js";

/** The elements of a count: 64 bits in parts of 16 bits. */
const PARTS = 4;
/** Devices, samples, samples * steps, samples * first and last loss, and clipped elements. */
const COUNTS = 6;
/** The counts of one model that a device has evaluated. */
const EVALUATED = 8;
const PARTS_OF_COUNTS = PARTS * (COUNTS + 2 * EVALUATED);
const MOST_COUNT = 2 ** 46;
const MOST_SUM = 2 ** 36;
const SUM_SCALE = 1 << 10;
const MOST_LOSS = 1e3;
const LOSS_SCALE = 1 << 16;
const MOST_STEPS = 1e8;

/** What an update's record says about the training. */
export interface Trained {
  samples: number;
  steps: number;
  loss_first: number;
  loss_last: number;
  tensors: Entry[];
  evaluation?: { before: Counts; after: Counts };
}

/**
 * The vector of an update in a group of `devices`, before its masks.
 *
 * @param received The tensors of the same names that the device received.
 * @param entropy Decides the rounding, as in numpy's `default_rng`.
 */
export function updateVector(
  record: Trained,
  trained: Tensors,
  received: Tensors,
  terms: SecureTerms,
  devices: number,
  entropy: readonly number[],
): Uint32Array<ArrayBuffer> {
  const { most_change, most_samples, privacy } = terms;
  const elements = summedElements(record.tensors);
  const vector = new Uint32Array(elements + PARTS_OF_COUNTS);
  if (privacy !== null) {
    const changes = new Float64Array(elements);
    let to = 0;
    for (const change of changesOf(record.tensors, trained, received)) {
      for (const value of change) changes[to++] = value;
    }
    vector.set(noisedNumbers(changes, terms, privacy, devices));
    vector.set(encodedCounts([1, 1, ...Array<number>(COUNTS + 2 * EVALUATED - 2).fill(0)]), elements);
    return vector;
  }
  const samples = Math.min(record.samples, most_samples);
  const draw = new NumpyRandom(entropy);
  const scale = (samples / most_samples) * levels(devices);
  let at = 0;
  let clipped = 0;
  for (const part of changesOf(record.tensors, trained, received)) {
    for (const value of part) {
      const change = value / most_change;
      if (Math.abs(change) > 1) clipped++;
      // An element of a Uint32Array is its number modulo 2^32.
      vector[at++] = Math.floor(limited(change, 1) * scale + draw.random());
    }
  }
  const steps = samples * Math.min(record.steps, MOST_STEPS);
  const losses = [record.loss_first, record.loss_last].map((loss) => samples * LOSS_SCALE * limited(loss, MOST_LOSS));
  const counts = [1, samples, steps, ...losses, clipped, ...evaluationCounts(record.evaluation)];
  vector.set(encodedCounts(counts), elements);
  return vector;
}

/** The change of each tensor in the sum, in order. */
function* changesOf(table: readonly Entry[], trained: Tensors, received: Tensors): Generator<Float64Array> {
  const before = summedTensors(table, received);
  for (const after of summedTensors(table, trained)) {
    const old = before.next().value as typeof after;
    yield Float64Array.from(after as ArrayLike<number | bigint>, (value, i) => Number(value) - Number(old[i]));
  }
}

/** The counts of both models; zeros if the device has not evaluated them. */
function evaluationCounts(evaluation: Trained["evaluation"]): number[] {
  if (evaluation === undefined) return Array<number>(2 * EVALUATED).fill(0);
  return [evaluation.before, evaluation.after].flatMap(({ samples, counted, correct, loss_sum, absolute_sum }) => [
    1,
    Math.min(samples, MOST_COUNT),
    Math.min(counted, MOST_COUNT),
    Number(correct !== undefined),
    Math.min(correct ?? 0, MOST_COUNT),
    SUM_SCALE * limited(loss_sum, MOST_SUM),
    Number(absolute_sum !== undefined),
    SUM_SCALE * limited(absolute_sum ?? 0, MOST_SUM),
  ]);
}

function encodedCounts(counts: readonly number[]): number[] {
  return counts.flatMap((count) => {
    const whole = BigInt.asUintN(64, BigInt(roundedToEven(count)));
    return [0n, 16n, 32n, 48n].map((shift) => Number((whole >> shift) & 0xffffn));
  });
}

function limited(value: number, most: number): number {
  return Math.min(Math.max(value, -most), most);
}
