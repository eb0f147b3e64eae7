/** How a model predicts each of some labelled samples, as device_agent/inference/scores.py. */

import { logitsOf, sigmoid, softmax } from "./answer.js";
import type { Counts } from "./evaluation_counts.js";
import { IGNORED } from "./local_data.js";
import type { OutputForm } from "./manifest.js";
import { sizeOf, type Tensor } from "./tensors.js";

/** The least probability whose logarithm is taken. */
const LEAST = 1e-38;

/** The score of a sample. */
export interface Score {
  /** How many of its labels count. */
  counted: number;
  /** How many of them are predicted correctly; null for a regression and for sequences. */
  correct: number | null;
  /** The sum of their losses. */
  loss: number;
}

export const total = (numbers: readonly number[]): number => numbers.reduce((sum, number) => sum + number, 0);

export function countsOf(scores: readonly Score[]): Counts {
  const correct = scores.map((score) => score.correct).filter((right) => right !== null);
  return {
    samples: scores.length,
    counted: total(scores.map(({ counted }) => counted)),
    loss_sum: total(scores.map(({ loss }) => loss)),
    ...(correct.length > 0 ? { correct: total(correct) } : {}),
  };
}

/** @param output The output of the model for the samples with the labels `y`: (n, ...). */
export function scoresOf(form: OutputForm, output: Tensor, y: Tensor): Score[] {
  return Array.from({ length: y.shape[0]! }, (_, row) => {
    const labels = rowOf(y, row);
    const predicted = rowOf(output, row);
    if (form === "numbers") return numberScore(predicted.data as Float32Array, labels.data as Float32Array);
    const classes = [...(labels.data as BigInt64Array)].map((label) => (label === IGNORED ? null : Number(label)));
    if (form === "independent") {
      const questions = [...(predicted.data as Float32Array)].map((logit) => sigmoid([logit]).map(Math.fround));
      return classScore(questions, classes);
    }
    const logits = logitsOf(predicted);
    const probabilities = logits.map((all) => softmax(form === "sigmoid" ? [0, ...all] : all).map(Math.fround));
    return (form === "ctc" ? sequenceScore : classScore)(probabilities, classes);
  });
}

function rowOf({ dtype, shape, data }: Tensor, row: number): Tensor {
  const size = sizeOf(shape.slice(1));
  return { dtype, shape: [1, ...shape.slice(1)], data: data.slice(row * size, (row + 1) * size) };
}

/** @param y The class at each position; null does not count. */
function classScore(probabilities: number[][], y: (number | null)[]): Score {
  const score = { counted: 0, correct: 0, loss: 0 };
  for (const [position, label] of y.entries()) {
    if (label === null) continue;
    const at = probabilities[position]!;
    score.counted++;
    score.correct += Number(at.indexOf(Math.max(...at)) === label);
    score.loss -= Math.log(Math.max(at[label]!, LEAST));
  }
  return score;
}

/** The loss of a regression is the mean squared error of the sample. */
function numberScore(output: Float32Array, y: Float32Array): Score {
  return { counted: 1, correct: null, loss: total([...output].map((value, i) => (value - y[i]!) ** 2)) / y.length };
}

/** The loss ctc, -log p(labels), by the forward recursion of Graves et al. 2006, equations 6 to 8. */
function sequenceScore(probabilities: number[][], y: (number | null)[]): Score {
  const labels = y.filter((label) => label !== null);
  const spread = [0, ...labels.flatMap((label) => [label, 0])];
  const logs = probabilities.map((at) => spread.map((label) => Math.log(Math.max(at[label]!, LEAST))));
  let forward = spread.map((_, i) => (i < 2 ? logs[0]![i]! : -Infinity));
  for (const step of logs.slice(1)) {
    const before = forward;
    forward = spread.map((label, i) => {
      // A blank between two labels may be skipped, unless they are equal.
      const skips = i > 2 && label !== 0 && label !== spread[i - 2];
      return logSum([before[i]!, before[i - 1] ?? -Infinity, skips ? before[i - 2]! : -Infinity]) + step[i]!;
    });
  }
  return { counted: labels.length, correct: null, loss: -logSum(forward.slice(-2)) };
}

function logSum(logs: number[]): number {
  const most = Math.max(...logs);
  return most === -Infinity ? most : most + Math.log(total(logs.map((log) => Math.exp(log - most))));
}
