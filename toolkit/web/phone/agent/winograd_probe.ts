/**
 * Measures with tiny runs whether graphs in Winograd's form are faster in this browser
 * (device_agent/runtime/winograd_probe.py).
 */

import { probe } from "./calibration_cases.json";
import { ones, openGraph, RUNTIME, type Graph } from "./runtime.js";
import type { Values } from "./storage.js";

const RUNS = 5;
/** This many runs are timed together, because clocks of browsers count in steps of 0.1 ms. */
const TOGETHER = 4;
/** As in profiles/cost_model/workload.py. */
const WINOGRAD_GAIN = 0.05;
const CLOSE = 1e-4;

/**
 * Whether convolutions by Winograd's method are correct and faster here. A device measures once, for about 0.2 s. It
 * keeps the result for this runtime: the forms round differently, and a training must continue as it began.
 */
export async function multipliesFaster(values: Values): Promise<boolean> {
  const kept = await values.get<Choice>("winograd");
  if (kept?.runtime === RUNTIME) return kept.faster;
  const choice: Choice = { runtime: RUNTIME, faster: await measure() };
  await values.put({ winograd: choice });
  return choice.faster;
}

interface Choice {
  runtime: string;
  faster: boolean;
}

async function measure(): Promise<boolean> {
  const feeds = ones(probe.inputs);
  const [plain, other] = [await openGraph(probe.graphs.plain, true), await openGraph(probe.graphs.winograd, true)];
  try {
    const [expected, results] = [await plain.run(feeds), await other.run(feeds)];
    const right = plain.outputNames.every((name) => {
      const [wanted, given] = [expected[name]!.data as Float32Array, results[name]!.data as Float32Array];
      const most = wanted.reduce((high, value) => Math.max(high, Math.abs(value)), 0);
      return wanted.every((value, i) => Math.abs(value - given[i]!) <= CLOSE * most);
    });
    let [plainMs, otherMs] = [Infinity, Infinity];
    for (let run = 0; run < RUNS; run++) {
      plainMs = Math.min(plainMs, await milliseconds(plain));
      otherMs = Math.min(otherMs, await milliseconds(other));
    }
    return right && otherMs < (1 - WINOGRAD_GAIN) * plainMs;
  } finally {
    await plain.release();
    await other.release();
  }

  async function milliseconds(graph: Graph): Promise<number> {
    const begun = performance.now();
    for (let run = 0; run < TOGETHER; run++) await graph.run(feeds);
    return performance.now() - begun;
  }
}
