/** How files become samples of a federation (device_agent/formats/preprocessing.py). */

import { Failure } from "./faults.js";
import type { Dtype, Numbers } from "./tensors.js";

/** Pictures by class. An empty `mean` means 0, an empty `std` 1. */
export interface Images {
  kind: "images";
  classes: string[];
  fit: "crop" | "stretch";
  mean: number[];
  std: number[];
}
/** Windows of lines of CSV files. With `step` 0, a window begins where the last one ended. */
export interface Series {
  kind: "series";
  columns: string[];
  label: string;
  classes: string[];
  channels: "first" | "last";
  step: number;
  mean: number[];
  std: number[];
}
export type Preprocessing = Images | Series;

/** The form of a federation's samples. The answer to a join and every manifest have it. */
export interface SampleForm {
  preprocessing: Preprocessing | null;
  sample_shape: number[];
  label_type: Dtype;
  /** Whether the loss reads labels, so that the owner's files must hold them. */
  labels: boolean;
}

type Piece = Float32Array<ArrayBuffer>;
export type Samples = Generator<Piece, void> | AsyncGenerator<Piece, void>;

/** Labels, and samples that are computed one after another. */
export interface Prepared {
  y: Numbers;
  samples: () => Samples;
}

/** The files that the owner has chosen. */
export type Source =
  | { kind: "npz"; file: File }
  | { kind: "images"; pictures: { file: File; label: string }[] }
  | { kind: "series"; files: File[] };

/** The progress of preparing files: how many pictures or bytes are done, of how many. */
export interface Preparing {
  unit: "pictures" | "bytes";
  done: number;
  of: number;
}
export type OnProgress = (preparing: Preparing) => void;

/** Computes (value - mean) / std in float64. Channels are the last axis of `values`. */
export function normalise(values: Float64Array, mean: readonly number[], std: readonly number[]): void {
  const channels = Math.max(mean.length, std.length, 1);
  for (let i = 0; i < values.length; i++) {
    values[i] = (values[i]! - (mean[i % channels] ?? 0)) / (std[i % channels] ?? 1);
  }
}

/** Reads and checks the form of samples in an answer to a join or in a manifest. */
export function readForm(given: Partial<SampleForm> & { arrays?: string[] }): SampleForm {
  const preprocessing = given.preprocessing ?? null;
  const form = {
    preprocessing,
    sample_shape: given.sample_shape ?? [],
    label_type: given.label_type ?? "int64",
    labels: given.labels ?? ((given.arrays ?? []).length === 0 || given.arrays!.some((name) => name.startsWith("y"))),
  };
  if (preprocessing === null) return form;
  const texts = (list: unknown): boolean =>
    Array.isArray(list) && list.every((text) => typeof text === "string");
  const numbers = (list: unknown): boolean =>
    Array.isArray(list) && list.every((number) => Number.isFinite(number));
  const fits =
    numbers(form.sample_shape) &&
    texts(preprocessing.classes) &&
    numbers(preprocessing.mean) &&
    numbers(preprocessing.std) &&
    (preprocessing.kind === "images" ||
      (preprocessing.kind === "series" && texts(preprocessing.columns) && preprocessing.columns.length > 0));
  if (!fits) {
    throw new Failure("client.not-a-coordinator/samples", { origin: self.location.origin });
  }
  return form;
}

/** The form as text. Equal forms give equal texts. */
export function textOf(form: SampleForm): string {
  const { preprocessing, sample_shape, label_type } = form;
  return JSON.stringify([preprocessing, sample_shape, label_type], (_, value: unknown) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? Object.fromEntries(Object.entries(value).sort(([one], [other]) => (one < other ? -1 : 1)))
      : value,
  );
}
