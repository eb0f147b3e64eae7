/** The signatures of a bundle with the tensors that they read and replace, and with their data. */

import type { Bundle } from "./bundle.js";
import { withoutHeldOut } from "./held_out.js";
import { sourceOf, type LocalData } from "./local_data.js";
import type { Port, Signature } from "./manifest.js";
import { NumpyRandom } from "./numpy_random.js";
import type { RowFile } from "./row_file.js";
import { Session } from "./runtime.js";
import type { Tensor, Tensors } from "./tensors.js";

/**
 * Splits `samples` samples into batches of `size`, shuffled by `order` if it is given. If a
 * single sample remains, it joins the last batch: batch normalisation cannot train on one sample.
 */
export function batches(samples: number, size: number, order: NumpyRandom | null): Int32Array[] {
  const indices = order?.permutation(samples) ?? Int32Array.from({ length: samples }, (_, i) => i);
  const starts: number[] = [];
  for (let at = 0; at < samples; at += size) starts.push(at);
  if (starts.length > 1 && samples - starts[starts.length - 1]! === 1) starts.pop();
  return starts.map((start, i) => indices.subarray(start, starts[i + 1] ?? samples));
}

export class SignatureRuns {
  /** The tensors that the open signatures read and replace. */
  state: Tensors = new Map();
  /** Indices of the samples to train on. */
  readonly trained: Int32Array;
  protected recordings = new Map<string, RowFile>();
  protected dropout: NumpyRandom;
  private classes: Tensor | null = null;

  protected constructor(
    protected readonly bundle: Bundle,
    protected readonly data: LocalData,
    seed: number,
    public personal: Tensors,
    /** Indices of the samples that are only evaluated. */
    protected readonly apart: Int32Array,
  ) {
    // Use a separate generator, not the one of the sample order, as in the native agent.
    this.dropout = new NumpyRandom([seed, 1]);
    this.trained = withoutHeldOut(data.samples, apart);
  }

  /** 1 for each class that occurs among the trained samples, otherwise 0. */
  get trainedClasses(): Tensor {
    return (this.classes ??= this.data.classes(this.bundle.manifest.classes, this.trained));
  }

  /** Opens a session for `name`. Loads the tensors that it reads, unless they are already loaded. */
  protected async open(name: string): Promise<Session> {
    const signature = this.bundle.manifest.signatures[name]!;
    const read = signature.inputs.flatMap((port) => (port.state === null ? [] : [port.state]));
    const missing = read.filter((tensor) => !this.state.has(tensor));
    for (const [tensor, value] of await this.bundle.tensors(missing)) this.state.set(tensor, value);
    for (const { name: tensor, stored } of this.bundle.manifest.tensors) {
      const kept = stored ? undefined : this.personal.get(tensor);
      if (kept !== undefined && missing.includes(tensor)) this.state.set(tensor, kept);
    }
    return Session.open(await this.bundle.graph(name), signature, name);
  }

  /** Runs a signature that computes initial personal tensors. They are in the state afterwards. */
  protected async initialTensors(name: string): Promise<void> {
    const signature = this.bundle.manifest.signatures[name]!;
    const session = await this.open(name);
    try {
      this.replace(signature, await session.run(this.feeds(signature, "x", new Int32Array(), {})));
    } finally {
      await session.close();
    }
  }

  protected feeds(
    signature: Signature,
    source: string,
    indices: Int32Array,
    scalars: Record<string, number>,
  ): Tensors {
    return new Map(
      signature.inputs.map((port) => [port.name, this.feed(port, source, indices, scalars)]),
    );
  }

  private feed(
    port: Port,
    source: string,
    indices: Int32Array,
    scalars: Record<string, number>,
  ): Tensor {
    switch (port.kind) {
      case "samples":
        return sourceOf(this.data, this.recordings, source).read(indices);
      case "labels":
        return this.data.labels(indices);
      case "classes":
        return this.trainedClasses;
      case "scalar":
        return { dtype: "float32", shape: [], data: Float32Array.of(scalars[port.name]!) };
      case "seed": {
        const drawn = BigInt(this.dropout.integers(2 ** 31 - 1));
        return { dtype: "int64", shape: [], data: BigInt64Array.of(drawn) };
      }
      default:
        return this.state.get(port.state!)!;
    }
  }

  protected replace(signature: Signature, results: Tensors): void {
    for (const port of signature.outputs) {
      if (port.state !== null) this.state.set(port.state, results.get(port.name)!);
    }
  }
}
