/** The keys of one attempt at a sum, and the masks that follow from them, as in device_agent/privacy/masks.py. */

import { chacha20, chacha20poly1305 } from "@noble/ciphers/chacha.js";
import { x25519 } from "@noble/curves/ed25519.js";
import { hkdf } from "@noble/hashes/hkdf.js";
import { sha256 } from "@noble/hashes/sha2.js";
import type { Bytes } from "./storage.js";

export const KEY_BYTES = 32;
/** Elements of a mask that are in memory at a time. */
const PIECE = 1 << 18;
const BLOCK_BYTES = 64;
/** Each key is used once. */
const NONCE = new Uint8Array(12);

const encoded = (text: string): Uint8Array => new TextEncoder().encode(text);

/** 32 random bytes: a private key of X25519, or the seed of a mask. */
export function newSecret(): Bytes {
  return crypto.getRandomValues(new Uint8Array(KEY_BYTES));
}

export function publicKey(secret: Bytes): Uint8Array {
  return x25519.getPublicKey(secret);
}

/** Whether two devices can agree on a secret with the public key. Keys of small order are not usable. */
export function isUsable(key: Bytes): boolean {
  try {
    x25519.getSharedSecret(new Uint8Array(KEY_BYTES).fill(1), key);
    return true;
  } catch {
    return false;
  }
}

/** The key of the mask that two devices share. */
export function pairMaskKey(secret: Bytes, key: Bytes, context: Uint8Array): Uint8Array {
  return derived(x25519.getSharedSecret(secret, key), context, "edgetailor-mask-1");
}

/** The key of the mask that one device adds alone. */
export function ownMaskKey(seed: Bytes, context: Uint8Array): Uint8Array {
  return derived(seed, context, "edgetailor-own-mask-1");
}

/** Encrypts `content` for the holder of the public key. `way` names the sender and the receiver. */
export function sealed(secret: Bytes, key: Bytes, context: Uint8Array, way: string, content: Bytes): Uint8Array {
  return shareCipher(secret, key, context, way).encrypt(content);
}

/** Decrypts what `sealed` has made; null if the content or another argument differs. */
export function opened(
  secret: Bytes,
  key: Bytes,
  context: Uint8Array,
  way: string,
  content: Bytes,
): Uint8Array | null {
  try {
    return shareCipher(secret, key, context, way).decrypt(content);
  } catch {
    return null;
  }
}

/** Adds the mask of `key` to `vector` modulo 2^32, or subtracts it. */
export function addMask(vector: Uint32Array, key: Uint8Array, subtract = false): void {
  const zeros = new Uint8Array(4 * Math.min(PIECE, vector.length));
  const stream = new Uint8Array(zeros.length);
  const mask = new Uint32Array(stream.buffer);
  for (let start = 0; start < vector.length; start += PIECE) {
    const size = Math.min(PIECE, vector.length - start);
    const bytes = 4 * size;
    chacha20(key, NONCE, zeros.subarray(0, bytes), stream.subarray(0, bytes), (4 * start) / BLOCK_BYTES);
    const part = vector.subarray(start, start + size);
    if (subtract) for (let i = 0; i < size; i++) part[i]! -= mask[i]!;
    else for (let i = 0; i < size; i++) part[i]! += mask[i]!;
  }
}

function shareCipher(secret: Bytes, key: Bytes, context: Uint8Array, way: string): ReturnType<typeof chacha20poly1305> {
  const shared = derived(x25519.getSharedSecret(secret, key), context, `edgetailor-share-1\n${way}`);
  return chacha20poly1305(shared, NONCE, context);
}

function derived(secret: Uint8Array, context: Uint8Array, info: string): Uint8Array {
  return hkdf(sha256, secret, context, encoded(info), KEY_BYTES);
}
