/** The profile of a round: time and memory of its training (profiles/documents/bundle_profile.py). */

import type { Body } from "./disclosure.js";
import { structureOf, trainingOf, type Manifest } from "./manifest.js";
import { thisMachine } from "./membership.js";
import { memoryBytes } from "./runtime.js";
import { quantile } from "./tensors.js";

const VERSION = 2;
/** Times are unstable if (p90 - p10) / median is above this. */
const UNSTABLE_SPREAD = 0.26;

type Profile = Body<"POST /rounds/{round}/update profile">;

/** The profile of a training. `seconds` are the times of its batches in this tab; null if there are none. */
export async function profileOf(manifest: Manifest, seconds: readonly number[]): Promise<Profile | null> {
  const [first] = seconds;
  if (first === undefined) return null;
  // The first batch includes the runtime's warm-up.
  const counted = seconds.length > 1 ? seconds.slice(1) : seconds;
  const steady = durationOf(counted);
  const training = trainingOf(manifest);
  const name = [...new Set(training.steps.map((step) => step.signature))].join(" + ");
  const varies = steady.p90_s - steady.p10_s > UNSTABLE_SPREAD * steady.median_s;
  return {
    version: VERSION,
    submodel: manifest.submodel,
    structure: await structureOf(manifest),
    machine: await thisMachine(),
    versions: {},
    method: {
      source: "training",
      clock: "performance.now",
      warm_up_runs: seconds.length - counted.length,
      runs: counted.length,
      threads: 1,
      arena: "WebAssembly memory, which never shrinks",
    },
    measured_at: `${new Date().toISOString().slice(0, 19)}+00:00`,
    batch_size: training.batch_size,
    phases: [
      {
        name,
        role: "train",
        steady,
        first_s: first,
        memory: { idle: null, peak_bytes: memoryBytes(), held: null },
      },
    ],
    before: {},
    after: {},
    validity: { invalid: [], unstable: varies ? [name] : [] },
  };
}

interface Duration {
  median_s: number;
  p10_s: number;
  p90_s: number;
  runs: number;
}

function durationOf(seconds: readonly number[]): Duration {
  const sorted = [...seconds].sort((a, b) => a - b);
  const [p10_s, median_s, p90_s] = [quantile(sorted, 0.1), quantile(sorted, 0.5), quantile(sorted, 0.9)];
  return { median_s, p10_s, p90_s, runs: sorted.length };
}
