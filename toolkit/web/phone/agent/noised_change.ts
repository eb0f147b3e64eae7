/**
 * The change of a device for a secure sum with differential privacy: clipped, with noise of its own. The rules are those of
 * device_agent/privacy/noised_change.py; all randomness comes from the browser's cryptographic generator.
 */

import { Failure } from "./faults.js";
import type { SecureTerms, SumPrivacy } from "./messages.js";
import { threshold } from "./secure_group.js";

/** No noise is beyond so many standard deviations. */
const FARTHEST = 9;
/** `getRandomValues` gives at most 65,536 bytes at a time. */
const WORDS = 1 << 14;

/** The number of steps from 0 to the largest number of a device, so that the sum of all devices never overflows. */
export function levels(devices: number): number {
  return Math.floor((2 ** 31 - 1) / devices) - 1;
}

/** The clipped changes of a device with its noise, as whole numbers modulo 2^32. `changes` are in the order of the sum. */
export function noisedNumbers(
  changes: Float64Array,
  { fewest }: SecureTerms,
  { clip, noise_multiplier }: SumPrivacy,
  devices: number,
): Uint32Array<ArrayBuffer> {
  const own = (noise_multiplier * clip) / Math.sqrt(Math.max(fewest, threshold(devices)) - 1);
  const step = (clip + FARTHEST * own) / levels(devices);
  const norm = Math.sqrt(changes.reduce((sum, change) => sum + change * change, 0));
  // Rounding moves each number by less than a step.
  const longest = clip - step * Math.sqrt(changes.length);
  // The coordinator makes the received numbers: a number that is not finite has no clip.
  if (!Number.isFinite(norm) || longest <= 0) throw new Failure("trust.unclippable", {});
  const scale = (norm > longest ? longest / norm : 1) / step;
  const random = new SecureRandom();
  const numbers = new Uint32Array(changes.length);
  for (let i = 0; i < changes.length; i++) {
    const rounded = Math.floor(changes[i]! * scale + random.below1());
    // An element of a Uint32Array is its number modulo 2^32.
    numbers[i] = rounded + Math.round((own / step) * random.gaussian());
  }
  return numbers;
}

class SecureRandom {
  private readonly words = new Uint32Array(WORDS);
  private at = WORDS;
  private second: number | null = null;

  /** A number in [0, 1) of 53 bits. */
  below1(): number {
    return (this.word() * 2 ** 21 + (this.word() >>> 11)) * 2 ** -53;
  }

  /** A standard normal number by Box and Muller's formula. */
  gaussian(): number {
    const kept = this.second;
    this.second = null;
    if (kept !== null) return kept;
    const radius = Math.sqrt(-2 * Math.log(1 - this.below1()));
    const angle = 2 * Math.PI * this.below1();
    this.second = radius * Math.sin(angle);
    return radius * Math.cos(angle);
  }

  private word(): number {
    if (this.at === WORDS) {
      crypto.getRandomValues(this.words);
      this.at = 0;
    }
    return this.words[this.at++]!;
  }
}
