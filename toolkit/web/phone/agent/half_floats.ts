/**
 * Converts to float16 as a native agent does: to the nearest number, ties to even. Not every browser
 * has Float16Array.
 */

import { Float16Array } from "@petamoriken/float16";
import { Failure } from "./faults.js";

const BITS = Uint16Array.from({ length: 1 << 16 }, (_, bits) => bits);
/** The number for each pattern of 16 bits. The library needs 170 ns to compute one. */
const NUMBERS = Float32Array.from(new Float16Array(BITS.buffer));
const SIZE = 0x7fff;
const INFINITY = 0x7c00;

/**
 * The bits of `values` in float16. Infinities and NaN stay unchanged. A finite number beyond the range
 * of float16 is a Failure.
 */
export function toHalf(values: Float32Array): Uint16Array<ArrayBuffer> {
  const halves = new Uint16Array(new Float16Array(values).buffer);
  const beyond = halves.findIndex((bits, i) => (bits & SIZE) === INFINITY && Number.isFinite(values[i]));
  if (beyond >= 0) throw new Failure("update.beyond-float16", { value: Math.abs(values[beyond]!) });
  return halves;
}

/** The numbers whose float16 bits are `halves`. */
export function fromHalf(halves: Uint16Array): Float32Array<ArrayBuffer> {
  const values = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; i++) values[i] = NUMBERS[halves[i]!]!;
  return values;
}
