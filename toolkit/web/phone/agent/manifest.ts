/** The manifest of a bundle (docs/reference/bundle.md), checked before anything in it is used. */

import { Failure } from "./faults.js";
import { readForm, type Preprocessing, type SampleForm } from "./sample_form.js";
import { sha256 } from "./storage.js";
import type { Dtype } from "./tensors.js";

/** One of the arrays that a packed port holds side by side. */
export interface Part {
  /** Empty if the array has the name of the port. */
  name: string;
  shape: number[];
  dtype: Dtype;
  /** int64 numbers are below it. */
  limit: number | null;
  /** What turns an output into an answer; null for other parts. */
  output: OutputForm | null;
}
export interface Port {
  name: string;
  kind: "samples" | "labels" | "classes" | "scalar" | "seed" | "state" | "metric";
  dtype: Dtype;
  shape: (number | null)[];
  state: string | null;
  sequence: boolean;
  /** The arrays in a packed port; empty in others. */
  parts: Part[];
}
export interface Signature {
  graph: string;
  inputs: Port[];
  outputs: Port[];
}
export interface TensorEntry {
  name: string;
  role: "parameter" | "buffer" | "optimizer" | "personal" | "frozen";
  dtype: Dtype;
  shape: number[];
  stored: boolean;
  by_class: boolean;
}
export type RecordedDtype = "float32" | "float16";
export interface Record_ {
  do: "record";
  signature: string;
  source: string;
  target: string;
  /** Type of the stored numbers. */
  dtype: RecordedDtype;
}
export interface Initialise {
  do: "initialise";
  signature: string;
  every_round: boolean;
}
export interface Step {
  signature: string;
  inputs: Record<string, number>;
  times: number;
}
export interface Train {
  do: "train";
  source: string;
  epochs: number;
  batch_size: number;
  steps: Step[];
  batches?: number | null;
  /** Differential privacy for samples, which this page does not have. */
  privacy?: object | null;
}
export type Instruction = Record_ | Initialise | Train;
export type OutputForm = "softmax" | "sigmoid" | "numbers" | "ctc" | "independent" | "outputs";
export interface FileEntry {
  size: number;
  sha256: string;
}
export interface Manifest {
  submodel: string;
  base: string;
  sample_shape: number[];
  sample_dtype: Dtype;
  sample_limit: number | null;
  preprocessing: Preprocessing | null;
  classes: number;
  signatures: Record<string, Signature>;
  tensors: TensorEntry[];
  schedule: Instruction[];
  /** What turns the output of `predict` into an answer. Bundles that train leave it out. */
  output?: OutputForm;
  files: Record<string, FileEntry>;
}

export const SAMPLES = "x";
export const PREDICT = "predict";
const RECORDED: readonly RecordedDtype[] = ["float32", "float16"];
export const MANIFEST = "manifest.json";
export const WEIGHTS = "weights.safetensors";
const VERSION = 1;
/** The fields that a part may leave out. */
const PART = { dtype: "float32", limit: null, output: null } as const;

/** Reads and checks a manifest. Missing optional fields get their default values. */
export function readManifest(text: string): Manifest {
  const manifest = JSON.parse(text) as Manifest & {
    version: number;
    runtime: string;
  };
  const wrong = (where: string): Failure =>
    new Failure("bundle.malformed", { where: `${MANIFEST}: ${where}` });
  if (manifest.version !== VERSION) {
    throw new Failure("bundle.malformed/version", { found: manifest.version, known: VERSION });
  }
  if (manifest.runtime !== "onnx") {
    throw new Failure("bundle.malformed/runtime", { runtime: manifest.runtime });
  }
  manifest.sample_dtype ??= "float32";
  manifest.sample_limit ??= null;
  manifest.preprocessing = readForm(manifest).preprocessing;
  for (const entry of manifest.tensors) {
    entry.stored ??= true;
    entry.by_class ??= false;
  }
  const names = new Set(manifest.tensors.map((entry) => entry.name));
  for (const [name, signature] of Object.entries(manifest.signatures)) {
    if (!(signature.graph in manifest.files)) throw wrong(`signatures.${name}.graph`);
    for (const port of [...signature.inputs, ...signature.outputs]) {
      port.state ??= null;
      port.sequence ??= false;
      port.parts = (port.parts ?? []).map((part) => ({ ...PART, ...part }));
      if ((port.kind === "state") !== (port.state !== null && names.has(port.state))) {
        throw wrong(`signatures.${name}: ${port.name}`);
      }
    }
  }
  const sources = new Set([SAMPLES]);
  for (const instruction of manifest.schedule) {
    if (instruction.do === "train" && instruction.privacy) throw new Failure("bundle.malformed/private", {});
    const used =
      instruction.do === "train" ? instruction.steps.map((step) => step.signature) : [instruction.signature];
    for (const signature of used) {
      if (!(signature in manifest.signatures)) throw wrong(`signatures.${signature}`);
    }
    if (instruction.do !== "initialise" && !sources.has(instruction.source)) {
      throw wrong(`schedule: ${instruction.source}`);
    }
    if (instruction.do === "record") {
      instruction.dtype ??= "float32";
      if (!RECORDED.includes(instruction.dtype)) throw wrong(`schedule: ${String(instruction.dtype)}`);
      sources.add(instruction.target);
    }
    if (instruction.do === "initialise") instruction.every_round ??= false;
    if (instruction.do === "train") instruction.steps.forEach((step) => (step.times ??= 1));
  }
  return manifest;
}

/** The entries of the tensors in an update, in the order of the table. */
export function uploaded(tensors: readonly TensorEntry[]): TensorEntry[] {
  return tensors.filter((entry) => entry.role === "parameter" || entry.role === "buffer");
}

export function trainingOf(manifest: Manifest): Train {
  const training = manifest.schedule.find((instruction) => instruction.do === "train");
  if (training === undefined) throw new Failure("bundle.malformed", { where: `${MANIFEST}: train` });
  return training;
}

/** Whether the device keeps tensors from round to round: its personal model. */
export function isPersonal({ tensors }: Manifest): boolean {
  return tensors.some(({ role }) => role === "personal");
}

/** The input of the labels; null if the bundle's graphs read none. */
export function labelPort(manifest: Manifest): Port | null {
  const ports = Object.values(manifest.signatures).flatMap((signature) => signature.inputs);
  return ports.find((port) => port.kind === "labels") ?? null;
}

/** The type and the shape of one label before it is packed; null if a sample has several or none. */
export function labelAsRead(manifest: Manifest): { dtype: Dtype; shape: number[] } | null {
  const port = labelPort(manifest);
  if (port === null || port.parts.length > 1) return null;
  return port.parts[0] ?? { dtype: port.dtype, shape: port.shape.slice(1) as number[] };
}

/** The arrays that are packed into the samples; empty for samples of one array. */
export function sampleParts(manifest: Manifest): Part[] {
  const ports = Object.values(manifest.signatures).flatMap((signature) => signature.inputs);
  return ports.find((port) => port.kind === "samples" && port.name === SAMPLES && port.parts.length > 0)?.parts ?? [];
}

export function formOf(manifest: Manifest): SampleForm {
  const { preprocessing, sample_shape } = manifest;
  const labels = labelPort(manifest)?.parts[0]?.limit !== 0;
  return { preprocessing, sample_shape, label_type: labelAsRead(manifest)?.dtype ?? "int64", labels };
}

/** SHA-256 of all ports and the tensor table, like `structure` of device_agent/formats/bundle.py. */
export async function structureOf({ signatures, tensors }: Manifest): Promise<string> {
  const all = Object.entries(signatures).map(([name, { inputs, outputs }]) => [
    name,
    [inputs.map(asWritten), outputs.map(asWritten)],
  ]);
  const text = JSON.stringify(sorted([Object.fromEntries(all), tensors]));
  return sha256(new TextEncoder().encode(text));
}

/** `value` with the keys of its objects sorted. */
function sorted(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(sorted);
  if (typeof value !== "object" || value === null) return value;
  const entries = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
  return Object.fromEntries(entries.map(([key, inner]) => [key, sorted(inner)]));
}

/** A port as manifests have it: without the default values of `parts`, and without its range. */
function asWritten({ parts, ...rest }: Port): object {
  const fields: [string, unknown][] = Object.entries(rest).filter(([name]) => name !== "range");
  if (parts.length > 0) fields.push(["parts", parts.map(withoutDefaults)]);
  return Object.fromEntries(fields);
}

function withoutDefaults(part: Part): object {
  const isDefault = ([name, value]: [string, unknown]): boolean =>
    name in PART && value === PART[name as keyof typeof PART];
  return Object.fromEntries(Object.entries(part).filter((field) => !isDefault(field)));
}
