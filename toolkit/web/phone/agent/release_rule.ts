/** The rule by which a release is worse than the model that a device has (device_agent/inference/release_trial.py). */

import { NumpyRandom } from "./numpy_random.js";
import { total, type Score } from "./scores.js";

/** A release may have this much less accuracy. */
const ACCURACY_MARGIN = 0.02;
/** A release may have this much more loss, as a share of the loss of the present model. */
const LOSS_MARGIN = 0.02;
/** A release is worse only if a difference like this has less than this probability by chance. */
const CHANCE = 0.05;
const FLIPS = 2000;

export const isFinite = ({ loss }: Score): boolean => Number.isFinite(loss);

/** Why `after` is worse than `before`; null if it is not. Both score the same samples. */
export function worse(before: readonly Score[], after: readonly Score[]): string | null {
  if (!before.every(isFinite)) return null;
  const labels = Math.max(total(before.map(({ counted }) => counted)), 1);
  const difference = (of: (score: Score) => number): number[] =>
    before.map((score, i) => of(score) - of(after[i]!));
  if (before.every(hasCorrect) && after.every(hasCorrect)) {
    const lost = difference(({ correct }) => correct ?? 0);
    const figure = (scores: readonly Score[]): string =>
      `${((100 * total(scores.map(({ correct }) => correct ?? 0))) / labels).toFixed(1)}%`;
    if (!(total(lost) / labels > ACCURACY_MARGIN && chance(lost) < CHANCE)) return null;
    return `accuracy ${figure(after)} on ${lost.length} own samples; present model: ${figure(before)}`;
  }
  const lost = difference(({ loss }) => -loss);
  const sum = (scores: readonly Score[]): number => total(scores.map(({ loss }) => loss));
  if (!(total(lost) > LOSS_MARGIN * sum(before) && chance(lost) < CHANCE)) return null;
  const figure = (scores: readonly Score[]): string => `${Number((sum(scores) / labels).toPrecision(4))}`;
  return `loss ${figure(after)} on ${lost.length} own samples; present model: ${figure(before)}`;
}

const hasCorrect = ({ correct }: Score): boolean => correct !== null;

/**
 * How probable at least this sum is if the two models are equally good.
 *
 * This is a paired randomisation test: then each sample's difference could as well have the other sign.
 */
function chance(lost: readonly number[]): number {
  const differences = lost.filter((value) => value !== 0);
  const least = total(differences) * (1 - 1e-9);
  const signs = new NumpyRandom([0]);
  let more = 0;
  for (let flip = 0; flip < FLIPS; flip++) {
    const sum = differences.reduce((sum, value) => sum + (signs.integers(2) === 1 ? value : -value), 0);
    more += Number(sum >= least);
  }
  return (more + 1) / (FLIPS + 1);
}
