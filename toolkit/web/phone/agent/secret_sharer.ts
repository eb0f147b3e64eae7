/**
 * This device's side of one attempt at a sum, by the rules of device_agent/privacy/secret_sharer.py. Its secrets are
 * only in memory, and are used once: after a reload of the page there is a new attempt with new keys.
 */

import { fromBase64, toBase64 } from "./base64.js";
import { Failure } from "./faults.js";
import { addMask, KEY_BYTES, newSecret, opened, ownMaskKey, pairMaskKey, publicKey, sealed } from "./masks.js";
import {
  adds,
  FEWEST,
  hasOwnKeys,
  keysLines,
  presentLines,
  SecureGroup,
  type SecureKeys,
  type SecureMember,
  type SumOf,
} from "./secure_group.js";
import { splitSecret } from "./shamir.js";
import { isSigned } from "./signatures.js";
import type { Bytes } from "./storage.js";

/** A share of the private mask key, and one of the seed of the device's own mask. */
interface Shares {
  key: Bytes;
  seed: Bytes;
}

/** Shares in base64, by the device whose secret is shared. */
export interface Unmasking {
  /** Of devices whose update has come. */
  seeds: Record<string, string>;
  /** Of the other devices. */
  keys: Record<string, string>;
}

/** The identity of this device: its id, its public key (in base64), and what signs with its private key. */
export interface Signer {
  device: string;
  key: string;
  sign: (lines: readonly string[]) => Promise<string>;
}

/**
 * One attempt of one device. Its methods are called in this order, each once.
 *
 * Each method throws `trust.unsafe-sum` if the coordinator asks for something with which it could learn the update of a
 * device. The attempt is then over: nothing more may be sent.
 */
export class SecretSharer {
  private group: SecureGroup | null = null;
  private readonly held = new Map<string, Shares>();
  private isMasked = false;
  private present: ReadonlySet<string> | null = null;

  private constructor(
    private readonly signer: Signer,
    private readonly sum: SumOf,
    private readonly maskKey: Bytes,
    private readonly shareKey: Bytes,
    private readonly seed: Bytes,
    /** The keys to send first. */
    readonly keys: SecureKeys,
  ) {}

  static async begin(signer: Signer, sum: SumOf): Promise<SecretSharer> {
    const [maskKey, shareKey, seed] = [newSecret(), newSecret(), newSecret()];
    const [mask_key, share_key] = [toBase64(publicKey(maskKey)), toBase64(publicKey(shareKey))];
    const signature = await signer.sign(keysLines(sum, mask_key, share_key));
    const keys = { bundle: sum.bundle, mask_key, share_key, signature };
    return new SecretSharer(signer, sum, maskKey, shareKey, seed, keys);
  }

  /** Checks the group, and makes the encrypted shares for the neighbours. */
  async shares(members: readonly SecureMember[]): Promise<Record<string, string>> {
    if (this.group !== null) throw new Failure("trust.unsafe-sum/shares-twice", {});
    await this.checkMembers(members);
    const { device } = this.signer;
    const group = (this.group = new SecureGroup(this.sum.round, members));
    const [holders, needed] = [group.holders(device), group.needed(device)];
    const keys = splitSecret(this.maskKey, needed, holders.length);
    const seeds = splitSecret(this.seed, needed, holders.length);
    const sent: [string, string][] = [];
    holders.forEach((holder, index) => {
      const own = { key: keys[index]!, seed: seeds[index]! };
      if (holder === device) return void this.held.set(holder, own);
      const content = new Uint8Array([...own.key, ...own.seed]);
      const way = `${device}\n${holder}`;
      sent.push([holder, toBase64(sealed(this.shareKey, shareKeyOf(group, holder), group.context, way, content))]);
    });
    return Object.fromEntries(sent);
  }

  /** Adds the masks to `vector`. `shares` are the shares that the neighbours have sent, by sender. */
  masked(shares: ReadonlyMap<string, string>, vector: Uint32Array): void {
    const group = this.ready();
    const { device } = this.signer;
    if (this.isMasked) throw new Failure("trust.unsafe-sum/update-twice", {});
    const neighbours = new Set(group.neighbours(device));
    const senders = [...shares.keys()];
    if (!senders.every((sender) => neighbours.has(sender))) throw new Failure("trust.unsafe-sum/other-neighbours", {});
    for (const [sender, content] of shares) this.held.set(sender, this.opened(group, sender, content));
    const [held, needed] = [this.held.size, group.needed(device)];
    if (held < needed) throw new Failure("trust.unsafe-sum/few-shares", { held, needed });
    this.isMasked = true;
    addMask(vector, ownMaskKey(this.seed, group.context));
    for (const sender of senders) {
      const theirs = keyOf(group.members.get(sender)!.keys.mask_key);
      addMask(vector, pairMaskKey(this.maskKey, theirs, group.context), !adds(device, sender));
    }
  }

  /** Checks the list of devices whose updates have come, and signs it. */
  async confirmed(present: readonly string[]): Promise<string> {
    const group = this.ready();
    if (!this.isMasked) throw new Failure("trust.unsafe-sum/no-update-yet", {});
    if (this.present !== null && !this.isConfirmed(present)) throw new Failure("trust.unsafe-sum/other-devices", {});
    this.checkPresent(group, present);
    this.present = new Set(present);
    return this.signer.sign(presentLines(group.context, present));
  }

  /**
   * The shares with which the masks of the sum over `present` can be removed.
   *
   * For each device there is a share of only one secret: the seed of the device's own mask if its update is in the sum,
   * else its mask key. This device never gives a share of its own mask key.
   */
  async unmasking(present: readonly string[], confirmations: ReadonlyMap<string, string>): Promise<Unmasking> {
    const group = this.ready();
    if (!this.isConfirmed(present)) throw new Failure("trust.unsafe-sum/unconfirmed", {});
    const lines = presentLines(group.context, present);
    let confirmed = 0;
    for (const [device, signature] of confirmations) {
      const member = group.members.get(device);
      if (member !== undefined && (await isSigned(lines, member.key, signature))) confirmed++;
    }
    const needed = group.confirmations;
    if (confirmed < needed) throw new Failure("trust.unsafe-sum/few-confirmations", { confirmed, needed });
    const devices = [...this.held].sort(([a], [b]) => (a < b ? -1 : 1));
    const given = (here: boolean, of: keyof Shares): Record<string, string> =>
      Object.fromEntries(
        devices.flatMap(([device, shares]) => (this.present!.has(device) === here ? [[device, toBase64(shares[of])]] : [])),
      );
    return { seeds: given(true, "seed"), keys: given(false, "key") };
  }

  private ready(): SecureGroup {
    if (this.group === null) throw new Failure("trust.unsafe-sum/no-group", {});
    return this.group;
  }

  /** Whether `present` has exactly the devices that this device has confirmed. */
  private isConfirmed(present: readonly string[]): boolean {
    const named = new Set(present);
    return named.size === this.present?.size && present.every((device) => this.present!.has(device));
  }

  private opened(group: SecureGroup, sender: string, content: string): Shares {
    const way = `${sender}\n${this.signer.device}`;
    const encrypted = fromBase64(content) ?? new Uint8Array();
    const plain = opened(this.shareKey, shareKeyOf(group, sender), group.context, way, encrypted);
    if (plain?.length !== 2 * KEY_BYTES) throw new Failure("trust.unsafe-sum/altered-shares", { device: sender });
    return { key: new Uint8Array(plain.slice(0, KEY_BYTES)), seed: new Uint8Array(plain.slice(KEY_BYTES)) };
  }

  private async checkMembers(members: readonly SecureMember[]): Promise<void> {
    const { device: self, key: ownKey } = this.signer;
    const [found, needed] = [members.length, this.fewest];
    if (found < needed) throw new Failure("trust.unsafe-sum/small-group", { found, needed });
    const own = members.filter(({ device }) => device === self);
    const isOwn = ({ key, keys }: SecureMember): boolean =>
      key === ownKey && Object.entries(this.keys).every(([name, value]) => keys[name as keyof SecureKeys] === value);
    if (own.length !== 1 || !own.every(isOwn)) throw new Failure("trust.unsafe-sum/own-keys", {});
    const named = members.flatMap(({ device, key, keys }) => [device, key, keys.mask_key, keys.share_key]);
    if (new Set(named).size < named.length) throw new Failure("trust.unsafe-sum/twice", {});
    for (const member of members) {
      const { device } = member;
      if (!(await hasOwnKeys(member, this.sum))) throw new Failure("trust.unsafe-sum/unsigned-keys", { device });
    }
  }

  private checkPresent(group: SecureGroup, present: readonly string[]): void {
    const [named, needed] = [new Set(present), this.fewest];
    if (named.size < present.length || !present.every((device) => group.members.has(device))) {
      throw new Failure("trust.unsafe-sum/other-members", {});
    }
    if (!named.has(this.signer.device)) throw new Failure("trust.unsafe-sum/left-out", {});
    if (named.size < needed) throw new Failure("trust.unsafe-sum/small-sum", { found: named.size, needed });
  }

  private get fewest(): number {
    return Math.max(this.sum.terms.fewest, FEWEST);
  }
}

function shareKeyOf(group: SecureGroup, device: string): Bytes {
  return keyOf(group.members.get(device)!.keys.share_key);
}

/** The bytes of a key of a group that was checked. */
function keyOf(text: string): Bytes {
  return fromBase64(text)!;
}
