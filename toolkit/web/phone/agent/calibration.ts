/**
 * Calibrates this browser: measures the times of single operations and the overheads of a run
 * (profiles/documents/calibration_record.py). From them the coordinator predicts the cost of a submodel.
 *
 * A browser has no profiler for operations. The time of an operation is the time of a graph with this
 * operation minus the time of a graph that only takes the same inputs (exporters/page_calibration.py).
 */

import CASES from "./calibration_cases.json";
import { ones, openGraph, RUNTIME, type Feeds, type Graph } from "./runtime.js";

const VERSION = 1;
/** Without isolation, a clock counts in steps of 0.1 ms. With this time its error is at most 5%. */
const SHORTEST_MS = 2;
const REPEATS = 5;
const SHORTEST_OPERATION_S = 1e-9;
/** As in device_agent/profiling/calibration.py: nodes of `row` and `side`, and steps of `loop`. */
const NODES = 64;
const [FEW_STEPS, MANY_STEPS] = [16, 272];
const BODY_NODES = 2;
const COPIED = 1 << 20;

interface Timing {
  kind: string;
  sizes: number[];
  seconds: number;
}
export interface Calibration {
  version: number;
  runtime: string;
  threads: number;
  timings: Timing[];
  run_s: number;
  port_s: number;
  node_s: number;
  loop_step_s: number;
  byte_s: number;
  memory: null;
}

/** Measures for about half a minute. `onProgress` gets the share of the work that is done. */
export async function calibrate(onProgress: (share: number) => void): Promise<Calibration> {
  const graphs = new Graphs();
  try {
    const overheads = await measureOverheads(graphs);
    const timings: Timing[] = [];
    for (const { kind, sizes, graph, base, inputs } of CASES.cases) {
      const feeds = ones(inputs);
      const difference = (await graphs.seconds(graph, feeds)) - (await graphs.seconds(base, feeds));
      const seconds = Math.max(difference, overheads.node_s, SHORTEST_OPERATION_S);
      timings.push({ kind, sizes, seconds });
      onProgress(timings.length / CASES.cases.length);
    }
    return { version: VERSION, runtime: RUNTIME, threads: 1, timings, ...overheads, memory: null };
  } finally {
    await graphs.close();
  }
}

type Overheads = Pick<Calibration, "run_s" | "port_s" | "node_s" | "loop_step_s" | "byte_s">;

/** Computes overheads from the times of tiny graphs that differ in a single property. */
async function measureOverheads(graphs: Graphs): Promise<Overheads> {
  const takes = "takes_x_1"; // 1 node, 2 ports
  const single = await graphs.seconds(takes, ones({ x: [1] }));
  const large = await graphs.seconds(takes, ones({ x: [COPIED] }));
  const row = await graphs.seconds("row", ones({ x: [1] })); // NODES nodes, 2 ports
  const names = Array.from({ length: NODES }, (_, n): [string, number[]] => [`x${n}`, [1]]);
  const side = await graphs.seconds("side", ones(Object.fromEntries(names))); // 2 ports each
  const few = await graphs.seconds("loop", ones({ s0: [1], x: [FEW_STEPS, 1] }));
  const many = await graphs.seconds("loop", ones({ s0: [1], x: [MANY_STEPS, 1] }));
  const node_s = Math.max(0, row - single) / (NODES - 1);
  const port_s = Math.max(0, side - row) / (2 * NODES - 2);
  return {
    run_s: Math.max(0, single - node_s - 2 * port_s),
    port_s,
    node_s,
    loop_step_s: Math.max(0, (many - few) / (MANY_STEPS - FEW_STEPS) - BODY_NODES * node_s),
    byte_s: Math.max(0, large - single) / (4 * (COPIED - 1)),
  };
}

/** The graphs of the cases; each is opened once. */
class Graphs {
  private readonly opened = new Map<string, Graph>();

  /** The median seconds of a run. */
  async seconds(name: string, feeds: Feeds): Promise<number> {
    const graph = await this.open(name);
    await graph.run(feeds); // the first run prepares buffers
    const seconds: number[] = [];
    let runs = 1;
    while (seconds.length < REPEATS) {
      const begun = performance.now();
      for (let i = 0; i < runs; i++) await graph.run(feeds);
      const took = performance.now() - begun;
      if (took < SHORTEST_MS) {
        runs *= 2;
      } else {
        seconds.push(took / runs / 1000);
      }
    }
    return seconds.sort((a, b) => a - b)[REPEATS >> 1]!;
  }

  async close(): Promise<void> {
    for (const graph of this.opened.values()) await graph.release();
  }

  private async open(name: string): Promise<Graph> {
    let graph = this.opened.get(name);
    if (graph === undefined) {
      graph = await openGraph((CASES.graphs as Record<string, string>)[name]!);
      this.opened.set(name, graph);
    }
    return graph;
  }
}
