/**
 * What this page remembers of secure sums: once a federation has promised or used them, the page never sends a plain
 * update. So a coordinator cannot end the protection without the owner.
 */

import { Failure } from "./faults.js";
import type { SecureTerms } from "./messages.js";
import type { Values } from "./storage.js";

/** The name of a stored value. It exists if secure sums were promised or used. */
const SECURE = "secureSums";

interface SecureSums {
  /** The last round with a masked update, and how many were sent in it. */
  round: number;
  masked: number;
  /** SHA-256 of the update that was sent behind masks last. It is never sent again. */
  used: string;
  /** The noise multiplier that sums had first; later ones have no less. */
  noise?: number;
}

/** Remembers that the federation uses secure sums with this noise: this page never sends an update. */
export async function promiseSecureSums(values: Values, { privacy }: SecureTerms): Promise<void> {
  const kept = await values.get<SecureSums>(SECURE);
  if (kept !== null && (privacy === null || kept.noise !== undefined)) return;
  const noise = privacy === null ? {} : { noise: privacy.noise_multiplier };
  await values.put({ [SECURE]: { ...(kept ?? { round: 0, masked: 0, used: "" }), ...noise } satisfies SecureSums });
}

/** Checks that a sum has no less noise than was promised. */
export async function checkNoise(values: Values, { privacy }: SecureTerms): Promise<void> {
  const promised = (await values.get<SecureSums>(SECURE))?.noise ?? 0;
  const noise = privacy?.noise_multiplier ?? 0;
  if (noise < promised) throw new Failure("trust.less-noise", { promised, noise });
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
  const kept = await values.get<SecureSums>(SECURE);
  await values.put({ [SECURE]: { ...kept, round, masked, used: update } satisfies SecureSums });
}
