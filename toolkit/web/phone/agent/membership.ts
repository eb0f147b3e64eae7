/** Who this page is for its coordinator: a key that cannot leave the browser, and what it got. */

import type { CoordinatorClient, JoinReply } from "./client.js";
import { Failure } from "./failure.js";
import { RUNTIME } from "./runtime.js";
import { readForm } from "./sample_form.js";
import { checkKey } from "./trust.js";
import { sha256, type Bytes, type Values } from "./storage.js";

export interface Identity extends JoinReply {
  name: string;
  tokenSha256: string;
}

/** Joins with `token`. The same page joins again as the same device, because its key stays. */
export async function join(
  client: CoordinatorClient,
  token: string,
  fingerprint: string | null,
  name: string,
  values: Values,
): Promise<Identity> {
  // The key is stored before it is sent: after a lost answer the same key joins again.
  let keys = await values.get<CryptoKeyPair>("key");
  if (keys === null) {
    keys = await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"]);
    await values.put({ key: keys });
  }
  const { privateKey, publicKey } = keys;
  const machine = await thisMachine();
  const public_key = base64(await crypto.subtle.exportKey("raw", publicKey));
  const tokenSha256 = await sha256(encoded(token));
  const reply = await client.join(async () => {
    const timestamp = Math.floor(Date.now() / 1000);
    const text = `edgetailor-join-1\n${tokenSha256}\n${public_key}\n${timestamp}\n`;
    const signature = base64(await crypto.subtle.sign("Ed25519", privateKey, encoded(text)));
    return { name, public_key, machine, timestamp, signature, profile: null };
  });
  for (const word of [reply.device, reply.secret, reply.submodel]) {
    if (typeof word !== "string" || !/^[\x21-\x7e]{1,200}$/.test(word)) {
      throw new Failure("client.not-a-coordinator", `${client.origin} did not answer like a coordinator.`);
    }
  }
  await checkKey(reply.key, fingerprint);
  const identity = { ...reply, ...readForm(reply), name, tokenSha256 };
  await values.put({ device: identity });
  return identity;
}

/** This browser, in the fields of `bundle_profile.Machine`. A browser tells no more than this. */
export async function thisMachine(): Promise<Record<string, string | number | null>> {
  const hints = (navigator as { userAgentData?: UserAgentData }).userAgentData;
  const known = await hints?.getHighEntropyValues(["architecture", "model", "platformVersion"]);
  return {
    kind: "browser",
    system: navigator.userAgent.slice(0, 200),
    architecture: known?.architecture || "unknown",
    processor: null,
    cpu_count: navigator.hardwareConcurrency,
    memory_bytes: null,
    python: null,
    runtime: RUNTIME,
    model: known?.model || null,
  };
}

interface UserAgentData {
  getHighEntropyValues: (hints: string[]) => Promise<{ architecture?: string; model?: string }>;
}

function encoded(text: string): Bytes {
  return new TextEncoder().encode(text);
}

function base64(bytes: ArrayBuffer): string {
  return btoa(String.fromCharCode(...new Uint8Array(bytes)));
}
