/** The update of a round and the personal model. Both are stored together before the update is sent. */

import type { Bundle } from "./bundle.js";
import type { Body } from "./disclosure.js";
import type { Counts } from "./evaluation_counts.js";
import { Failure } from "./faults.js";
import type { InputSummary } from "./input_summary.js";
import { uploaded, type Manifest } from "./manifest.js";
import { profileOf } from "./round_profile.js";
import type { ScheduleRun } from "./schedule.js";
import { folderOf, packed, Sealed, sha256, unpacked, type Bytes } from "./storage.js";
import { readAllTensors, writeTensors, type Tensors } from "./tensors.js";

const FOLDER = "results";
const VERSION = 1;

/** A trained update, ready to be sent: `record` is update.json, `tensors` update.safetensors. */
export interface Update {
  bundle: string;
  record: string;
  tensors: Bytes;
  sha256: string;
  loss: number;
  evaluation?: { before: Counts; after: Counts } | null;
}

/** @param inputs The summary of the inputs, if the coordinator has sent its own summary. */
export async function updateOf(
  bundle: Bundle,
  run: ScheduleRun,
  inputs: InputSummary | null,
): Promise<Update> {
  const { manifest } = bundle;
  const entries = uploaded(manifest.tensors);
  const values: Tensors = new Map(entries.map(({ name }) => [name, run.state.get(name)!]));
  for (const [name, { data: numbers }] of values) {
    if (numbers instanceof Float32Array && !numbers.every((number) => Number.isFinite(number))) {
      throw new Failure("update.not-finite", { tensor: name });
    }
  }
  const tensors = writeTensors(values);
  const digest = await sha256(tensors);
  // Without a masked loss, the server learns nothing about the labels.
  const masked = manifest.tensors.some((entry) => entry.by_class);
  const present = [...run.trainedClasses.data].flatMap((occurs, i) => (occurs ? [i] : []));
  const raw = manifest.tensors.filter((entry) => entries.includes(entry));
  const record: Body<"POST /rounds/{round}/update"> = {
    version: VERSION,
    bundle: bundle.sha256,
    base: manifest.base,
    submodel: manifest.submodel,
    samples: run.samples,
    steps: run.steps,
    loss_first: run.losses[0],
    loss_last: run.losses.at(-1),
    tensors: raw,
    file: { size: tensors.length, sha256: digest },
    profile: await profileOf(manifest, run.seconds),
    validation: [],
    classes: masked ? present : null,
    // Coordinators of earlier versions refuse these fields.
    inputs: inputs ?? undefined,
    evaluation: run.evaluation ?? undefined,
  };
  return {
    bundle: bundle.sha256,
    record: JSON.stringify(record),
    tensors,
    sha256: digest,
    loss: run.losses.at(-1) ?? NaN,
    evaluation: run.evaluation,
  };
}

/** The stored results of a round: its update until it is sent, and the personal model. */
export class Results {
  private readonly update: Sealed;
  private readonly personal: Sealed;

  private constructor(folder: FileSystemDirectoryHandle) {
    this.update = new Sealed(folder, "update");
    this.personal = new Sealed(folder, "personal");
  }

  static async open(): Promise<Results> {
    const opened = new Results(await folderOf(FOLDER));
    await opened.personal.load();
    const kept = await opened.read();
    // If a tab was killed between the two writes of `keep`, the update has the newer model.
    if (kept !== null) await opened.personal.save(kept.personal);
    return opened;
  }

  /** Stores both the update and the new personal tensors, or neither. */
  async keep(update: Update, personal: Tensors): Promise<void> {
    const values = writeTensors(personal);
    const { tensors, ...rest } = update;
    await this.update.save(packed({ ...rest, personal: values.length }, values, tensors));
    await this.personal.save(values);
  }

  /** The update of the bundle `sha256` if it is stored, else null. */
  async trained(sha256: string): Promise<Update | null> {
    const kept = await this.read();
    return kept?.update.bundle === sha256 ? kept.update : null;
  }

  async personalTensors(): Promise<Tensors> {
    const content = await this.personal.load();
    return content === null ? new Map() : readAllTensors(content, "personal");
  }

  /**
   * The personal tensors and the statistics (buffers) of the same training; empty without a personal model.
   *
   * The personal model is trained with its own statistics. Those of the shared model fit it less.
   */
  async personalModel({ tensors }: Manifest): Promise<Tensors> {
    const kept = await this.read();
    const personal = await this.personalTensors();
    if (kept === null || personal.size === 0) return personal;
    const buffers = new Set(tensors.flatMap(({ role, name }) => (role === "buffer" ? [name] : [])));
    const own = [...readAllTensors(kept.update.tensors, "update")].filter(([name]) => buffers.has(name));
    return new Map([...personal, ...own]);
  }

  private async read(): Promise<{ update: Update; personal: Bytes } | null> {
    const content = await this.update.load();
    if (content === null) return null;
    const [head, parts] = unpacked<Omit<Update, "tensors"> & { personal: number }>(content);
    const { personal, ...rest } = head;
    return { update: { ...rest, tensors: parts.slice(personal) }, personal: parts.slice(0, personal) };
  }
}
