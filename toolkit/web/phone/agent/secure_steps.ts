/** The steps of a secure sum, read from the answers of the coordinator (SecureStep of device_agent/formats/protocol). */

import type { SecureMember } from "./secure_group.js";

const STEPS = ["wait", "shares", "input", "confirm", "unmask", "over", "again"] as const;
const LONGEST_BASE64 = 400;
const HASH = /^[0-9a-f]{64}$/;
/** It has no spaces and line breaks, which separate ids in texts that are signed. */
const IDENTIFIER = /^[^\s\p{Cs}]{1,100}$/u;

export interface SecureStep {
  step: (typeof STEPS)[number];
  /** How soon a device that waits asks again, in seconds. */
  askAgainS: number;
  members: SecureMember[];
  /** The coordinator's signature of the group. */
  signature: string;
  /** The shares that the neighbours have sent, by sender. */
  shares: Map<string, string>;
  /** The devices whose updates have come. */
  present: string[];
  /** The signatures of `present`, by device. */
  confirmations: Map<string, string>;
}

/** Reads a step; null if the answer is not one. */
export function readStep(answer: unknown): SecureStep | null {
  if (!isObject(answer)) return null;
  const { step, ask_again_s = 0, members = [], signature = "", shares = {}, present = [], confirmations = {} } = answer;
  const isStep = (STEPS as readonly unknown[]).includes(step) && typeof ask_again_s === "number";
  const isGroup = Array.isArray(members) && members.every(isMember) && isBase64(signature);
  const isSum = Array.isArray(present) && present.every(isIdentifier);
  if (!isStep || !isGroup || !isSum || !isByDevice(shares) || !isByDevice(confirmations)) return null;
  return {
    step: step as SecureStep["step"],
    askAgainS: ask_again_s,
    members,
    signature,
    shares: new Map(Object.entries(shares)),
    present,
    confirmations: new Map(Object.entries(confirmations)),
  };
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null;
}

function isIdentifier(value: unknown): value is string {
  return typeof value === "string" && IDENTIFIER.test(value);
}

function isBase64(value: unknown): value is string {
  return typeof value === "string" && value.length <= LONGEST_BASE64;
}

function isByDevice(value: unknown): value is Record<string, string> {
  return isObject(value) && Object.entries(value).every(([device, text]) => isIdentifier(device) && isBase64(text));
}

function isMember(value: unknown): value is SecureMember {
  if (!isObject(value) || !isIdentifier(value.device) || !isBase64(value.key) || !isObject(value.keys)) return false;
  const { bundle, mask_key, share_key, signature } = value.keys;
  return typeof bundle === "string" && HASH.test(bundle) && [mask_key, share_key, signature].every(isBase64);
}
