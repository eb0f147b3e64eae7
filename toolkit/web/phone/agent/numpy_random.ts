/**
 * The part of numpy's `default_rng` that training needs: SeedSequence and PCG64 (O'Neill 2014), with
 * `permutation`, `random` and bounded integers. So a phone gets the same batches and dropout masks as a native
 * agent with the same seed. A test compares the two number by number.
 */

const WORD = 0xffffffffn;
const DOUBLE = (1n << 64n) - 1n;
const STATE = (1n << 128n) - 1n;
const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

/** The state of a generator, as text for a checkpoint. */
export interface RandomState {
  state: string;
  increment: string;
  /** The upper half of the last 64 bits if only their lower half has been used, else null. */
  kept: number | null;
}

export class NumpyRandom {
  private state = 0n;
  private increment = 0n;
  private kept: number | null = null;

  /** Seeds like `numpy.random.default_rng(entropy)` with a list of integers of at least 0. */
  constructor(entropy: readonly number[]) {
    const [a, b, c, d] = seedSequence(entropy.flatMap(words));
    this.increment = (((c! << 64n) | d!) << 1n | 1n) & STATE;
    this.advance();
    this.state = (this.state + ((a! << 64n) | b!)) & STATE;
    this.advance();
  }

  static from(saved: RandomState): NumpyRandom {
    const random = new NumpyRandom([0]);
    random.state = BigInt(saved.state);
    random.increment = BigInt(saved.increment);
    random.kept = saved.kept;
    return random;
  }

  save(): RandomState {
    return { state: `${this.state}`, increment: `${this.increment}`, kept: this.kept };
  }

  /** `Generator.permutation(n)`. */
  permutation(n: number): Int32Array {
    const order = Int32Array.from({ length: n }, (_, i) => i);
    for (let i = n - 1; i > 0; i--) {
      const j = this.masked(i);
      const moved = order[i]!;
      order[i] = order[j]!;
      order[j] = moved;
    }
    return order;
  }

  /** `Generator.integers(n)` for n below 2^32: Lemire's method. */
  integers(n: number): number {
    const range = BigInt(n);
    let product = BigInt(this.next32()) * range;
    if ((product & WORD) < range) {
      const least = (WORD + 1n - range) % range;
      while ((product & WORD) < least) product = BigInt(this.next32()) * range;
    }
    return Number(product >> 32n);
  }

  /** `Generator.random()`: a number from 0 to 1, without 1. */
  random(): number {
    return Number(this.next64() >> 11n) * 2 ** -53;
  }

  /** Draws an integer from 0 to `most` with masks and rejection, like numpy's shuffle. */
  private masked(most: number): number {
    const mask = 2 ** (32 - Math.clz32(most)) - 1;
    for (;;) {
      const drawn = (this.next32() & mask) >>> 0;
      if (drawn <= most) return drawn;
    }
  }

  private next32(): number {
    if (this.kept !== null) {
      const kept = this.kept;
      this.kept = null;
      return kept;
    }
    const drawn = this.next64();
    this.kept = Number(drawn >> 32n);
    return Number(drawn & WORD);
  }

  private next64(): bigint {
    this.advance();
    const folded = (this.state >> 64n) ^ (this.state & DOUBLE);
    const turn = this.state >> 122n;
    return ((folded >> turn) | (folded << (-turn & 63n))) & DOUBLE;
  }

  private advance(): void {
    this.state = (this.state * MULTIPLIER + this.increment) & STATE;
  }
}

/** The 32-bit words of an integer, lowest first. */
function words(value: number): number[] {
  const low = value % 2 ** 32;
  const high = Math.floor(value / 2 ** 32);
  return high ? [low, high] : [low];
}

/** numpy's SeedSequence(entropy).generate_state(4, uint64). */
function seedSequence(entropy: readonly number[]): bigint[] {
  const times = (a: number, b: number): number => Math.imul(a, b) >>> 0;
  const folded = (v: number): number => (v ^ (v >>> 16)) >>> 0;
  let constant = 0x43b0d7e5;
  const hash = (value: number): number => {
    const mixed = (value ^ constant) >>> 0;
    constant = times(constant, 0x931e8875);
    return folded(times(mixed, constant));
  };
  const mix = (x: number, y: number): number =>
    folded((times(0xca01f9dd, x) - times(0x4973f715, y)) >>> 0);
  const pool = [0, 1, 2, 3].map((i) => hash(entropy[i] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) {
      if (from !== to) pool[to] = mix(pool[to]!, hash(pool[from]!));
    }
  }
  for (const more of entropy.slice(4)) {
    for (let to = 0; to < 4; to++) pool[to] = mix(pool[to]!, hash(more));
  }
  let output = 0x8b51f9dd;
  const drawn = Array.from({ length: 8 }, (_, i) => {
    const mixed = (pool[i % 4]! ^ output) >>> 0;
    output = times(output, 0x58f38ded);
    return BigInt(folded(times(mixed, output)));
  });
  return [0, 2, 4, 6].map((i) => drawn[i]! | (drawn[i + 1]! << 32n));
}
