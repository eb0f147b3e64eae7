/**
 * Follows the coordinator's offers of releases while this device has nothing to train, by the rules of
 * device_agent/federation/releases/releases.py and release_outcomes.py.
 */

import { bytesToFetch, fetchBundle, isWhole, openStored, removeOthers, type Bundle } from "./bundle.js";
import { Refusal, type CoordinatorClient, type FileOffer, type ReleaseOffer } from "./client.js";
import type { Body } from "./disclosure.js";
import { rightOf } from "./evaluation.js";
import { Failure, problemOf, sentenceOf } from "./faults.js";
import type { DataRecord } from "./local_data.js";
import { MANIFEST } from "./manifest.js";
import type { Problem, Right } from "./messages.js";
import { modelToCompare, releasePointer, writePointer, type InstalledRelease, type ReleasePointer } from "./model_in_use.js";
import { tryRelease, type TrialResult } from "./release_trial.js";
import { Stopped } from "./requests.js";
import { countsOf } from "./scores.js";
import { isSecure } from "./secure_promise.js";
import type { Values } from "./storage.js";
import { outOfMemory } from "./trial.js";
import { checkRelease, type TrustedKey } from "./trust.js";
import { ENGLISH_FAULTS } from "../texts/english_faults.js";

/** How long a file of a release is tried. Rounds must not wait for it. */
const PATIENCE_MS = 60_000;
/** When a release is tried again that could not be fetched, or found no room or memory. */
const AGAIN_MS = 3_600_000;
const MOST_REFUSED = 20;
const LONGEST_REASON = 500;
const WORSE = "worse on the samples of this device";

type Report = Body<"POST /releases/{number}">;

export class Releases {
  /** Why the last offer was ignored; null if it was not. */
  problem: Problem | null = null;
  private readonly postponed = new Map<string, number>();
  private unsent: Report | null = null;
  private verified = "";

  constructor(
    private readonly client: CoordinatorClient,
    private readonly key: TrustedKey,
    private readonly values: Values,
  ) {}

  /**
   * Does what `offer` asks for, unless it is done already, and reports it.
   *
   * Nothing that goes wrong here stops the rounds: it is tried again later.
   *
   * @returns Whether the model in use may have changed.
   */
  async follow(offer: ReleaseOffer | null): Promise<boolean> {
    this.problem = null;
    const pointer = await releasePointer(this.values);
    this.unsent ??= pointer.unsent;
    const changes = offer !== null && !(await this.isAnswered(offer, pointer));
    if (changes) await this.answer(offer, pointer);
    const due = this.unsent !== null && (await isSecure(this.values)) ? withoutFigures(this.unsent) : this.unsent;
    if (due !== null && (await this.client.reportRelease(due))) {
      this.unsent = null;
      const written = await releasePointer(this.values);
      if (written.unsent !== null) await writePointer({ ...written, unsent: null }, this.values);
    }
    return changes;
  }

  private async answer(offer: ReleaseOffer, pointer: ReleasePointer): Promise<void> {
    try {
      await this.key.check((key) => checkRelease(offer, key, pointer.issued));
      await this.install(offer, pointer);
    } catch (error) {
      if (error instanceof Stopped || (error instanceof Refusal && error.unknown)) throw error;
      const problem = problemOf(outOfMemory(error));
      if (problem.code.startsWith("trust.")) this.problem = problem;
      else if (problem.code.startsWith("bundle.") || problem.code === "release.no-inference-bundle") {
        await this.refuse(offer, pointer, problem, null);
      } else await this.postpone(offer, pointer, problem);
    }
  }

  /** Whether this device has done what `offer` asks for, or will later. */
  private async isAnswered(offer: ReleaseOffer, { current, refused }: ReleasePointer): Promise<boolean> {
    const bundle = manifestOf(offer.files);
    if (isSame(offer, current)) return this.verify(current);
    // An offer of an earlier release: the operator has not asked to go back.
    if (current !== null && offer.number < current.release.number && !offer.back) return true;
    const wasRefused = refused.some((earlier) => isRefused(offer, earlier)) && !goesBack(offer, current);
    return wasRefused || performance.now() < (this.postponed.get(bundle) ?? 0);
  }

  /** Whether the current release is whole. Its files are read once in the life of this page. */
  private async verify(current: InstalledRelease | null): Promise<boolean> {
    if (current !== null && this.verified !== current.bundle) {
      if (!(await isWhole(current, this.values))) return false;
      this.verified = current.bundle;
    }
    return true;
  }

  /** Fetches and tries the offered release, and switches to it unless it is worse. */
  private async install(offer: ReleaseOffer, pointer: ReleasePointer): Promise<void> {
    const { current, refused } = pointer;
    if (offer.number === 0) return this.switchTo(null, offer, pointer, report(offer, pointer, null, null));
    if (refused.some((earlier) => isRefused(offer, earlier))) return this.leaveWithdrawn(offer, pointer);
    const bundle = await this.fetch(offer);
    let trial: TrialResult | null = null;
    // A model may be released again.
    if (!goesBack(offer, current) && current?.bundle !== manifestOf(offer.files)) {
      trial = await this.try(offer, bundle);
      if (trial.reason !== null) {
        const { problem } = new Failure("release.worse", { reason: trial.reason });
        return this.refuse(offer, pointer, problem, trial);
      }
    }
    const kept = [current, pointer.previous].find((held) => held !== null && isSame(offer, held));
    const right = trial?.after ? rightOf(countsOf(trial.after)) : (kept?.right ?? null);
    await this.switchTo(installed(offer, right, kept ?? null), offer, pointer, report(offer, pointer, null, trial));
  }

  private async try(offer: ReleaseOffer, offered: Bundle): Promise<TrialResult> {
    const compared = await modelToCompare(this.values);
    const present = compared && (await openStored(compared, this.values).catch(() => null));
    const data = await this.values.get<DataRecord>("data");
    return tryRelease(offered, present, data, offer.evaluation?.share ?? null);
  }

  /** Predicts with `release` from now on: one write. */
  private async switchTo(
    release: InstalledRelease | null,
    offer: ReleaseOffer,
    pointer: ReleasePointer,
    unsent: Report,
  ): Promise<void> {
    const { current } = pointer;
    let { previous } = pointer;
    if (offer.back) previous = null;
    else if (current !== null && release !== null && current.bundle !== release.bundle) previous = current;
    await this.write({ ...pointer, current: release, previous, issued: offer.issued, unsent });
  }

  /** Leaves a withdrawn release, but not for `offer`, which this device has refused before. */
  private async leaveWithdrawn(offer: ReleaseOffer, pointer: ReleasePointer): Promise<void> {
    const { previous } = pointer;
    const earlier = previous !== null && previous.release.number > offer.number ? null : previous; // withdrawn, too
    const { problem } = new Failure("release.worse", { reason: "this device has refused it before" });
    const unsent = { ...report(offer, pointer, problem, null), runs: earlier?.release.number ?? 0 };
    await this.switchTo(earlier, offer, pointer, unsent);
  }

  /** Does not take the offered release, also not when the page is opened again. */
  private async refuse(
    offer: ReleaseOffer,
    pointer: ReleasePointer,
    problem: Problem,
    trial: TrialResult | null,
  ): Promise<void> {
    const { number, round, files, issued } = offer;
    const refused = [...pointer.refused, { number, round, bundle: manifestOf(files) }].slice(-MOST_REFUSED);
    await this.write({ ...pointer, refused, issued, unsent: report(offer, pointer, problem, trial) });
  }

  /** Tries the offered release again later. */
  private async postpone(offer: ReleaseOffer, pointer: ReleasePointer, problem: Problem): Promise<void> {
    this.postponed.set(manifestOf(offer.files), performance.now() + AGAIN_MS);
    this.unsent = report(offer, pointer, problem, null);
    // What was downloaded must not fill the storage.
    if (["release.no-room", "storage.disk-full"].includes(problem.code)) await removeOthers([], this.values);
  }

  private async fetch(offer: ReleaseOffer): Promise<Bundle> {
    // Older browsers do not say how much they store.
    const { quota, usage }: StorageEstimate = (await navigator.storage.estimate?.()) ?? {};
    await removeOthers(offer.files, this.values);
    const [needed, free] = [await bytesToFetch(offer.files, this.values), (quota ?? Infinity) - (usage ?? 0)];
    if (needed > free) throw new Failure("release.no-room", { needed, free });
    return fetchBundle(this.client, offer.files, this.values, PATIENCE_MS);
  }

  private async write(pointer: ReleasePointer): Promise<void> {
    await writePointer(pointer, this.values);
    this.unsent = pointer.unsent;
    await removeOthers([], this.values);
  }
}

/** Whether this device has a later release than the offered one, and it was withdrawn. */
function goesBack(offer: ReleaseOffer, current: InstalledRelease | null): boolean {
  return offer.back && (current?.release.number ?? 0) > offer.number;
}

function isSame(offer: ReleaseOffer, held: InstalledRelease | null): boolean {
  if (held === null || offer.number === 0) return held === null && offer.number === 0;
  return isRefused(offer, { number: held.release.number, round: held.round, bundle: held.bundle });
}

function isRefused({ number, round, files }: ReleaseOffer, held: ReleasePointer["refused"][number]): boolean {
  return held.number === number && held.round === round && held.bundle === manifestOf(files);
}

function installed(offer: ReleaseOffer, right: Right, kept: InstalledRelease | null): InstalledRelease {
  const { number, round, files, issued } = offer;
  const release = kept?.release ?? { number, issued };
  return { round, files, personal: false, right, release, bundle: manifestOf(files) };
}

/** The report about `offer`, after a trial or a problem. */
function report(
  offer: ReleaseOffer,
  { current }: ReleasePointer,
  problem: Problem | null,
  trial: TrialResult | null,
): Report {
  const asked = offer.evaluation ? trial : null;
  return {
    number: offer.number,
    bundle: manifestOf(offer.files),
    taken: problem === null,
    runs: problem === null ? offer.number : (current?.release.number ?? 0),
    code: problem?.code ?? "",
    reason: problem === null ? "" : sentenceOf(problem.fault, ENGLISH_FAULTS).slice(0, LONGEST_REASON),
    before: asked?.before ? countsOf(asked.before) : null,
    after: asked?.after ? countsOf(asked.after) : null,
  };
}

/** The report without counts, and without a reason that is made of them. */
function withoutFigures(report: Report): Report {
  const reason = report.code === "release.worse" ? WORSE : report.reason;
  return { ...report, before: null, after: null, reason };
}

function manifestOf(files: readonly FileOffer[]): string {
  return files.find(({ name }) => name === MANIFEST)?.sha256 ?? "";
}
