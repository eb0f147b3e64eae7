/**
 * Compares a release with the model that this device has, on the device's own samples, by the rule of
 * device_agent/inference/release_trial.py.
 */

import { outputForm } from "./answer.js";
import type { Bundle } from "./bundle.js";
import { Failure } from "./faults.js";
import { heldOut } from "./held_out.js";
import { LocalData, type DataRecord } from "./local_data.js";
import type { OutputForm } from "./manifest.js";
import { initialPersonal, outputOf } from "./prediction.js";
import { isFinite, worse } from "./release_rule.js";
import { scoresOf, type Score } from "./scores.js";
import { zeros } from "./tensors.js";

/** Share of the samples in a trial, if the federation does not evaluate on devices. */
const SHARE = 0.1;
/** With fewer samples, no difference is more than chance. */
const FEWEST = 5;
/** Samples that are predicted at once. */
const CHUNK = 32;

export interface TrialResult {
  /** Why the release is not taken; null if it is. */
  reason: string | null;
  /** Scores of the present model and of the release; null if there is none, or if its predictions are not finite. */
  before: Score[] | null;
  after: Score[] | null;
}

/**
 * Compares the release `offered` with the bundle `present` (null if there is none).
 *
 * @param share The share of the samples that the federation keeps apart; null if it does not evaluate on devices.
 */
export async function tryRelease(
  offered: Bundle,
  present: Bundle | null,
  record: DataRecord | null,
  share: number | null,
): Promise<TrialResult> {
  const form = offered.manifest.output;
  if (form === undefined) throw new Failure("release.no-inference-bundle", {});
  // Only the loss knows what such outputs mean, and an inference bundle has none.
  const judged = form === "outputs" ? null : record;
  const data = judged && (await LocalData.open(judged, offered.manifest));
  try {
    const samples = heldOut(data?.samples ?? 0, share ?? SHARE);
    const after = await scoresOn(offered, data, samples, form);
    const before = present && (await scoresOfPresent(present, data, samples));
    const unusable = after.every(isFinite) ? null : "its predictions are not finite numbers";
    const compared = before !== null && samples.length >= FEWEST;
    const usable = (scores: Score[] | null): Score[] | null =>
      scores !== null && scores.length > 0 && scores.every(isFinite) ? scores : null;
    return {
      reason: unusable ?? (compared ? worse(before, after) : null),
      before: usable(before),
      after: usable(after),
    };
  } finally {
    data?.close();
  }
}

async function scoresOn(bundle: Bundle, data: LocalData | null, samples: Int32Array, form: OutputForm): Promise<Score[]> {
  const scores: Score[] = [];
  const state = await initialPersonal(bundle);
  // Without samples, the model must be able to run, too.
  const { sample_dtype, sample_shape } = bundle.manifest;
  if (samples.length === 0) await outputOf(bundle, zeros(sample_dtype, [1, ...sample_shape]), state);
  for (let start = 0; data !== null && start < samples.length; start += CHUNK) {
    const part = samples.slice(start, start + CHUNK);
    scores.push(...scoresOf(form, await outputOf(bundle, data.x.read(part), state), data.labels(part)));
  }
  return scores;
}

/** The scores of the present model; null if it cannot be used: then any release is better. */
async function scoresOfPresent(present: Bundle, data: LocalData | null, samples: Int32Array): Promise<Score[] | null> {
  try {
    return await scoresOn(present, data, samples, outputForm(present.manifest));
  } catch (error) {
    if (error instanceof Failure) return null;
    throw error;
  }
}
