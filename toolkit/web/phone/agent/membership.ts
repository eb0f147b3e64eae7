/** This page's identity: a key that cannot leave the browser, and the coordinator's reply to a join. */

import { toBase64 } from "./base64.js";
import { calibrate, type Calibration } from "./calibration.js";
import type { Body } from "./disclosure.js";
import { Refusal, type CoordinatorClient, type JoinReply } from "./client.js";
import { Failure } from "./faults.js";
import type { Invitation } from "./messages.js";
import { RUNTIME } from "./runtime.js";
import { readForm } from "./sample_form.js";
import type { Signer } from "./secret_sharer.js";
import { promiseSecureSums } from "./secure_promise.js";
import { signed } from "./signatures.js";
import { checkKey } from "./trust.js";
import { sha256, type Bytes, type Values } from "./storage.js";

/** The code of a refusal: the coordinator plans submodels, so it needs a profile of the device. */
const NEEDS_PROFILE = "join.needs-profile";
const PROFILE_VERSION = 1;

type Profile = Body<"POST /devices profile">;

export interface Identity extends JoinReply {
  name: string;
  tokenSha256: string;
  /** A new secret that the coordinator may have taken already. */
  nextSecret?: string | null;
}

/**
 * Joins with `token`. If this page joins again, it is the same device, because its key stays. If the federation's
 * `invitation` promises secure sums, this is remembered.
 *
 * If the coordinator needs a calibration, `onMeasured` gets the share of it that is done.
 */
export async function join(
  client: CoordinatorClient,
  token: string,
  fingerprint: string | null,
  name: string,
  invitation: Invitation | null,
  values: Values,
  onMeasured: (share: number) => void,
): Promise<Identity> {
  // Store the key before it is sent: if the answer is lost, the same key joins again.
  let keys = await values.get<CryptoKeyPair>("key");
  if (keys === null) {
    keys = await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"]);
    await values.put({ key: keys });
  }
  const { privateKey, publicKey } = keys;
  const machine = await thisMachine();
  const public_key = await textOf(publicKey);
  const tokenSha256 = await sha256(encoded(token));
  const request = async (profile: Profile | null): Promise<Body<"POST /devices">> => {
    const timestamp = Math.floor(Date.now() / 1000);
    const lines = ["edgetailor-join-1", tokenSha256, public_key, `${timestamp}`];
    const signature = await signed(lines, privateKey);
    return { name, public_key, machine, timestamp, signature, profile };
  };
  const reply = await client.join(() => request(null)).catch(async (error: unknown) => {
    if (!(error instanceof Refusal && error.code === NEEDS_PROFILE)) throw error;
    const profile = await describe(name, machine, await calibrated(values, onMeasured));
    return client.join(() => request(profile));
  });
  for (const word of [reply.device, reply.secret, reply.submodel]) {
    if (typeof word !== "string" || !/^[\x21-\x7e]{1,200}$/.test(word)) {
      throw new Failure("client.not-a-coordinator", { origin: client.origin });
    }
  }
  await checkKey(client, reply.key, fingerprint);
  const identity = { ...reply, ...readForm(reply), name, tokenSha256 };
  if (invitation?.secure) await promiseSecureSums(values, invitation.secure);
  await values.put({ device: identity, invitation });
  return identity;
}

/** What signs as this device. */
export async function readSigner({ device }: Identity, values: Values): Promise<Signer> {
  const keys = await values.get<CryptoKeyPair>("key");
  if (keys === null) throw new Failure("storage.lost", {});
  return { device, key: await textOf(keys.publicKey), sign: (lines) => signed(lines, keys.privateKey) };
}

/** The raw public key in base64. */
async function textOf(key: CryptoKey): Promise<string> {
  return toBase64(new Uint8Array(await crypto.subtle.exportKey("raw", key)));
}

/** Describes this browser in the fields of `bundle_profile.Machine`. A browser tells no more. */
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

/** The profile of this device, for the coordinator's plan (profiles/documents/device_profile.py). */
async function describe(name: string, machine: object, measured: Measured): Promise<Profile> {
  const { quota, usage } = await navigator.storage.estimate();
  const memory = (navigator as { deviceMemory?: number }).deviceMemory;
  const free = quota === undefined ? null : quota - (usage ?? 0);
  return {
    version: PROFILE_VERSION,
    name,
    cores: navigator.hardwareConcurrency,
    // The browser rounds this to a power of two.
    memory_bytes: memory === undefined ? null : memory * 2 ** 30,
    storage_free_bytes: free,
    machine,
    ...measured,
    sources: { cores: SAID, memory_bytes: SAID, storage_free_bytes: SAID, calibration: clock() },
  };
}

/** Calibrates, unless there is a calibration of today by the same runtime. */
async function calibrated(values: Values, onMeasured: (share: number) => void): Promise<Measured> {
  const kept = await values.get<Measured>("calibration");
  if (kept !== null && kept.date === today() && kept.calibration.runtime === RUNTIME) return kept;
  const measured = { date: today(), calibration: await calibrate(onMeasured) };
  await values.put({ calibration: measured });
  return measured;
}

interface Measured {
  date: string;
  calibration: Calibration;
}

function today(): string {
  return new Date().toISOString().slice(0, 10);
}

const SAID = "said by the browser";

/** The name of the clock of a calibration, with its resolution. */
function clock(): string {
  const start = performance.now();
  let now = start;
  while (now === start) now = performance.now();
  return `performance.now, in steps of ${((now - start) * 1000).toFixed(0)} µs`;
}

interface UserAgentData {
  getHighEntropyValues: (hints: string[]) => Promise<{ architecture?: string; model?: string }>;
}

function encoded(text: string): Bytes {
  return new TextEncoder().encode(text);
}
