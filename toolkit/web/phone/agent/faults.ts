/**
 * All faults by name, with the values that their sentences need. The sentences are in ../texts/, in
 * each language of the page.
 *
 * A name begins with a code for programs. The part after a slash distinguishes faults of one code.
 */

import type { Problem } from "./messages.js";
import type { Dtype } from "./tensors.js";

type None = Record<never, never>;

/** Contents of a graph that no export writes. */
export type Unsafe = "training" | "functions" | "outside" | "domain" | "nested" | "not-onnx";

interface Shapes {
  name: string;
  wanted: Dtype;
  wantedShape: readonly number[];
  found: Dtype;
  foundShape: readonly number[];
}

export interface Faults {
  "bundle.altered-file": { file: string };
  "bundle.altered-file/manifest": { file: string };
  "bundle.malformed": { where: string };
  "bundle.malformed/version": { found: number; known: number };
  "bundle.malformed/runtime": { runtime: string };
  "bundle.malformed/private": None;
  "bundle.unreadable-tensors": { file: string };
  "bundle.unsafe-graph": { file: string; found: Unsafe; domain: string };
  "bundle.wrong-graph": { port: string; signature: string };
  "client.away/unreachable": None;
  "client.away/broke-off": None;
  "client.away/silent": None;
  "client.away/status": { status: number };
  "client.away/preparing": None;
  "client.away/busy": None;
  "client.not-a-coordinator": { origin: string };
  "client.not-a-coordinator/status": { origin: string; status: number };
  "client.not-a-coordinator/samples": { origin: string };
  "client.too-long": { origin: string };
  "data.label-out-of-range": { name: string; label: number; highest: number };
  "data.missing": None;
  "data.missing-array": { file: string };
  "data.missing-array/several": { name: string; arrays: string[] };
  "data.missing-array/x": { file: string };
  "data.missing-column": { file: string; column: string; columns: string[] };
  "data.missing-column/several": { file: string; column: string; columns: string[] };
  "data.missing-file": None;
  "data.no-labels": { name: string; ignored: number };
  "data.not-a-number": { file: string; line: number; column: string; text: string };
  "data.not-a-number/mixed": { file: string; line: number; column: string; text: string };
  "data.not-a-sequence": { name: string; sample: number; ignored: number };
  "data.not-prepared": None;
  "data.nothing-new": None;
  "data.number-out-of-range": { name: string; sample: number };
  "data.other-form": { name: string };
  "data.other-preparation": None;
  "data.too-few-samples": { lines: number };
  /** If labels are classes, a sample has only lines of one class. */
  "data.too-few-samples/same-label": { lines: number };
  "data.unknown-class": { file: string; line: number; text: string; classes: string[] };
  "data.unknown-class/number": { file: string; line: number; text: string };
  "data.unreadable": { file: string };
  "data.unreadable/fortran": { file: string };
  "data.unreadable-file/gone": { file: string };
  "data.unreadable-file/csv": { file: string };
  "data.unreadable-file/quotation": { file: string };
  "data.unreadable-file/picture": { file: string };
  "data.unreadable-file/large-picture": { file: string; width: number; height: number };
  "data.wrong-shape/count": { name: string; samples: number; labels: number; least: number };
  "data.wrong-shape/x": Shapes;
  "data.wrong-shape/y": Shapes;
  "data.wrong-type": { file: string; type: string };
  /** An unexpected fault. The message is the browser's. */
  "page.fault": { message: string };
  "page.fault/pictures": None;
  /** This device has erased everything, but the coordinator does not know it. */
  "leave.untold": { device: string; id: string };
  /** The coordinator refused the request. The code and the message are the coordinator's. */
  refused: { message: string };
  "release.no-inference-bundle": None;
  "release.no-room": { needed: number; free: number };
  /** The reason is in English, for the operator. */
  "release.worse": { reason: string };
  "storage.disk-full": None;
  "storage.lost": None;
  "storage.lost/data": None;
  "storage.lost/model": None;
  "trial.no-memory": None;
  "trial.no-model": None;
  "trial.training": None;
  "trust.forged-invitation": None;
  "trust.forged-key": None;
  "trust.forged-release": { number: number };
  "trust.forged-work": None;
  "trust.forged-work/group": None;
  "trust.late-key": None;
  "trust.no-secure-sum": None;
  "trust.unclippable": None;
  "trust.less-noise": { promised: number; noise: number };
  "trust.old-release": { number: number };
  "trust.old-work": None;
  "trust.other-key": None;
  "trust.single-figures": None;
  /** The coordinator has asked for something with which it could learn the update of a device. */
  "trust.unsafe-sum/altered-shares": { device: string };
  "trust.unsafe-sum/few-confirmations": { confirmed: number; needed: number };
  "trust.unsafe-sum/few-shares": { held: number; needed: number };
  "trust.unsafe-sum/left-out": None;
  "trust.unsafe-sum/no-group": None;
  "trust.unsafe-sum/no-update-yet": None;
  "trust.unsafe-sum/other-devices": None;
  "trust.unsafe-sum/other-members": None;
  "trust.unsafe-sum/other-neighbours": None;
  "trust.unsafe-sum/own-keys": None;
  "trust.unsafe-sum/shares-twice": None;
  "trust.unsafe-sum/small-group": { found: number; needed: number };
  "trust.unsafe-sum/small-sum": { found: number; needed: number };
  "trust.unsafe-sum/twice": None;
  "trust.unsafe-sum/unconfirmed": None;
  "trust.unsafe-sum/unsigned-keys": { device: string };
  "trust.unsafe-sum/update-twice": None;
  "update.beyond-float16": { value: number };
  "update.diverged": None;
  "update.not-finite": { tensor: string };
}
export type FaultName = keyof Faults;
export type Fault = { [F in FaultName]: { is: F; values: Faults[F] } }[FaultName];

/** A sentence for each fault. */
export type Sentences = { [F in FaultName]: (values: Faults[F]) => string };

export function sentenceOf({ is, values }: Fault, sentences: Sentences): string {
  return (sentences[is] as (values: Faults[FaultName]) => string)(values);
}

/** A fault that is thrown as an error. */
export class Failure<F extends FaultName = FaultName> extends Error {
  readonly fault: Fault;

  /** @param code The code in `is`, or the code that the coordinator sent. */
  constructor(
    is: F,
    values: Faults[F],
    readonly code: string = is.replace(/\/.*/, ""),
  ) {
    super(`${is} ${JSON.stringify(values)}`);
    this.fault = { is, values } as Fault;
  }

  get problem(): Problem {
    return { code: this.code, fault: this.fault, retryAt: null };
  }
}

/** The problem that the page shows for `error`. An unexpected error keeps its own message. */
export function problemOf(error: unknown): Problem {
  if (error instanceof Failure) return error.problem;
  if (error instanceof DOMException && error.name === "QuotaExceededError") {
    return new Failure("storage.disk-full", {}).problem;
  }
  const message = error instanceof Error ? error.message : String(error);
  return new Failure("page.fault", { message }).problem;
}
