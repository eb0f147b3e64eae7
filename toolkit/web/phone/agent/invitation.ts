/** What a federation says of itself before a device joins: signed by its coordinator, shown as text. */

import type { CoordinatorClient } from "./client.js";
import { Refusal } from "./client.js";
import type { Invitation } from "./messages.js";
import { checkInvitation } from "./trust.js";

export interface SignedInvitation extends Invitation {
  key: string;
  signature: string;
}

const LONGEST = 500;

/** The invitation of a join token; null from a coordinator of an earlier version. */
export async function invited(
  client: CoordinatorClient,
  fingerprint: string | null,
): Promise<Invitation | null> {
  let found: SignedInvitation;
  try {
    found = await client.invitation();
  } catch (error) {
    if (error instanceof Refusal && error.status === 404) return null;
    throw error;
  }
  await checkInvitation(found, fingerprint);
  const line = (given: unknown): string => (typeof given === "string" ? given.slice(0, LONGEST) : "");
  const number = (given: unknown): number => (Number.isFinite(given) ? Number(given) : 0);
  return {
    title: line(found.title),
    purpose: line(found.purpose),
    contact: line(found.contact),
    rounds: number(found.rounds),
    round_s: number(found.round_s),
    first_bytes: number(found.first_bytes),
    round_bytes: number(found.round_bytes),
  };
}
