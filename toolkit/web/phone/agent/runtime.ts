/** ONNX Runtime, compiled to WebAssembly: sessions that take and return named tensors. */

import * as ort from "onnxruntime-web/wasm";
import { Failure } from "./faults.js";
import { checkGraph } from "./graph_check.js";
import type { Port, Signature } from "./manifest.js";
import type { Bytes } from "./storage.js";
import { sizeOf, type Dtype, type Numbers, type Tensor, type Tensors } from "./tensors.js";

/** The address of the runtime's WebAssembly; the build fills it in. */
declare const WASM_URL: string;

ort.env.wasm.wasmPaths = { wasm: new URL(WASM_URL, self.location.href).href };
// Two threads were not faster in a browser, and with one thread every run gives the same result.
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";

export const RUNTIME = `onnxruntime-web ${ort.env.versions.web ?? ort.env.versions.common}`;

/** The runtime's memory, caught when the runtime creates it: there is no other way to learn its size. */
const memories: WebAssembly.Memory[] = [];
WebAssembly.Memory = class extends WebAssembly.Memory {
  constructor(limits: WebAssembly.MemoryDescriptor) {
    super(limits);
    memories.push(this);
  }
};

/** Bytes of the runtime's memory, which never shrinks; null before the first session. */
export function memoryBytes(): number | null {
  return memories[0]?.buffer.byteLength ?? null;
}

export type Graph = ort.InferenceSession;
export type Feeds = Record<string, ort.Tensor>;

/** Opens a graph of this page (base64). It runs as written, or `optimized` like a graph of a bundle. */
export async function openGraph(base64: string, optimized = false): Promise<Graph> {
  const graph = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return ort.InferenceSession.create(graph, { graphOptimizationLevel: optimized ? "all" : "disabled" });
}

/** Inputs of these shapes, filled with ones. The input `mask` has truth values. */
export function ones(shapes: Partial<Record<string, number[]>>): Feeds {
  const feeds: Feeds = {};
  for (const [name, shape] of Object.entries(shapes)) {
    if (shape === undefined) continue;
    const [type, Numbers] = name === "mask" ? (["bool", Uint8Array] as const) : (["float32", Float32Array] as const);
    feeds[name] = new ort.Tensor(type, new Numbers(sizeOf(shape)).fill(1), shape);
  }
  return feeds;
}

export class Session {
  private constructor(
    private readonly session: ort.InferenceSession,
    private readonly signature: Signature,
  ) {}

  static async open(graph: Bytes, signature: Signature, name: string): Promise<Session> {
    checkGraph(graph, signature.graph);
    const session = await ort.InferenceSession.create(graph, { graphOptimizationLevel: "all" });
    check(session.inputNames, signature.inputs, name);
    check(session.outputNames, signature.outputs, name);
    return new Session(session, signature);
  }

  /** Runs the graph. Returns the outputs by name. */
  async run(inputs: Tensors): Promise<Tensors> {
    const feeds: Record<string, ort.Tensor> = {};
    for (const [name, { dtype, data, shape }] of inputs) {
      feeds[name] = new ort.Tensor(dtype, data, shape);
    }
    const results = await this.session.run(feeds);
    return new Map(
      this.signature.outputs.map(({ name }): [string, Tensor] => {
        const { type, dims, data } = results[name]!;
        return [name, { dtype: type as Dtype, shape: [...dims], data: data as Numbers }];
      }),
    );
  }

  async close(): Promise<void> {
    await this.session.release();
  }
}

function check(found: readonly string[], ports: readonly Port[], signature: string): void {
  const expected = ports.map((port) => port.name);
  const other = [...found.filter((n) => !expected.includes(n)), ...expected.filter((n) => !found.includes(n))];
  if (other.length > 0) {
    throw new Failure("bundle.wrong-graph", { port: other[0]!, signature });
  }
}
