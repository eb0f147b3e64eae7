/** Counts how a model predicts samples on which this device never trains (federated evaluation). */

import type { Counts } from "./evaluation_counts.js";
import { Failure } from "./faults.js";
import { IGNORED } from "./local_data.js";
import { MANIFEST, type Port, type Signature, type Train } from "./manifest.js";
import type { EvaluationRequest, Right } from "./messages.js";
import type { Session } from "./runtime.js";
import { batches, SignatureRuns } from "./signature_runs.js";
import type { Tensor, Tensors } from "./tensors.js";

const EVALUATE = "evaluate";
export const LOSS = "loss";
const CORRECT = "correct";
const ABSOLUTE = "absolute";
/** With more classes, none is counted alone. */
const MOST_CLASSES = 1000;

export function rightOf(counts: Counts | null | undefined): Right {
  return counts?.correct === undefined ? null : { right: counts.correct, of: counts.counted };
}

export abstract class EvaluatedRuns extends SignatureRuns {
  /** Called before each batch. */
  protected abstract beforeBatch(): Promise<void>;

  /**
   * Evaluates the received model on the samples that are kept apart.
   *
   * A personal model of an earlier round is not the received model. In its place, the personal
   * tensors get the values with which they start in a first round.
   */
  protected async judgeReceived(instruction: Train, asked: EvaluationRequest): Promise<Counts> {
    for (const first of this.bundle.manifest.schedule) {
      if (first.do === "initialise") {
        this.state.clear();
        await this.initialTensors(first.signature);
      }
    }
    const counts = await this.judge(instruction, asked);
    this.state.clear();
    return counts;
  }

  /** Evaluates the current state on the samples that are kept apart. */
  protected async judge(instruction: Train, { by_class }: EvaluationRequest): Promise<Counts> {
    const { signatures, classes } = this.bundle.manifest;
    const signature = signatures[EVALUATE];
    const labels = signature?.inputs.find((port) => port.kind === "labels");
    if (signature === undefined || labels === undefined) {
      throw new Failure("bundle.malformed", { where: `${MANIFEST}: signatures.${EVALUATE}` });
    }
    const session = await this.open(EVALUATE);
    try {
      const run = (samples: Int32Array, only: bigint | null): Promise<Counts> =>
        this.count(session, signature, labels, instruction, samples, only);
      const highest = Math.max(classes, 2) - 1;
      const counts = signature.outputs.some((port) => port.name === CORRECT);
      if (!(by_class && counts && highest < MOST_CLASSES)) return await run(this.apart, null);
      const parts: Counts[] = [];
      for (let label = 0n; label <= highest; label++) parts.push(await run(this.withLabel(label), label));
      const sum = (figure: (part: Counts) => number): number => parts.reduce((all, part) => all + figure(part), 0);
      return {
        samples: this.apart.length,
        counted: sum((part) => part.counted),
        correct: sum((part) => part.correct ?? 0),
        loss_sum: sum((part) => part.loss_sum),
        classes: parts.map((part) => [part.counted, part.correct ?? 0]),
      };
    } finally {
      await session.close();
    }
  }

  /** Evaluates `samples`. If `only` is given, only this label counts. */
  private async count(
    session: Session,
    signature: Signature,
    labels: Port,
    { source, batch_size }: Train,
    samples: Int32Array,
    only: bigint | null,
  ): Promise<Counts> {
    const sums = { counted: 0, correct: 0, loss_sum: 0, absolute_sum: 0 };
    const names = signature.outputs.map((port) => port.name);
    const others = names.filter((name) => ![LOSS, CORRECT, ABSOLUTE].includes(name)).sort();
    const metrics = Object.fromEntries(others.map((name) => [name, 0]));
    for (const part of batches(samples.length, batch_size, null)) {
      await this.beforeBatch();
      const feeds: Tensors = this.feeds(signature, source, part.map((index) => samples[index]!), {});
      const y = feeds.get(labels.name)!;
      if (only !== null && y.data instanceof BigInt64Array) {
        feeds.set(labels.name, { ...y, data: y.data.map((label) => (label === only ? label : IGNORED)) });
      }
      const results = await session.run(feeds);
      // The loss of a batch is a mean, and batches may have different numbers of labels.
      const counted = countedIn(feeds.get(labels.name)!);
      sums.loss_sum += Number(results.get(LOSS)!.data[0]) * counted;
      sums.counted += counted;
      sums.correct += Number(results.get(CORRECT)?.data[0] ?? 0);
      sums.absolute_sum += Number(results.get(ABSOLUTE)?.data[0] ?? 0) * counted;
      for (const name of others) metrics[name]! += Number(results.get(name)!.data[0]) * part.length;
    }
    const { correct, absolute_sum, ...rest } = sums;
    const has = (name: string): boolean => names.includes(name);
    return {
      samples: samples.length,
      ...rest,
      ...(has(CORRECT) ? { correct } : {}),
      ...(has(ABSOLUTE) ? { absolute_sum } : {}),
      ...(others.length > 0 ? { metrics } : {}),
    };
  }

  /** Those of the samples kept apart that have `label`, at any position. */
  private withLabel(label: bigint): Int32Array {
    return this.apart.filter((index) => (this.data.labels(Int32Array.of(index)).data as BigInt64Array).includes(label));
  }
}

/** The number of labels that count: classes that are not ignored, or the samples of a regression. */
function countedIn({ dtype, data, shape }: Tensor): number {
  if (dtype !== "int64") return shape[0]!;
  return (data as BigInt64Array).reduce((count, label) => count + Number(label !== IGNORED), 0);
}
