/** Adds the update of this device to the secure sum of its round, in place of sending the update. */

import type { Bundle } from "./bundle.js";
import { LONGEST_ASKED_MS, Refusal, type CoordinatorClient, type Work } from "./client.js";
import { Failure } from "./faults.js";
import type { SecureTerms } from "./messages.js";
import { groupLines, type SumOf } from "./secure_group.js";
import { useUp } from "./secure_promise.js";
import { readStep, type SecureStep } from "./secure_steps.js";
import { SecretSharer, type Signer } from "./secret_sharer.js";
import { isSigned } from "./signatures.js";
import { sha256, type Values } from "./storage.js";
import { updateVector, type Trained } from "./summed_updates.js";
import { readAllTensors } from "./tensors.js";
import type { TrustedKey } from "./trust.js";
import type { Update } from "./update.js";

/** The wait before the next question, if the coordinator does not say it. */
const POLL_MS = 250;
/** The wait if the coordinator has other terms than this device. */
const NEW_TERMS_MS = 30_000;

export class SecureSending {
  private isSent = false;

  /** @param rest Waits for a number of milliseconds. */
  constructor(
    private readonly client: CoordinatorClient,
    private readonly signer: Signer,
    private readonly key: TrustedKey,
    private readonly values: Values,
    private readonly rest: (milliseconds: number) => Promise<void>,
    private readonly bundle: Bundle,
    private readonly update: Update,
  ) {}

  /**
   * Adds the update to the sum of the round of `work`.
   *
   * @returns Whether the update is in the sum, as far as this device knows. If the coordinator repeats the sum after the
   *   masked update was sent, this device trains again.
   */
  async add(work: Work, terms: SecureTerms): Promise<boolean> {
    const sum = { round: work.round, bundle: this.bundle.sha256, terms, apart: work.evaluation?.share ?? 0 };
    let isAdded: boolean | null = null;
    while (isAdded === null) isAdded = await this.attempt(sum);
    return isAdded;
  }

  /** One attempt with new keys. Returns null if it has to be repeated with this update. */
  private async attempt(sum: SumOf): Promise<boolean | null> {
    const { round } = sum;
    const sharer = await SecretSharer.begin(this.signer, sum);
    const { bundle, mask_key, share_key, signature } = sharer.keys;
    try {
      await this.client.sendToSum(round, "keys", { bundle, mask_key, share_key, signature });
    } catch (error) {
      if (!(error instanceof Refusal) || error.code !== "round.unsigned-keys") throw error;
      // The keys are signed for these terms. A coordinator that was restarted may have others.
      await this.rest(NEW_TERMS_MS);
      return false;
    }
    let members = 0;
    for (;;) {
      const step = readStep(await this.client.secureStep(round));
      if (step === null) throw new Failure("client.not-a-coordinator", { origin: this.client.origin });
      switch (step.step) {
        case "wait":
          await this.rest(waitOf(step));
          break;
        case "shares":
          await this.key.check((key) => checkGroup(step, round, key));
          members = step.members.length;
          await this.client.sendToSum(round, "shares", { shares: await sharer.shares(step.members) });
          break;
        case "input":
          await this.sendMasked(sharer, step, sum, members);
          break;
        case "confirm":
          await this.client.sendToSum(round, "confirmation", { signature: await sharer.confirmed(step.present) });
          break;
        case "unmask": {
          const { seeds, keys } = await sharer.unmasking(step.present, step.confirmations);
          await this.client.sendToSum(round, "unmasking", { seeds, keys });
          return true;
        }
        case "over":
          return false;
        case "again":
          return this.isSent ? false : null;
      }
    }
  }

  private async sendMasked(
    sharer: SecretSharer,
    { shares }: SecureStep,
    { round, terms }: SumOf,
    members: number,
  ): Promise<void> {
    const record = JSON.parse(this.update.record) as Trained;
    const received = await this.bundle.tensors(record.tensors.map(({ name }) => name));
    const trained = readAllTensors(this.update.tensors, "update");
    // Devices have the same seeds: their roundings must not be the same.
    const entropy = [round, ...new TextEncoder().encode(this.signer.device)];
    const vector = updateVector(record, trained, received, terms, members, entropy);
    sharer.masked(shares, vector);
    const bytes = new Uint8Array(vector.buffer);
    const digest = await sha256(bytes);
    await useUp(this.values, round, this.update.sha256);
    this.isSent = true;
    await this.client.sendTensors(round, bytes, digest);
    await this.client.sendToSum(round, "input", { sha256: digest });
  }
}

async function checkGroup({ members, signature }: SecureStep, round: number, key: string): Promise<void> {
  if (!(await isSigned(groupLines(round, members), key, signature))) throw new Failure("trust.forged-work/group", {});
}

function waitOf({ askAgainS }: SecureStep): number {
  return askAgainS > 0 ? Math.min(1000 * askAgainS, LONGEST_ASKED_MS) : POLL_MS;
}
