/**
 * Checks an ONNX file before the runtime opens it. The file may have only operators of ONNX's own
 * domain, and must contain all values. The twin of `device_agent/runtime/graph_check.py`.
 */

import { BinaryReader, WireType } from "@bufbuild/protobuf/wire";
import { Failure, type Unsafe } from "./faults.js";
import type { Bytes } from "./storage.js";

const DEEPEST = 100;

type Kind = "model" | "graph" | "operator" | "attribute" | "sparse tensor" | "tensor";

/** The kinds of messages within each kind of message, by the number of the field. */
const INSIDE: Record<Kind, Record<number, Kind>> = {
  model: { 7: "graph" },
  graph: { 1: "operator", 5: "tensor", 15: "sparse tensor" },
  operator: { 5: "attribute" },
  attribute: { 5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor" },
  "sparse tensor": { 1: "tensor", 2: "tensor" },
  tensor: {},
};
/** Fields that no export has, and what they would add to the graph. */
const FORBIDDEN: Record<string, Unsafe> = {
  "model 20": "training",
  "model 25": "functions",
  "tensor 13": "outside",
};

export function checkGraph(data: Bytes, name: string): void {
  let unsafe: Foreign | null;
  try {
    unsafe = foreign(data, "model", 0);
  } catch {
    unsafe = { found: "not-onnx", domain: "" };
  }
  if (unsafe !== null) throw new Failure("bundle.unsafe-graph", { file: name, ...unsafe });
}

interface Foreign {
  found: Unsafe;
  /** The domain of the operators if `found` is "domain", else empty. */
  domain: string;
}

function foreign(data: Uint8Array, kind: Kind, depth: number): Foreign | null {
  if (depth > DEEPEST) return { found: "nested", domain: "" };
  const reader = new BinaryReader(data);
  while (reader.pos < reader.len) {
    const [number, wireType] = reader.tag();
    const forbidden = FORBIDDEN[`${kind} ${number}`];
    if (forbidden !== undefined) return { found: forbidden, domain: "" };
    if (wireType !== WireType.LengthDelimited) {
      const place = kind === "tensor" && number === 14 && wireType === WireType.Varint;
      if (place && reader.int32() !== 0) return { found: "outside", domain: "" };
      if (!place) reader.skip(wireType, number);
      continue;
    }
    const content = reader.bytes();
    if (kind === "operator" && number === 7) {
      const domain = new TextDecoder().decode(content);
      if (domain !== "" && domain !== "ai.onnx") return { found: "domain", domain: domain.slice(0, 40) };
    }
    const inside = INSIDE[kind][number];
    const within = inside === undefined ? null : foreign(content, inside, depth + 1);
    if (within !== null) return within;
  }
  return null;
}
