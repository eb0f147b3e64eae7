/**
 * Turns the output of a model into an Answer.
 *
 * Models give one number for each class, a logit. `softmax` turns the logits of all classes into
 * probabilities, whose sum is 1. A model with a single output has only the classes 0 and 1:
 * `sigmoid` gives the probability of class 1. Each of `independent` outputs is the logit of a yes-or-no
 * question. The outputs of a regression are its `numbers`; `outputs` are numbers, too, that only the
 * loss understands. With `ctc`, the model reads a sequence. An inference bundle's manifest names one of
 * these. A bundle that trains says the same by its labels (device_agent/formats/label_rule.py).
 */

import { labelPort, PREDICT, type Manifest, type OutputForm, type Port } from "./manifest.js";
import type { Answer, SingleAnswer } from "./messages.js";
import { outputsOf } from "./packing.js";
import { sizeOf, type Tensor } from "./tensors.js";

/** The class that stands for no label, with the loss ctc. */
const BLANK = 0;

export function outputForm(manifest: Manifest): OutputForm {
  if (manifest.output !== undefined) return manifest.output;
  const labels = labelPort(manifest);
  if (labels !== null && labels.parts.length > 0) return "outputs";
  // Without an axis for the class, there is a single logit for each sample.
  const several = labels !== null && labels.shape.length > 1 && `${labels.shape}` === `${predicted(manifest)?.shape}`;
  if (labels?.dtype === "int64" && manifest.classes === 1 && several) {
    return "independent";
  }
  if (labels?.dtype === "float32") return "numbers";
  if (labels?.sequence === true) return "ctc";
  return manifest.classes === 1 ? "sigmoid" : "softmax";
}

function predicted(manifest: Manifest): Port | undefined {
  return manifest.signatures[PREDICT]?.outputs[0];
}

/** What the output of a bundle's `predict` for a single sample, (1, ...), says. */
export function answerOf(output: Tensor, manifest: Manifest): Answer {
  const parts = predicted(manifest)?.parts ?? [];
  if (parts.length === 0) return answerIn(output, outputForm(manifest));
  const own = outputsOf(output, parts);
  return { is: "outputs", outputs: own.map((part) => ({ name: part.name, answer: answerIn(part.output, part.form) })) };
}

function answerIn(output: Tensor, form: OutputForm): SingleAnswer {
  if (form === "independent") {
    const logits = [...(output.data as Float32Array)];
    return { is: "questions", probabilities: logits.map((logit) => sigmoid([logit])[1]!) };
  }
  if (form === "numbers" || form === "outputs") return { is: "numbers", numbers: [...(output.data as Float32Array)] };
  const all = logitsOf(output).map(form === "sigmoid" ? sigmoid : softmax);
  const [first] = all;
  if (form !== "ctc" && first !== undefined && all.length === 1) return { is: "classes", probabilities: first };
  const classes = all.map((probabilities) => probabilities.indexOf(Math.max(...probabilities)));
  return { is: "sequence", classes: form === "ctc" ? collapsed(classes) : classes };
}

/** The logits at each position. Classes are axis 2 of an output (1, t, n), otherwise axis 1. */
export function logitsOf({ shape, data }: Tensor): number[][] {
  const last = shape.length === 3;
  const classes = (last ? shape[2] : shape[1]) ?? 1;
  const positions = sizeOf(shape) / classes;
  const [step, next] = last ? [1, classes] : [positions, 1];
  return Array.from({ length: positions }, (_, position) =>
    Array.from({ length: classes }, (_, index) => Number(data[position * next + index * step])),
  );
}

export function softmax(logits: number[]): number[] {
  const most = Math.max(...logits);
  const powers = logits.map((logit) => Math.exp(logit - most));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

/** The probabilities of the classes 0 and 1. */
export function sigmoid([logit = 0]: number[]): number[] {
  return softmax([0, logit]);
}

/** Joins neighbours of the same class, then leaves out blanks. */
function collapsed(classes: number[]): number[] {
  return classes.filter((index, position) => index !== BLANK && index !== classes[position - 1]);
}
