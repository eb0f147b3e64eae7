/** Predicts the class of the owner's first sample, before and after training. */

import type { Bundle } from "./bundle.js";
import type { LocalData } from "./local_data.js";
import type { Prediction } from "./messages.js";
import { Session } from "./runtime.js";
import type { Tensors } from "./tensors.js";

const PREDICT = "predict";

/**
 * The most likely class by the model, and its probability.
 *
 * @param state Tensors that replace those of the bundle.
 * @returns null for slices, and if classes have no names or a sample has more than one class.
 */
export async function predicted(bundle: Bundle, data: LocalData, state: Tensors): Promise<Prediction | null> {
  const { preprocessing, signatures, sample_shape } = bundle.manifest;
  const signature = signatures[PREDICT];
  const names = preprocessing?.classes ?? [];
  const samples = signature?.inputs.find((port) => port.kind === "samples");
  // The signature of a slice reads recorded activations, not samples.
  const reads = samples?.shape.slice(1).join() === sample_shape.join();
  if (signature === undefined || !reads || names.length === 0) return null;
  const read = signature.inputs.flatMap((port) => (port.state === null ? [] : [port.state]));
  const personal = bundle.manifest.tensors.filter(({ role }) => role === "personal").map(({ name }) => name);
  // Before its first training a device has no personal model.
  if (read.some((tensor) => personal.includes(tensor) && !state.has(tensor))) return null;
  const tensors = new Map([...(await bundle.tensors(read.filter((tensor) => !state.has(tensor)))), ...state]);
  // A batch has at least two samples.
  const sample = data.x.read(Int32Array.of(0, 0));
  const session = await Session.open(await bundle.graph(PREDICT), signature, PREDICT);
  try {
    const inputs = signature.inputs.map(
      (port) => [port.name, port.state === null ? sample : tensors.get(port.state)!] as const,
    );
    const [output] = (await session.run(new Map(inputs))).values();
    if (output?.shape.length !== 2) return null;
    const shares = probabilities([...(output.data as Float32Array).subarray(0, output.shape[1])]);
    const best = shares.indexOf(Math.max(...shares));
    return { name: names[best] ?? String(best), probability: shares[best]! };
  } finally {
    await session.close();
  }
}

/** Softmax. For a single logit, the probabilities of the classes 0 and 1. */
function probabilities(logits: number[]): number[] {
  const all = logits.length === 1 ? [0, ...logits] : logits;
  const most = Math.max(...all);
  const powers = all.map((logit) => Math.exp(logit - most));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}
