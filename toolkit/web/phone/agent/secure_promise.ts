/**
 * What this page remembers of secure sums: once a federation has promised or used them, the page never sends a plain
 * update. So a coordinator cannot end the protection without the owner.
 */

import type { Values } from "./storage.js";

/** The name of a stored value. It exists if secure sums were promised or used. */
const SECURE = "secureSums";

interface SecureSums {
  /** The last round with a masked update, and how many were sent in it. */
  round: number;
  masked: number;
  /** SHA-256 of the update that was sent behind masks last. It is never sent again. */
  used: string;
}

/** Remembers that the federation uses secure sums: this page never sends an update. */
export async function promiseSecureSums(values: Values): Promise<void> {
  if (!(await isSecure(values))) await values.put({ [SECURE]: { round: 0, masked: 0, used: "" } satisfies SecureSums });
}

export async function isSecure(values: Values): Promise<boolean> {
  return (await values.get<SecureSums>(SECURE)) !== null;
}

/** How many updates this page has sent behind masks in `round`. */
export async function maskedUpdates(values: Values, round: number): Promise<number> {
  const kept = await values.get<SecureSums>(SECURE);
  return kept?.round === round ? kept.masked : 0;
}

/** Whether the update with this hash was sent behind masks. */
export async function isUsedUp(values: Values, update: string): Promise<boolean> {
  return (await values.get<SecureSums>(SECURE))?.used === update;
}

/**
 * Counts an update: it is sent behind masks now, and never again. If one update were in two sums of different devices,
 * the difference of the sums would be the update of the devices that are in one sum only.
 */
export async function useUp(values: Values, round: number, update: string): Promise<void> {
  const masked = (await maskedUpdates(values, round)) + 1;
  await values.put({ [SECURE]: { round, masked, used: update } satisfies SecureSums });
}
