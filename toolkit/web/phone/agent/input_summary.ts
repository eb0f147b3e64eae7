/**
 * A coarse summary of the inputs. It shows if a sensor has other units, and little else.
 *
 * The twin of device_agent/formats/input_summary.py.
 */

import type { FarOff } from "./messages.js";
import type { Rows } from "./row_file.js";
import { quantile, sizeOf } from "./tensors.js";

/** The 5%, 50% and 95% quantiles of each channel, in two digits. */
export interface InputSummary {
  channels: [number, number, number][];
}

const MOST_CHANNELS = 64;
/** Quantiles of fewer samples would reveal single values. */
const LEAST_SAMPLES = 20;
/** Quantiles are computed from at most this many values. Samples are left out evenly. */
const MOST_VALUES = 1 << 20;
const DIGITS = 2;
const SCALE = 8;
const SHIFT = 5;

/** The summary of `x`; null for integers such as words, and for fewer than LEAST_SAMPLES samples. */
export function summaryOf(x: Rows): InputSummary | null {
  if (x.dtype !== "float32" || x.rows < LEAST_SAMPLES) return null;
  const values = sizeOf(x.rowShape);
  const count = Math.min(x.rows, Math.max(LEAST_SAMPLES, Math.floor(MOST_VALUES / values)));
  const [first = MOST_CHANNELS + 1] = x.rowShape;
  const channels = first <= MOST_CHANNELS ? first : 1;
  const length = values / channels;
  const all = Array.from({ length: channels }, () => new Float32Array(count * length));
  for (let i = 0; i < count; i++) {
    const row = x.read(Int32Array.of(Math.trunc((i * (x.rows - 1)) / (count - 1)))).data as Float32Array;
    all.forEach((numbers, channel) => numbers.set(row.subarray(channel * length, (channel + 1) * length), i * length));
  }
  return {
    channels: all.map((channel) => {
      channel.sort();
      const rounded = (share: number): number => Number(quantile(channel, share).toExponential(DIGITS - 1));
      return [rounded(0.05), rounded(0.5), rounded(0.95)];
    }),
  };
}

/** The first channel of `own` that lies far from `usual`; null if none does. */
export function farOff(own: InputSummary, usual: InputSummary): FarOff | null {
  if (own.channels.length !== usual.channels.length) return null;
  const largest = Math.max(...usual.channels.map(([low, , high]) => Math.max(Math.abs(low), Math.abs(high))));
  for (const [channel, mine] of own.channels.entries()) {
    const other = usual.channels[channel]!;
    const [width, range] = [mine[2] - mine[0], other[2] - other[0]];
    // If a channel is constant in the federation, compare it with the range of the other channels.
    const shifted = Math.abs(mine[1] - other[1]) > SHIFT * (range || largest);
    const wider = width > SCALE * (range || largest);
    if (largest > 0 && (shifted || wider || (width > 0 && SCALE * width < range))) {
      return { channel, own: [mine[0], mine[2]], usual: [other[0], other[2]] };
    }
  }
  return null;
}
