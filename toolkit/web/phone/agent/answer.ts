/**
 * Turns the output of a model into an Answer.
 *
 * Models give one number for each class, a logit. `softmax` turns the logits of all classes into
 * probabilities, whose sum is 1. A model with a single output has only the classes 0 and 1:
 * `sigmoid` gives the probability of class 1. The outputs of a regression are its `numbers`. With
 * `ctc`, the model reads a sequence. An inference bundle's manifest names one of these four. A
 * bundle that trains says the same by its labels (device_agent/formats/label_rule.py).
 */

import { labelPort, type Manifest, type OutputForm } from "./manifest.js";
import type { Answer } from "./messages.js";
import { sizeOf, type Tensor } from "./tensors.js";

/** The class that stands for no label, with the loss ctc. */
const BLANK = 0;

export function outputForm(manifest: Manifest): OutputForm {
  if (manifest.output !== undefined) return manifest.output;
  const labels = labelPort(manifest);
  if (labels?.dtype === "float32") return "numbers";
  if (labels?.sequence === true) return "ctc";
  return manifest.classes === 1 ? "sigmoid" : "softmax";
}

/** @param output The model's output for a single sample: (1, ...). */
export function answerOf(output: Tensor, form: OutputForm): Answer {
  if (form === "numbers") return { is: "numbers", numbers: [...(output.data as Float32Array)] };
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
function sigmoid([logit = 0]: number[]): number[] {
  return softmax([0, logit]);
}

/** Joins neighbours of the same class, then leaves out blanks. */
function collapsed(classes: number[]): number[] {
  return classes.filter((index, position) => index !== BLANK && index !== classes[position - 1]);
}
