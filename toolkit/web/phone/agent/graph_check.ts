/**
 * What an ONNX file may hold, checked before the runtime opens it: operators of ONNX's own domain
 * only, and all values in the file. The twin of `device_agent/runtime/graph_check.py`.
 */

import { Failure } from "./failure.js";
import type { Unsafe } from "./faults.js";
import type { Bytes } from "./storage.js";

const DEEPEST = 100;

type Kind = "model" | "graph" | "operator" | "attribute" | "sparse tensor" | "tensor";

/** The messages within each message, by the number of the field. */
const INSIDE: Record<Kind, Record<number, Kind>> = {
  model: { 7: "graph" },
  graph: { 1: "operator", 5: "tensor", 15: "sparse tensor" },
  operator: { 5: "attribute" },
  attribute: { 5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor" },
  "sparse tensor": { 1: "tensor", 2: "tensor" },
  tensor: {},
};
/** Fields that no export has, and what they would give the graph. */
const FORBIDDEN: Record<string, Unsafe> = {
  "model 20": "training",
  "model 25": "functions",
  "tensor 13": "outside",
};

export function checkGraph(data: Bytes, name: string): void {
  let found: Foreign | null;
  try {
    found = foreign(data, "model", 0);
  } catch {
    found = { found: "not-onnx", domain: "" };
  }
  if (found !== null) throw new Failure("bundle.unsafe-graph", { file: name, ...found });
}

interface Foreign {
  found: Unsafe;
  /** That of the operators, if they are what was found. */
  domain: string;
}

function foreign(data: Bytes, kind: Kind, depth: number): Foreign | null {
  if (depth > DEEPEST) return { found: "nested", domain: "" };
  for (const [number, value] of fields(data)) {
    const forbidden = FORBIDDEN[`${kind} ${number}`];
    if (forbidden !== undefined) return { found: forbidden, domain: "" };
    if (typeof value === "number") {
      if (kind === "tensor" && number === 14 && value !== 0) return { found: "outside", domain: "" };
      continue;
    }
    if (kind === "operator" && number === 7) {
      const domain = new TextDecoder().decode(value);
      if (domain !== "" && domain !== "ai.onnx") return { found: "domain", domain: domain.slice(0, 40) };
    }
    const inside = INSIDE[kind][number];
    const found = inside === undefined ? null : foreign(value, inside, depth + 1);
    if (found !== null) return found;
  }
  return null;
}

/** The fields of a message: their numbers, and their bytes or whole numbers. */
function* fields(data: Bytes): Generator<[number, Bytes | number]> {
  const at = { place: 0 };
  while (at.place < data.length) {
    const key = varint(data, at);
    const number = Math.floor(key / 8);
    switch (key % 8) {
      case 0:
        yield [number, varint(data, at)];
        break;
      case 1:
        at.place += 8;
        break;
      case 2: {
        const size = varint(data, at);
        if (size > data.length - at.place) throw new Error("a field ends after its message");
        yield [number, data.subarray(at.place, at.place + size)];
        at.place += size;
        break;
      }
      case 5:
        at.place += 4;
        break;
      default:
        throw new Error("unknown wire type");
    }
  }
}

/** A whole number; one of more than 53 bits loses its last digits, which no check needs. */
function varint(data: Bytes, at: { place: number }): number {
  let number = 0;
  for (let digit = 0; digit < 10; digit++) {
    const byte = data[at.place++];
    if (byte === undefined) throw new Error("a whole number ends after its message");
    number += (byte % 128) * 2 ** (7 * digit);
    if (byte < 128) return number;
  }
  throw new Error("a whole number is too long");
}
