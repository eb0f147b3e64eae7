/** Signatures by Ed25519. A text that is signed has lines, and keys and signatures are in base64. */

import { fromBase64, toBase64 } from "./base64.js";
import type { Bytes } from "./storage.js";

function textOf(lines: readonly string[]): Bytes {
  return new TextEncoder().encode(lines.map((line) => `${line}\n`).join(""));
}

export async function signed(lines: readonly string[], key: CryptoKey): Promise<string> {
  return toBase64(new Uint8Array(await crypto.subtle.sign("Ed25519", key, textOf(lines))));
}

/** Whether the owner of the public `key` has made `signature` of `lines`. */
export async function isSigned(lines: readonly string[], key: string, signature: string): Promise<boolean> {
  const [bytes, made] = [fromBase64(key), fromBase64(signature)];
  if (bytes?.length !== 32 || made === null) return false;
  const imported = await crypto.subtle.importKey("raw", bytes, "Ed25519", false, ["verify"]);
  return crypto.subtle.verify("Ed25519", imported, made, textOf(lines));
}
