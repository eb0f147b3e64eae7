/**
 * Checks signatures. The description of a federation must be signed with the key of the link. Work must be signed with
 * the key of the coordinator that this page has joined, and must be recent.
 */

import { fromBase64, toBase64 } from "./base64.js";
import type { CoordinatorClient, ReleaseOffer, Work } from "./client.js";
import { Failure } from "./faults.js";
import type { EvaluationRequest, Invitation } from "./messages.js";
import type { Identity } from "./membership.js";
import { readTerms, termsLines } from "./secure_group.js";
import { checkNoise, isSecure, promiseSecureSums } from "./secure_promise.js";
import { isSigned } from "./signatures.js";
import type { Values } from "./storage.js";

/** The most characters of a line in which a federation describes itself. */
const LONGEST_LINE = 500;
const VALID_S = 24 * 3600;
const WITH_FINGERPRINT = /^(.+)\.([A-Za-z0-9_-]{22})$/;

/** Splits a join token into the part that is sent and the fingerprint of the coordinator's key. */
export function splitToken(given: string): [string, string | null] {
  const parts = WITH_FINGERPRINT.exec(given);
  return parts === null ? [given, null] : [parts[1]!, parts[2]!];
}

async function fingerprintOf(key: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", fromBase64(key) ?? new Uint8Array());
  const encoded = toBase64(new Uint8Array(digest, 0, 16));
  return encoded.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Checks the coordinator's key (base64) against `fingerprint` of the link, if there is one. */
export async function checkKey(client: CoordinatorClient, key: string, fingerprint: string | null): Promise<void> {
  if (key !== "" && (fingerprint === null || fingerprint === (await fingerprintOf(key)))) return;
  const followed = fingerprint === null ? null : await newKey(fingerprint, await client.keyChanges());
  if (key === "" || key !== followed) throw new Failure("trust.other-key", {});
}

/** The coordinator has replaced its key `old` by `new`, and signed that with the old key. */
export interface KeyChange {
  old: string;
  new: string;
  made: number;
  /** Until when devices and links with the old key may follow, in seconds since 1970. */
  until: number;
  signature: string;
}

/** The key that has replaced the key with this fingerprint; null if no change begins there. */
export async function newKey(fingerprint: string, changes: readonly KeyChange[]): Promise<string | null> {
  const byOld = new Map<string, KeyChange>();
  for (const change of changes) byOld.set(await fingerprintOf(change.old), change);
  let key: string | null = null;
  for (;;) {
    const change = byOld.get(fingerprint);
    if (change === undefined) return key;
    byOld.delete(fingerprint); // a circle of changes ends
    const lines = ["edgetailor-key-1", change.old, change.new, `${change.made}`, `${change.until}`];
    if (!(await isSigned(lines, change.old, change.signature))) throw new Failure("trust.forged-key", {});
    if (Date.now() / 1000 > change.until) throw new Failure("trust.late-key", {});
    key = change.new;
    fingerprint = await fingerprintOf(key);
  }
}

/** The coordinator's key in the stored identity. A new key is trusted if the old one has signed it. */
export class TrustedKey {
  constructor(
    private readonly client: CoordinatorClient,
    private readonly identity: Identity,
    private readonly values: Values,
  ) {}

  /**
   * Calls `check`, which checks a message, with the trusted key. If another key has signed the message, this asks
   * whether the coordinator has a new key, and checks again with that.
   */
  async check(check: (key: string) => Promise<void>): Promise<void> {
    try {
      await check(this.identity.key);
    } catch (error) {
      const forged = error instanceof Failure && /^trust\.forged-(work|release)$/.test(error.code);
      if (!forged || !(await this.follow())) throw error;
      await check(this.identity.key);
    }
  }

  private async follow(): Promise<boolean> {
    const key = await newKey(await fingerprintOf(this.identity.key), await this.client.keyChanges());
    if (key === null) return false;
    const stored = await this.values.get<Identity>("device");
    await this.values.put({ device: { ...(stored ?? this.identity), key } });
    this.identity.key = key;
    return true;
  }
}

export interface SignedInvitation extends Invitation {
  key: string;
  signature: string;
}

/** The signed line of a request for a federated evaluation; none without a request. */
function evaluationLines(asked: EvaluationRequest | null | undefined): string[] {
  if (!asked) return [];
  return [`evaluation ${Math.round(asked.share * 1e6)}${asked.by_class ? " by class" : ""}`];
}

/** Fetches and checks the invitation of a join token, which is the secret of `client`. */
export async function invited(client: CoordinatorClient, fingerprint: string | null): Promise<Invitation> {
  const signed = await client.invitation();
  await checkKey(client, signed.key, fingerprint);
  await checkInvitation(signed);
  const line = (given: unknown): string => (typeof given === "string" ? given.slice(0, LONGEST_LINE) : "");
  const number = (given: unknown): number => (Number.isFinite(given) ? Number(given) : 0);
  return {
    title: line(signed.title),
    purpose: line(signed.purpose),
    contact: line(signed.contact),
    rounds: number(signed.rounds),
    round_s: number(signed.round_s),
    first_bytes: number(signed.first_bytes),
    round_bytes: number(signed.round_bytes),
    evaluation: signed.evaluation ?? null,
    secure: readTerms(signed.secure),
  };
}

/** Checks that the key in the federation's description has signed it. */
async function checkInvitation(given: SignedInvitation): Promise<void> {
  const said = [given.title, given.purpose, given.contact];
  const numbers = [given.rounds, Math.trunc(given.round_s), given.first_bytes, given.round_bytes];
  const lines = ["edgetailor-invitation-1", ...said, ...numbers.map((number) => `${number}`)];
  lines.push(...evaluationLines(given.evaluation), ...termsLines(given.secure));
  if (!(await isSigned(lines, given.key, given.signature))) throw new Failure("trust.forged-invitation", {});
}

/** Checks the signature and the age of `work`, and stores its time. */
export async function checkWork(work: Work, key: string, values: Values): Promise<void> {
  const lines = ["edgetailor-work-1", `${work.issued}`, `${work.round}`, work.submodel];
  for (const { sha256, size, name } of work.files) lines.push(`${sha256} ${size} ${name}`);
  lines.push(...evaluationLines(work.evaluation));
  if (work.state === "judge") lines.push("judge");
  lines.push(...termsLines(work.secure));
  if (!(await isSigned(lines, key, work.signature))) {
    throw new Failure("trust.forged-work", {});
  }
  await checkStillSecure(work, values);
  const newest = (await values.get<number>("newest")) ?? 0;
  if (work.issued < newest || Math.abs(Date.now() / 1000 - work.issued) > VALID_S) {
    throw new Failure("trust.old-work", {});
  }
  await values.put({ newest: work.issued });
}

/**
 * Checks that the coordinator asks for no figures of this device alone if it has promised secure sums. Otherwise it could
 * end the protection without telling anybody.
 */
async function checkStillSecure({ state, secure }: Work, values: Values): Promise<void> {
  if (state === "judge" && (await isSecure(values))) throw new Failure("trust.single-figures", {});
  if (state !== "train") return;
  const terms = readTerms(secure);
  if (terms !== null) {
    await checkNoise(values, terms);
    return promiseSecureSums(values, terms);
  }
  if (await isSecure(values)) throw new Failure("trust.no-secure-sum", {});
}

/** Checks the signature of a release. `newest` is the time of the last offer that this page has followed. */
export async function checkRelease(offer: ReleaseOffer, key: string, newest: number): Promise<void> {
  const { number, round, back, issued } = offer;
  const lines = ["edgetailor-release-1", `${issued}`, `${number}`, `${round}`, back ? "back" : "forward"];
  for (const { sha256, size, name } of offer.files) lines.push(`${sha256} ${size} ${name}`);
  lines.push(...evaluationLines(offer.evaluation));
  // Phones do not fine-tune, but the signature covers it.
  if (offer.fine_tune) {
    lines.push(`fine-tune ${offer.fine_tune}`);
    for (const { sha256, size, name } of offer.training ?? []) lines.push(`${sha256} ${size} ${name}`);
  }
  if (!(await isSigned(lines, key, offer.signature))) throw new Failure("trust.forged-release", { number });
  if (issued < newest) throw new Failure("trust.old-release", { number });
}
