/**
 * Shamir's secret sharing in GF(256), as in device_agent/privacy/shamir.py: any `threshold` shares give the secret,
 * fewer say nothing about it. A page only makes shares.
 */

import type { Bytes } from "./storage.js";

/** The polynomial of the field: x^8 + x^4 + x^3 + x + 1. */
const FIELD = 0x11b;

function times(a: number, b: number): number {
  let product = 0;
  for (let bit = 7; bit >= 0; bit--) {
    product <<= 1;
    product ^= FIELD & -(product >> 8); // no branches: the time says nothing about the secret
    product ^= a & -((b >> bit) & 1);
  }
  return product;
}

/** Splits `secret` into shares for the points 1, 2, ..., `shares`. */
export function splitSecret(secret: Bytes, threshold: number, shares: number): Bytes[] {
  const random = Array.from({ length: threshold - 1 }, () => crypto.getRandomValues(new Uint8Array(secret.length)));
  const rows = [secret, ...random].reverse();
  const values = Array.from({ length: shares }, () => new Uint8Array(secret.length));
  values.forEach((value, index) => {
    // Horner's scheme
    for (const row of rows) row.forEach((byte, i) => (value[i] = times(value[i]!, index + 1) ^ byte));
  });
  return values;
}
