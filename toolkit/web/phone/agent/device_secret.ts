/** The secret with which this page makes its requests. The operator can ask for a new one. */

import { toBase64 } from "./base64.js";
import { Refusal, type CoordinatorClient, type Work } from "./client.js";
import type { Identity } from "./membership.js";
import { signed } from "./signatures.js";
import { sha256, type Values } from "./storage.js";

/**
 * This page makes a new secret itself, and only sends its hash. It stores the new secret before it sends the hash. So a
 * page that is closed at any moment has the secret that the coordinator knows: the present one or the next one.
 */
export class DeviceSecret {
  constructor(
    private readonly client: CoordinatorClient,
    private readonly identity: Identity,
    private readonly values: Values,
  ) {}

  /** Asks for work, with the next secret if the coordinator does not know the present one any more. */
  async work(): Promise<Work> {
    try {
      return await this.client.work();
    } catch (error) {
      if (!(error instanceof Refusal && error.unknown) || !(await this.settle())) throw error;
      return this.client.work();
    }
  }

  /** Uses the next secret if the coordinator knows it. Returns whether that is so. */
  async settle(): Promise<boolean> {
    const { nextSecret, secret } = this.identity;
    if (!nextSecret) return false;
    this.client.secret = nextSecret;
    if ((await this.client.peek()) === null) {
      this.client.secret = secret;
      return false;
    }
    await this.keep(nextSecret);
    return true;
  }

  /** Makes a new secret, signed with this page's key, and uses it from now on. */
  async renew(challenge: string): Promise<void> {
    const keys = await this.values.get<CryptoKeyPair>("key");
    if (keys === null) return;
    const secret = this.identity.nextSecret ?? randomSecret();
    await this.store({ nextSecret: secret });
    const secret_sha256 = await sha256(new TextEncoder().encode(secret));
    const signature = await signed(["edgetailor-secret-1", challenge, secret_sha256], keys.privateKey);
    try {
      await this.client.renewSecret({ challenge, secret_sha256, signature });
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      if (error.unknown) await this.settle(); // the answer to an earlier try was lost
      return;
    }
    this.client.secret = secret;
    await this.keep(secret);
  }

  private async keep(secret: string): Promise<void> {
    await this.store({ secret, nextSecret: null });
  }

  private async store(change: Partial<Identity>): Promise<void> {
    Object.assign(this.identity, change);
    const stored = await this.values.get<Identity>("device");
    await this.values.put({ device: { ...(stored ?? this.identity), ...change } });
  }
}

function randomSecret(): string {
  const encoded = toBase64(crypto.getRandomValues(new Uint8Array(32)));
  return encoded.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
