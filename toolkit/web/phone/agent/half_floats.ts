/**
 * float16 numbers, rounded to the nearest, ties to even, as a native agent rounds them. Not every
 * browser has Float16Array.
 */

import { Failure } from "./failure.js";

/** Bits of float32 numbers. */
const INFINITY = 0x7f800000;
const HALF = 0x3f000000;
const LEAST_NORMAL = 0x38800000;
/** The difference of the two types' exponents, at its place in a float32 number. */
const REBIAS = 0x38000000;
const HALF_INFINITY = 0x7c00;

/**
 * The bits of `values` in float16. Infinity and numbers that are none stay what they are; a finite
 * number beyond float16's range is a Failure.
 */
export function toHalf(values: Float32Array): Uint16Array<ArrayBuffer> {
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  const halves = new Uint16Array(values.length);
  const sum = new Float32Array(1);
  const sumBits = new Uint32Array(sum.buffer);
  for (let i = 0; i < bits.length; i++) {
    const sign = (bits[i]! >>> 16) & 0x8000;
    const size = bits[i]! & 0x7fffffff;
    let half;
    if (size >= INFINITY) half = size > INFINITY ? HALF_INFINITY | 0x200 : HALF_INFINITY;
    else if (size >= LEAST_NORMAL) half = (size - REBIAS + 0xfff + ((size >>> 13) & 1)) >>> 13;
    else {
      // The float32 numbers from 0.5 to 1 are as far apart as the smallest float16 numbers.
      sum[0] = Math.abs(values[i]!) + 0.5;
      half = sumBits[0]! - HALF;
    }
    if (half >= HALF_INFINITY && size < INFINITY) {
      throw new Failure("update.beyond-float16", { value: Math.abs(values[i]!) });
    }
    halves[i] = sign | half;
  }
  return halves;
}

/** The numbers whose float16 bits are `halves`. */
export function fromHalf(halves: Uint16Array): Float32Array<ArrayBuffer> {
  const values = new Float32Array(halves.length);
  const bits = new Uint32Array(values.buffer);
  for (let i = 0; i < halves.length; i++) {
    const sign = (halves[i]! & 0x8000) << 16;
    const size = halves[i]! & 0x7fff;
    if (size >= HALF_INFINITY) bits[i] = sign | INFINITY | ((size & 0x3ff) << 13);
    else if (size >= 0x400) bits[i] = sign | ((size << 13) + REBIAS);
    else values[i] = (sign < 0 ? -1 : 1) * size * 2 ** -24;
  }
  return values;
}
