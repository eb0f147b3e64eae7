/** Runs the rounds of a device that has joined: downloads, trains and sends until the last round. */

import { fetchBundle, type Bundle } from "./bundle.js";
import { LONGEST_ASKED_MS, Refusal, type CoordinatorClient, type Work } from "./client.js";
import { DeviceSecret } from "./device_secret.js";
import { ENGLISH_FAULTS } from "../texts/english_faults.js";
import { rightOf } from "./evaluation.js";
import { finiteCounts } from "./evaluation_counts.js";
import { Failure, problemOf, sentenceOf } from "./faults.js";
import { farOff, summaryOf } from "./input_summary.js";
import { LocalData, type DataRecord } from "./local_data.js";
import { formOf, isPersonal, MANIFEST } from "./manifest.js";
import { readSigner, type Identity } from "./membership.js";
import type { EvaluationRequest, Prediction, Problem, View } from "./messages.js";
import { modelsOf, TRAINED, type StoredBundle } from "./model_in_use.js";
import { predicted } from "./prediction.js";
import { Releases } from "./releases.js";
import { Stopped } from "./requests.js";
import { textOf, type SampleForm } from "./sample_form.js";
import { ScheduleRun } from "./schedule.js";
import { isUsedUp, maskedUpdates } from "./secure_promise.js";
import { SecureSending } from "./secure_sending.js";
import { ROUND_CHECK_MS, Stages } from "./stages.js";
import type { Values } from "./storage.js";
import { checkWork, TrustedKey } from "./trust.js";
import { Results, updateOf, type Update } from "./update.js";

const SHORTEST_POLL_MS = 250;
const LONGEST_POLL_MS = 2000;
/** How often a page asks for a release after the last round, if the coordinator does not say it. */
const RELEASE_CHECK_MS = 3_600_000;
const LONGEST_RELEASE_MS = 24 * 3_600_000;
/** Each wait is up to this share longer or shorter, so that not all devices ask at the same time. */
const JITTER = 0.2;
const MOST_FAILURES = 3;
/** ROUND_SEEDS of device_agent/training/batching.py. */
const ROUND_SEEDS = 100003;
/** These failures are not retried: the same weights and order would give them again. */
const DIVERGED = ["update.diverged", "update.not-finite"];
const LONGEST_REASON = 500;
/** The name of a stored value: whether the coordinator has said that the last round is over. */
export const FINISHED = "finished";
/** The same: whether the owner agrees to counts of each class. */
export const BY_CLASS = "byClass";
/** Quoted text in a message, which may be a cell of the owner's data. */
const QUOTED = /“[^”]*”|'[^']*'/g;

class RoundClosed extends Error {}

export class Rounds {
  readonly stages: Stages;
  private checkedAt = performance.now();
  private failures = 0;
  /** The round that this device works on; 0 while it waits. */
  private round = 0;
  /** The offer whose training has failed, which is skipped. A round may open again with another model. */
  private skipped = "";
  /** The failure that the owner sees until this device trains again or the round is over. */
  private failure: { round: number; problem: Problem } | null = null;
  private trainedSeconds = 0;
  private readonly key: TrustedKey;
  private readonly secret: DeviceSecret;
  private readonly releases: Releases;

  constructor(
    private readonly client: CoordinatorClient,
    private readonly identity: Identity,
    private readonly values: Values,
    private readonly results: Results,
    private readonly show: (change: Partial<View>) => void,
  ) {
    this.stages = new Stages(client, show);
    client.permitted = () => this.stages.whilePaused();
    this.secret = new DeviceSecret(client, identity, values);
    this.key = new TrustedKey(client, identity, values);
    this.releases = new Releases(client, this.key, values);
  }

  /** Takes part until the coordinator says that the last round is over, or an error ends it. */
  async run(): Promise<void> {
    try {
      await this.allRounds();
    } catch (error) {
      const unknown = error instanceof Refusal && error.unknown;
      if (!(error instanceof Stopped || unknown)) await this.tell(problemOf(error));
      throw error;
    }
  }

  /** Tells the coordinator why this device stops, without quotes from the owner's data. */
  private async tell({ code, fault }: Problem): Promise<void> {
    const said = sentenceOf(fault, ENGLISH_FAULTS).slice(0, LONGEST_REASON);
    const reason = code.startsWith("data.") ? said.replace(QUOTED, "'...'") : said;
    await this.client.stopped({ code, reason, round: this.round });
  }

  private async allRounds(): Promise<void> {
    let poll = SHORTEST_POLL_MS;
    this.stages.over = (await this.values.get<boolean>(FINISHED)) === true;
    if (this.stages.over) await this.secret.settle();
    for (;;) {
      // After the end, the coordinator may be gone for ever: that is no problem.
      const work = this.stages.over ? await this.client.peek() : await this.secret.work();
      if (work === null) {
        await this.stages.rest(jittered(RELEASE_CHECK_MS));
        continue;
      }
      if (work.new_secret) await this.secret.renew(work.new_secret);
      await this.setOver(work.state === "finished");
      const { round, joined, expected } = work;
      // Before a round opens again, the coordinator sends the number of the earlier round.
      if (this.failure !== null && round > this.failure.round) this.failure = null;
      if (!this.stages.over) this.show({ round, joined, expected });
      const toDo = (work.state === "train" || work.state === "judge") && offerOf(work) !== this.skipped;
      if (!toDo) {
        if (!this.stages.over) this.stages.wait();
        if (work.state !== "train" && (await this.releases.follow(work.release ?? null))) await this.showModel();
      }
      this.show({ problem: this.failure?.problem ?? this.releases.problem });
      const asked = 1000 * Math.max(work.ask_again_s ?? 0, 0);
      if (toDo) {
        this.round = work.round;
        await (work.state === "judge" ? this.judge(work) : this.takePart(work));
        this.round = 0;
        poll = SHORTEST_POLL_MS;
      } else if (this.stages.over) {
        if (asked === 0) return;
        await this.stages.rest(jittered(Math.min(asked, LONGEST_RELEASE_MS)));
      } else {
        await this.stages.rest(jittered(Math.min(asked, LONGEST_ASKED_MS) || poll));
        poll = Math.min(2 * poll, LONGEST_POLL_MS);
      }
    }
  }

  /** Stores and shows whether the last round is over. More rounds may come after it. */
  private async setOver(over: boolean): Promise<void> {
    if (over !== this.stages.over) await this.values.put({ [FINISHED]: over || null });
    this.stages.over = over;
    if (over) this.show({ stage: "finished", training: null });
  }

  private async takePart(work: Work): Promise<void> {
    await this.key.check((key) => checkWork(work, key, this.values));
    try {
      await this.stages.enter("downloading");
      const bundle = await fetchBundle(this.client, work.files, this.values);
      this.show({ bytesDown: this.client.bytesDown });
      const update = (await this.unsent(bundle)) ?? (await this.train(work, bundle));
      const personal = isPersonal(bundle.manifest);
      const right = rightOf(personal ? update.evaluation?.after : update.evaluation?.before);
      await this.offer({ round: work.round, files: work.files, personal, right });
      await this.send(work, bundle, update);
    } catch (error) {
      if (error instanceof Failure && error.code.startsWith("trust.")) return this.leaveSum(work.round, error.problem);
      if (error instanceof RoundClosed || (error instanceof Refusal && error.roundOver)) return;
      throw error;
    }
  }

  /** The update of `bundle` that was trained before this page was opened, and not sent yet. */
  private async unsent(bundle: Bundle): Promise<Update | null> {
    const update = await this.results.trained(bundle.sha256);
    return update !== null && (await isUsedUp(this.values, update.sha256)) ? null : update;
  }

  /** Says why this device has left the secure sum of a round. The rounds go on. */
  private async leaveSum(round: number, problem: Problem): Promise<void> {
    this.failure = { round, problem };
    this.show({ problem });
    await this.client.progress("paused", null, sentenceOf(problem.fault, ENGLISH_FAULTS).slice(0, LONGEST_REASON));
    await this.stages.rest(jittered(LONGEST_POLL_MS));
  }

  /** Evaluates the new model of a round, and sends the counts. Skips it if that fails. */
  private async judge(work: Work): Promise<void> {
    await this.key.check((key) => checkWork(work, key, this.values));
    try {
      await this.stages.enter("downloading");
      const bundle = await fetchBundle(this.client, work.files, this.values);
      await this.stages.enter("evaluating");
      const asked = await this.agreed(work);
      const counts = await this.withData(bundle, async (data) => {
        const hooks = { beforeBatch: () => this.stages.whilePaused(), onProgress: () => undefined };
        const run = await ScheduleRun.open(bundle, data, work.round, new Map(), asked, null, hooks);
        return run.judgeOnly().finally(() => run.remove());
      });
      if (counts !== null) {
        const model = { round: work.round, files: work.files, personal: false, last: true, right: rightOf(counts) };
        if (!isPersonal(bundle.manifest) && !work.candidate) await this.offer(model);
        return await this.client.sendJudgement(work.round, { bundle: bundle.sha256, counts: finiteCounts(counts) });
      }
    } catch (error) {
      if (error instanceof Stopped || (error instanceof Refusal && error.unknown)) throw error;
    }
    this.skipped = offerOf(work);
  }

  /** What the federation asks for in an evaluation, as far as the owner agrees. */
  private async agreed({ evaluation }: Work): Promise<EvaluationRequest | null> {
    if (!evaluation) return null;
    this.show({ evaluation });
    return { ...evaluation, by_class: evaluation.by_class && (await this.values.get(BY_CLASS)) === true };
  }

  /** From here on, the owner can try the model of this round. */
  private async offer(model: StoredBundle): Promise<void> {
    await this.values.put({ [TRAINED]: model });
    await this.showModel();
  }

  private async showModel(): Promise<void> {
    this.show({ ...(await modelsOf(this.values)), bytesDown: this.client.bytesDown });
  }

  private async train(work: Work, bundle: Bundle): Promise<Update> {
    await this.stages.enter("training");
    this.failure = null;
    this.show({ problem: null });
    return this.withData(bundle, (data) => this.trainOn(data, work, bundle));
  }

  private async withData<T>(bundle: Bundle, use: (data: LocalData) => Promise<T>): Promise<T> {
    const record = await this.values.get<DataRecord>("data");
    if (record === null) throw new Failure("data.missing", {});
    await this.checkForm(record, formOf(bundle.manifest));
    const data = await LocalData.open(record, bundle.manifest);
    return use(data).finally(() => data.close());
  }

  private async trainOn(data: LocalData, work: Work, bundle: Bundle): Promise<Update> {
    this.checkedAt = performance.now();
    const begun = this.stages.unpausedMs();
    const spent = (): number => this.trainedSeconds + (this.stages.unpausedMs() - begun) / 1000;
    const personal = await this.results.personalTensors();
    let run: ScheduleRun | null = null;
    try {
      // With tiny budgets for all other devices, a secure sum would almost be the update of this device.
      const budget = work.secure ? null : (work.budget_s ?? null);
      // A training that is repeated has another seed, so that its update is another.
      const seed = ROUND_SEEDS * (await maskedUpdates(this.values, work.round)) + work.round;
      run = await ScheduleRun.open(bundle, data, seed, personal, await this.agreed(work), budget, {
        beforeBatch: () => this.betweenBatches(work.round),
        onProgress: (training) => this.show({ training, trainedSeconds: spent() }),
      });
      const before = await predicted(bundle, data, personal);
      await run.finish();
      await this.compare(work.round, before, await predicted(bundle, data, run.tensors));
      const inputs = work.inputs ? summaryOf(data.x) : null;
      this.show({ farOff: inputs && work.inputs ? farOff(inputs, work.inputs) : null });
      const update = await updateOf(bundle, run, inputs);
      const kept = bundle.manifest.tensors.filter((entry) => entry.role === "personal");
      const values = new Map(kept.map(({ name }) => [name, run!.state.get(name)!]));
      await this.results.keep(update, values);
      await run.remove();
      this.failures = 0;
      return update;
    } catch (error) {
      run?.close();
      return await this.failed(work, error);
    } finally {
      this.trainedSeconds = spent();
      this.show({ trainedSeconds: this.trainedSeconds });
    }
  }

  private async compare(round: number, before: Prediction | null, after: Prediction | null): Promise<void> {
    if (before === null || after === null) return;
    const predictions = { round, before, after };
    await this.values.put({ predictions });
    this.show({ predictions });
  }

  /** Checks that samples were prepared in the federation's form, which may have changed. */
  private async checkForm(record: DataRecord, form: SampleForm): Promise<void> {
    if (record.form === null || record.form === textOf(form)) return;
    await this.values.put({ device: { ...this.identity, ...form } });
    this.show({ preprocessing: form.preprocessing });
    throw new Failure("data.other-preparation", {});
  }

  /** Repeats a failed training. After three failures, or if it diverged, reports it. */
  private async failed(work: Work, error: unknown): Promise<never> {
    if (error instanceof RoundClosed || error instanceof Stopped) throw error;
    const problem = problemOf(error);
    if (problem.code.startsWith("data.") || problem.code.startsWith("storage.")) throw error;
    this.failures++;
    this.show({ problem });
    if (this.failures < MOST_FAILURES && !DIVERGED.includes(problem.code)) {
      await this.stages.rest(1000 * 2 ** this.failures);
      throw new RoundClosed();
    }
    this.skipped = offerOf(work);
    this.failure = { round: work.round, problem };
    await this.client.reportFailure({
      submodel: work.submodel,
      failures: this.failures,
      reason: sentenceOf(problem.fault, ENGLISH_FAULTS).slice(0, LONGEST_REASON),
      round: work.round,
      code: problem.code,
    });
    this.failures = 0;
    throw new RoundClosed();
  }

  private async send(work: Work, bundle: Bundle, update: Update): Promise<void> {
    const { round, secure } = work;
    this.show({ training: null });
    await this.stages.enter("uploading");
    if (secure) {
      this.show({ secure });
      const rest = (milliseconds: number): Promise<void> => this.stages.rest(jittered(milliseconds));
      const signer = await readSigner(this.identity, this.values);
      const sending = new SecureSending(this.client, signer, this.key, this.values, rest, bundle, update);
      if (!(await sending.add(work, secure))) return;
    } else {
      await this.client.sendTensors(round, update.tensors, update.sha256);
      await this.client.sendUpdate(round, update.record);
    }
    this.failure = null;
    const losses = (await this.values.get<View["losses"]>("losses")) ?? [];
    const more = [...losses.filter((earlier) => earlier.round !== round), { round, loss: update.loss }];
    await this.values.put({ losses: more });
    this.show({ losses: more, bytesUp: this.client.bytesUp });
  }

  private async betweenBatches(round: number): Promise<void> {
    await this.stages.whilePaused();
    if (performance.now() - this.checkedAt < ROUND_CHECK_MS) return;
    this.checkedAt = performance.now();
    const work = await this.client.peek();
    // An earlier round means that a restarted coordinator has not opened this one again yet.
    if (work === null || work.round < round) return;
    if (work.round > round || work.state !== "train") throw new RoundClosed();
  }

}

function jittered(milliseconds: number): number {
  return milliseconds * (1 - JITTER + 2 * JITTER * Math.random());
}

/** A text that identifies the training of `work`. */
function offerOf(work: Work): string {
  return `${work.round} ${work.files.find(({ name }) => name === MANIFEST)?.sha256}`;
}
