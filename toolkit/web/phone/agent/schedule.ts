/**
 * Runs the schedule of a bundle, instruction by instruction, as a native agent does: the same
 * batches, the same seeds, the same order. A killed training continues from its last checkpoint
 * and gives the same update.
 */

import type { Bundle } from "./bundle.js";
import { EvaluatedRuns, LOSS } from "./evaluation.js";
import type { Counts } from "./evaluation_counts.js";
import { Failure } from "./faults.js";
import { heldOut } from "./held_out.js";
import type { LocalData } from "./local_data.js";
import { trainingOf, type Initialise, type Instruction, type Record_, type Train } from "./manifest.js";
import type { EvaluationRequest, Progress } from "./messages.js";
import { NumpyRandom, type RandomState } from "./numpy_random.js";
import { RowFile } from "./row_file.js";
import type { Session } from "./runtime.js";
import { batches } from "./signature_runs.js";
import { folderOf, names, packed, remove, sha256, Sealed, unpacked } from "./storage.js";
import { readAllTensors, writeTensors, type Tensor, type Tensors } from "./tensors.js";

const FOLDER = "training";
const CHECKPOINT = "checkpoint";
/** Time between checkpoints within an epoch. Phones end a tab more often than boards lose power. */
const CHECKPOINT_MS = 10_000;
const STATE = "state:";
const PERSONAL = "personal:";

interface Position {
  instruction: number;
  epoch: number;
  batch: number;
  steps: number;
  lossSum: number;
  lossCount: number;
  losses: number[];
  /** Complete recordings, by name. */
  recorded: string[];
  dropout: RandomState;
  /** Counts of the received model and of the trained one, if the federation asks for them. */
  before?: Counts;
  after?: Counts;
  /** Seconds that recordings and batches have taken. */
  spentS?: number;
  /** How many different samples were trained, if the time did not suffice for all. */
  samples?: number;
}

export interface Hooks {
  /** Called before each batch. The batch waits for it; an error ends the training. */
  beforeBatch: () => Promise<void>;
  onProgress: (progress: Progress) => void;
}

export class ScheduleRun extends EvaluatedRuns {
  private position: Position;
  private savedAt = performance.now();
  private readonly batchSeconds: number[] = [];

  private constructor(
    bundle: Bundle,
    data: LocalData,
    private readonly seed: number,
    private readonly folder: FileSystemDirectoryHandle,
    private readonly checkpoint: Sealed,
    private readonly key: string,
    personal: Tensors,
    private readonly asked: EvaluationRequest | null,
    private readonly budgetS: number | null,
    private readonly hooks: Hooks,
  ) {
    super(bundle, data, seed, personal, asked === null ? new Int32Array() : heldOut(data.samples, asked.share));
    this.position = {
      instruction: 0,
      epoch: 0,
      batch: 0,
      steps: 0,
      lossSum: 0,
      lossCount: 0,
      losses: [],
      recorded: [],
      dropout: this.dropout.save(),
    };
  }

  /**
   * Starts a training, or continues where a killed tab has stopped.
   *
   * @param asked What the federation asks for; null if devices do not judge its models.
   * @param budgetS The training ends after the batch in which it has computed for this many seconds.
   */
  static async open(
    bundle: Bundle,
    data: LocalData,
    seed: number,
    personal: Tensors,
    asked: EvaluationRequest | null,
    budgetS: number | null,
    hooks: Hooks,
  ): Promise<ScheduleRun> {
    const folder = await folderOf(FOLDER);
    const inputs = JSON.stringify([bundle.sha256, data.record.sha256, seed, ...(asked === null ? [] : [asked])]);
    const key = await sha256([new TextEncoder().encode(inputs), writeTensors(personal)]);
    const checkpoint = new Sealed(folder, CHECKPOINT);
    const run = new ScheduleRun(bundle, data, seed, folder, checkpoint, key, personal, asked, budgetS, hooks);
    await run.restore();
    return run;
  }

  /** The personal tensors and the tensors after the last instruction. */
  get tensors(): Tensors {
    return new Map([...this.personal, ...this.state]);
  }

  get steps(): number {
    return this.position.steps;
  }

  /** How many different samples were trained. */
  get samples(): number {
    return this.position.samples ?? this.trained.length;
  }

  get losses(): readonly number[] {
    return this.position.losses;
  }

  /** Durations of the training batches of this tab, in seconds. */
  get seconds(): readonly number[] {
    return this.batchSeconds;
  }

  /** The counts of the received model and of the trained one; null if nothing is kept apart. */
  get evaluation(): { before: Counts; after: Counts } | null {
    const { before, after } = this.position;
    return before === undefined || after === undefined ? null : { before, after };
  }

  /** Evaluates the received model, without training it; null if this device has too few samples. */
  async judgeOnly(): Promise<Counts | null> {
    if (this.asked === null || this.apart.length === 0) return null;
    for (const instruction of this.bundle.manifest.schedule) {
      if (instruction.do === "record") await this.record(instruction);
      this.position.batch = 0;
    }
    return this.judgeReceived(trainingOf(this.bundle.manifest), this.asked);
  }

  async finish(): Promise<void> {
    const { schedule } = this.bundle.manifest;
    while (this.position.instruction < schedule.length) {
      const instruction = schedule[this.position.instruction]!;
      await this.follow(instruction);
      this.position.instruction++;
      this.position.epoch = this.position.batch = 0;
      await this.save();
    }
  }

  /** Closes and removes the files of this training. */
  async remove(): Promise<void> {
    this.close();
    for (const name of await names(this.folder)) await remove(this.folder, name);
  }

  close(): void {
    for (const recording of this.recordings.values()) recording.close();
    this.recordings.clear();
  }

  private async follow(instruction: Instruction): Promise<void> {
    switch (instruction.do) {
      case "record":
        return this.record(instruction);
      case "initialise":
        return this.initialise(instruction);
      case "train":
        return this.train(instruction);
    }
  }

  /** Runs a frozen stage on all samples and stores its activations. */
  private async record({ signature: name, source, target, dtype }: Record_): Promise<void> {
    const signature = this.bundle.manifest.signatures[name]!;
    const port = signature.outputs[0]!;
    const shape = port.shape.slice(1) as number[];
    const parts = batches(this.data.samples, trainingOf(this.bundle.manifest).batch_size, null);
    const done = parts.slice(0, this.position.batch).reduce((sum, part) => sum + part.length, 0);
    const recording = await RowFile.open(this.folder, target, dtype, shape, done);
    const session = await this.open(name);
    try {
      for (const indices of parts.slice(this.position.batch)) {
        await this.hooks.beforeBatch();
        const begun = performance.now();
        const results = await session.run(this.feeds(signature, source, indices, {}));
        recording.append(results.get(port.name)!);
        this.spend((performance.now() - begun) / 1000);
        this.position.batch++;
        if (performance.now() - this.savedAt > CHECKPOINT_MS) {
          recording.flush();
          await this.save(target);
        }
      }
      recording.flush();
    } catch (error) {
      recording.close();
      throw error;
    } finally {
      await session.close();
    }
    this.state.clear();
    this.recordings.set(target, recording);
  }

  /** Computes the initial personal tensors, unless the device has those of an earlier round. */
  private async initialise({ signature: name, every_round }: Initialise): Promise<void> {
    const signature = this.bundle.manifest.signatures[name]!;
    const wanted = signature.outputs.map((port) => port.state!);
    if (!every_round && wanted.every((tensor) => this.personal.has(tensor))) return;
    await this.initialTensors(name);
    this.personal = new Map(wanted.map((tensor) => [tensor, this.state.get(tensor)!]));
    this.state.clear();
  }

  /** Trains. For a federated evaluation, the received model is judged before and the trained one after. */
  private async train(instruction: Train): Promise<void> {
    const asked = this.apart.length > 0 ? this.asked : null;
    if (asked !== null) this.position.before ??= await this.judgeReceived(instruction, asked);
    await this.trainEpochs(instruction);
    if (asked !== null) this.position.after = await this.judge(instruction, asked);
  }

  protected async beforeBatch(): Promise<void> {
    await this.hooks.beforeBatch();
  }

  private async trainEpochs(instruction: Train): Promise<void> {
    const sessions = new Map<string, Session>();
    try {
      for (const { signature } of instruction.steps) {
        if (!sessions.has(signature)) sessions.set(signature, await this.open(signature));
      }
      while (this.position.epoch < this.epochs(instruction) && this.hasTime()) {
        await this.epoch(instruction, sessions);
      }
    } finally {
      for (const session of sessions.values()) await session.close();
    }
  }

  private async epoch(instruction: Train, sessions: Map<string, Session>): Promise<void> {
    const at = this.position;
    const order = new NumpyRandom([this.seed, at.epoch]);
    const all = batches(this.trained.length, instruction.batch_size, order);
    const left = (instruction.batches ?? Infinity) - at.epoch * all.length;
    const parts = all.slice(0, left);
    while (at.batch < parts.length && this.hasTime()) {
      await this.hooks.beforeBatch();
      const begun = performance.now();
      const indices = parts[at.batch]!.map((index) => this.trained[index]!);
      const losses = await this.batch(instruction, sessions, indices);
      const seconds = (performance.now() - begun) / 1000;
      this.batchSeconds.push(seconds);
      this.spend(seconds);
      at.lossSum += losses.reduce((sum, loss) => sum + loss, 0);
      at.lossCount += losses.length;
      if (!Number.isFinite(at.lossSum)) {
        throw new Failure("update.diverged", {});
      }
      at.batch++;
      this.report(instruction, parts.length);
      if (performance.now() - this.savedAt > CHECKPOINT_MS) await this.save();
    }
    if (at.epoch === 0 && at.batch < parts.length) {
      at.samples = parts.slice(0, at.batch).reduce((sum, part) => sum + part.length, 0);
    }
    at.losses.push(at.lossCount > 0 ? at.lossSum / at.lossCount : NaN);
    at.lossSum = at.lossCount = at.batch = 0;
    at.epoch++;
    if (at.epoch < this.epochs(instruction)) await this.save();
  }

  /** Whether another batch may begin. The first always may. */
  private hasTime(): boolean {
    const { steps, spentS } = this.position;
    return this.budgetS === null || steps === 0 || (spentS ?? 0) < this.budgetS;
  }

  private spend(seconds: number): void {
    this.position.spentS = (this.position.spentS ?? 0) + seconds;
  }

  /** The number of epochs. The last one may end early, see `Train`. */
  private epochs({ epochs, batches: most, batch_size }: Train): number {
    const each = batches(this.trained.length, batch_size, null).length;
    return Math.min(epochs, Math.ceil((most ?? Infinity) / each));
  }

  private async batch(
    instruction: Train,
    sessions: Map<string, Session>,
    indices: Int32Array,
  ): Promise<number[]> {
    const losses = [];
    for (const step of instruction.steps) {
      const signature = this.bundle.manifest.signatures[step.signature]!;
      for (let run = 0; run < step.times; run++) {
        const feeds = this.feeds(signature, instruction.source, indices, step.inputs);
        const results = await sessions.get(step.signature)!.run(feeds);
        this.replace(signature, results);
        const loss = results.get(LOSS);
        if (loss !== undefined) losses.push(Number(loss.data[0]));
      }
    }
    this.position.steps++;
    return losses;
  }

  private report(instruction: Train, count: number): void {
    const { epoch, batch, losses } = this.position;
    const sorted = [...this.batchSeconds].sort((a, b) => a - b);
    this.hooks.onProgress({
      epoch: epoch + 1,
      epochs: this.epochs(instruction),
      batch,
      batches: count,
      loss: losses.at(-1) ?? null,
      batchSeconds: sorted[sorted.length >> 1] ?? null,
    });
  }

  /** Saves a checkpoint. `recording` is the file that is being recorded. */
  private async save(recording: string | null = null): Promise<void> {
    const needed = this.sourcesFrom(this.position.instruction);
    for (const [name, recording] of this.recordings) {
      if (needed.has(name)) continue;
      recording.close();
      this.recordings.delete(name);
    }
    this.position.recorded = [...this.recordings.keys()];
    this.position.dropout = this.dropout.save();
    // Frozen tensors never change: a continued training reads them from the bundle.
    const frozen = new Set(
      this.bundle.manifest.tensors.flatMap((e) => (e.role === "frozen" ? [e.name] : [])),
    );
    const kept: Tensors = new Map();
    // A recording stage only reads its tensors, so they need not be saved.
    const state = recording === null ? this.state : new Map<string, Tensor>();
    for (const [name, tensor] of state) if (!frozen.has(name)) kept.set(STATE + name, tensor);
    for (const [name, tensor] of this.personal) kept.set(PERSONAL + name, tensor);
    await this.checkpoint.save(packed({ key: this.key, position: this.position }, writeTensors(kept)));
    this.savedAt = performance.now();
    // Remove files only now: the checkpoint before this one still refers to older recordings.
    const copies = [`${CHECKPOINT}.0`, `${CHECKPOINT}.1`];
    const used = new Set([...this.position.recorded, ...copies, recording]);
    for (const name of await names(this.folder)) if (!used.has(name)) await remove(this.folder, name);
  }

  private async restore(): Promise<void> {
    const content = await this.checkpoint.load();
    if (content === null) return;
    const [head, tensors] = unpacked<{ key: string; position: Position }>(content);
    if (head.key !== this.key) return;
    try {
      for (const target of head.position.recorded) await this.reopen(target);
    } catch (error) {
      // The browser has removed a recording, so record everything again.
      if (!(error instanceof DOMException && error.name === "NotFoundError")) throw error;
      this.close();
      return;
    }
    this.position = head.position;
    this.dropout = NumpyRandom.from(head.position.dropout);
    this.personal = new Map(this.personal);
    for (const [name, tensor] of readAllTensors(tensors, CHECKPOINT)) {
      if (name.startsWith(STATE)) this.state.set(name.slice(STATE.length), tensor);
      else this.personal.set(name.slice(PERSONAL.length), tensor);
    }
  }

  private async reopen(target: string): Promise<void> {
    const { schedule, signatures } = this.bundle.manifest;
    const instruction = schedule.find((entry) => entry.do === "record" && entry.target === target) as Record_;
    const port = signatures[instruction.signature]!.outputs[0]!;
    const shape = port.shape.slice(1) as number[];
    const rows = this.data.samples;
    this.recordings.set(target, await RowFile.open(this.folder, target, instruction.dtype, shape, rows));
  }

  /** The data sets that the instruction `from` and later ones read. */
  private sourcesFrom(from: number): Set<string> {
    const rest = this.bundle.manifest.schedule.slice(from);
    return new Set(rest.flatMap((instruction) => (instruction.do === "initialise" ? [] : [instruction.source])));
  }
}
