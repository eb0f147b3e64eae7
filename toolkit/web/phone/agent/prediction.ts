/** Predicts with the graphs of a bundle: its `predict`, after the stages that it records. */

import { answerOf } from "./answer.js";
import type { Bundle } from "./bundle.js";
import { Failure } from "./faults.js";
import type { LocalData } from "./local_data.js";
import { MANIFEST, PREDICT, SAMPLES } from "./manifest.js";
import type { Prediction } from "./messages.js";
import { Session } from "./runtime.js";
import type { Tensor, Tensors } from "./tensors.js";

/**
 * The output of the model for the samples `x`.
 *
 * A slice's `predict` reads activations. So the sample passes the recording stages first. The numbers
 * stay in float32, also where a training stores them as float16.
 *
 * @param state Tensors that replace those of the bundle.
 */
export async function outputOf(bundle: Bundle, x: Tensor, state: Tensors): Promise<Tensor> {
  const values = new Map([[SAMPLES, x]]);
  let last = x;
  for (const instruction of bundle.manifest.schedule) {
    if (instruction.do !== "record") continue;
    last = first(await run(bundle, instruction.signature, values.get(instruction.source)!, new Map()));
    values.set(instruction.target, last);
  }
  return first(await run(bundle, PREDICT, last, state));
}

/** The personal tensors with which a first round starts, computed from the shared model; empty without any. */
export async function initialPersonal(bundle: Bundle): Promise<Tensors> {
  const personal: Tensors = new Map();
  for (const instruction of bundle.manifest.schedule) {
    if (instruction.do !== "initialise") continue;
    const results = await run(bundle, instruction.signature, null, new Map());
    for (const { name, state } of bundle.manifest.signatures[instruction.signature]!.outputs) {
      if (state !== null) personal.set(state, results.get(name)!);
    }
  }
  return personal;
}

function first(results: Tensors): Tensor {
  return results.values().next().value!;
}

/** Runs a signature, whose samples are `x`. Its graph and weights are in memory only meanwhile. */
async function run(bundle: Bundle, name: string, x: Tensor | null, state: Tensors): Promise<Tensors> {
  const signature = bundle.manifest.signatures[name];
  if (signature === undefined) throw new Failure("bundle.malformed", { where: `${MANIFEST}: signatures.${name}` });
  const read = signature.inputs.flatMap((port) => (port.state === null ? [] : [port.state]));
  const tensors = new Map([...(await bundle.tensors(read.filter((tensor) => !state.has(tensor)))), ...state]);
  const session = await Session.open(await bundle.graph(name), signature, name);
  try {
    const inputs = signature.inputs.map(
      (port) => [port.name, port.state === null ? x! : tensors.get(port.state)!] as const,
    );
    return await session.run(new Map(inputs));
  } finally {
    await session.close();
  }
}

/**
 * The most probable class of the owner's first sample, and its probability.
 *
 * @returns null for slices, and if classes have no names or a sample has more than one class.
 */
export async function predicted(bundle: Bundle, data: LocalData, state: Tensors): Promise<Prediction | null> {
  const { manifest } = bundle;
  const names = manifest.preprocessing?.classes ?? [];
  // Do not read the stages of a slice in every round only for this line of text.
  const records = manifest.schedule.some((instruction) => instruction.do === "record");
  if (!(PREDICT in manifest.signatures) || records || names.length === 0) return null;
  // Before its first training a device has no personal model.
  if (manifest.tensors.some(({ role, name }) => role === "personal" && !state.has(name))) return null;
  const output = await outputOf(bundle, data.x.read(Int32Array.of(0)), state);
  const answer = answerOf(output, manifest);
  if (answer.is !== "classes") return null;
  const probability = Math.max(...answer.probabilities);
  const best = answer.probabilities.indexOf(probability);
  return { name: names[best] ?? String(best), probability };
}
