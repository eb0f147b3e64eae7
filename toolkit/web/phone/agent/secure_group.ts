/**
 * The devices of one attempt at a sum: who shares masks with whom, how many shares are needed, and the texts that are
 * signed. The rules are those of device_agent/privacy/secure_group.py and device_agent/formats/protocol/secure_sums.py.
 */

import { sha256 } from "@noble/hashes/sha2.js";
import { bytesToHex, utf8ToBytes } from "@noble/hashes/utils.js";
import { fromBase64 } from "./base64.js";
import { Failure } from "./faults.js";
import { isUsable } from "./masks.js";
import type { SecureTerms } from "./messages.js";
import { isSigned } from "./signatures.js";

/** No device takes part in a smaller sum: two devices would know each other's updates. */
export const FEWEST = 3;
/** Even, because each device has as many neighbours before it on the ring as after it. */
const MOST_NEIGHBOURS = 100;

/** The keys of a device for one attempt. */
export interface SecureKeys {
  /** SHA-256 of the manifest that was trained. */
  bundle: string;
  /** Public keys of X25519, in base64. */
  mask_key: string;
  share_key: string;
  /** By the key of the device's join. */
  signature: string;
}

export interface SecureMember {
  device: string;
  /** The public key of the device's join, in base64. */
  key: string;
  keys: SecureKeys;
}

/** What a sum is about. All devices of a group have signed it with their keys. */
export interface SumOf {
  round: number;
  bundle: string;
  terms: SecureTerms;
  /** The share of samples that devices keep apart to judge models. */
  apart: number;
}

const MOST_SAMPLES = 1e6;

/** Checks the terms that the coordinator has sent; null without secure sums. */
export function readTerms(given: unknown): SecureTerms | null {
  if (given === undefined || given === null) return null;
  const { fewest, most_change, most_samples, privacy = null } = given as SecureTerms;
  const isRight =
    Number.isSafeInteger(fewest) &&
    fewest >= FEWEST &&
    Number.isSafeInteger(most_samples) &&
    most_samples >= 1 &&
    most_samples <= MOST_SAMPLES &&
    isSize(most_change) &&
    (privacy === null || (isSize(privacy.clip) && isSize(privacy.noise_multiplier)));
  if (!isRight) throw new Failure("bundle.malformed", { where: "secure" });
  return { fewest, most_change, most_samples, privacy };
}

function isSize(value: unknown): boolean {
  return Number.isFinite(value) && Number(value) >= 1e-6 && Number(value) <= 1e6;
}

/** The signed line of `terms`; none without secure sums. */
export function termsLines(terms: SecureTerms | null | undefined): string[] {
  if (!terms) return [];
  const { fewest, most_change, most_samples, privacy } = terms;
  const noise = privacy ? [inMillionths(privacy.clip), inMillionths(privacy.noise_multiplier)] : [];
  return [["secure", fewest, inMillionths(most_change), most_samples, ...noise].join(" ")];
}

function inMillionths(value: number): number {
  return roundedToEven(value * 1e6);
}

/** The lines that a device signs in its SecureKeys. */
export function keysLines({ round, bundle, terms, apart }: SumOf, mask_key: string, share_key: string): string[] {
  const evaluation = `evaluation ${roundedToEven(apart * 1e6)}`;
  return ["edgetailor-secure-keys-1", `${round}`, bundle, ...termsLines(terms), evaluation, mask_key, share_key];
}

/** The lines that the coordinator signs for a group. */
export function groupLines(round: number, members: readonly SecureMember[]): string[] {
  const lines = ordered(members, ({ device }) => device).map(({ device, key, keys }) =>
    [device, key, keys.bundle, keys.mask_key, keys.share_key].join(" "),
  );
  return ["edgetailor-secure-group-1", `${round}`, ...lines];
}

/** The lines that a device signs to confirm which devices of a group have sent an update. */
export function presentLines(context: Uint8Array, present: readonly string[]): string[] {
  const digest = sha256(utf8ToBytes(sorted(present).map((device) => `${device}\n`).join("")));
  return ["edgetailor-secure-present-1", bytesToHex(context), bytesToHex(digest)];
}

/** How many of the `holders` of shares are needed to restore a secret: three fifths, and more than half. */
export function threshold(holders: number): number {
  return Math.max(Math.floor(holders / 2) + 1, Math.ceil((3 * holders) / 5));
}

export class SecureGroup {
  readonly members: ReadonlyMap<string, SecureMember>;
  /** A digest of the list of members, on which all keys and signatures of the attempt depend. */
  readonly context: Uint8Array;
  private readonly ring: string[];

  constructor(round: number, members: readonly SecureMember[]) {
    this.members = new Map(members.map((member) => [member.device, member]));
    this.context = sha256(utf8ToBytes(groupLines(round, members).map((line) => `${line}\n`).join("")));
    const place = (device: string): string => bytesToHex(sha256(new Uint8Array([...this.context, ...utf8ToBytes(device)])));
    this.ring = ordered([...this.members.keys()], place);
  }

  /** The devices with which `device` shares masks, sorted. */
  neighbours(device: string): string[] {
    const size = this.ring.length;
    const reach = Math.min(MOST_NEIGHBOURS, size - 1);
    if (reach === size - 1) return sorted(this.ring.filter((other) => other !== device));
    const place = this.ring.indexOf(device);
    const near = this.ring.filter((_, other) => {
      const steps = Math.abs(other - place);
      return steps > 0 && Math.min(steps, size - steps) <= reach / 2;
    });
    return sorted(near);
  }

  /** The devices that hold a share of the secrets of `device`. The position, from 1, is the point of the share. */
  holders(device: string): string[] {
    return sorted([...this.neighbours(device), device]);
  }

  /** How many shares are needed to restore a secret of `device`. */
  needed(device: string): number {
    return threshold(this.holders(device).length);
  }

  /** How many members must confirm the same list of devices before one of them unmasks. */
  get confirmations(): number {
    return threshold(this.members.size);
  }
}

/** Whether `member` offers usable keys, and has signed them for this sum. */
export async function hasOwnKeys({ key, keys }: SecureMember, sum: SumOf): Promise<boolean> {
  if (!(await isSigned(keysLines(sum, keys.mask_key, keys.share_key), key, keys.signature))) return false;
  return [keys.mask_key, keys.share_key].every((text) => {
    const bytes = fromBase64(text);
    return bytes !== null && isUsable(bytes);
  });
}

/** Whether `device` adds the mask that it shares with `neighbour`; otherwise it subtracts it. */
export function adds(device: string, neighbour: string): boolean {
  return inUtf8(device) < inUtf8(neighbour);
}

/** A text by which JavaScript orders as Python does: UTF-8 has the order of code points. */
function inUtf8(text: string): string {
  return bytesToHex(utf8ToBytes(text));
}

function sorted(texts: readonly string[]): string[] {
  return ordered(texts, (text) => text);
}

function ordered<T>(items: readonly T[], key: (item: T) => string): T[] {
  const keyed = items.map((item) => ({ item, key: inUtf8(key(item)) }));
  return keyed.sort((a, b) => (a.key < b.key ? -1 : Number(a.key > b.key))).map(({ item }) => item);
}

/** Rounds as Python does: a half to the even neighbour. */
export function roundedToEven(value: number): number {
  const below = Math.floor(value);
  const rest = value - below;
  return rest < 0.5 || (rest === 0.5 && below % 2 === 0) ? below : below + 1;
}
