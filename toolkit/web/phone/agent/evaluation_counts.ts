/** How a device counts its predictions of samples on which it does not train. */

/** EvaluationCounts of device_agent/formats/evaluation_counts.py. */
export interface Counts {
  samples: number;
  counted: number;
  /** Missing for a regression and for label sequences. */
  correct?: number;
  loss_sum: number;
  /** Only of a regression: the sum of the samples' mean absolute errors. */
  absolute_sum?: number;
  /** For each class, its labels and how many of them are predicted correctly. */
  classes?: [number, number][];
  /** Sums over the samples of the metrics that the loss computes. */
  metrics?: Record<string, number>;
}

/** No loss of a label is larger, because devices compute losses in float32. */
const LARGEST_LOSS = 3.5e38;

/** The counts without sums that are not finite, as `finite_counts` of the agent makes them. */
export function finiteCounts({ loss_sum: loss, absolute_sum: absolute, metrics, ...counts }: Counts): Counts {
  return {
    ...counts,
    loss_sum: Number.isFinite(loss) ? loss : LARGEST_LOSS * Math.max(counts.counted, 1),
    ...(absolute !== undefined && Number.isFinite(absolute) && { absolute_sum: absolute }),
    ...(metrics && Object.values(metrics).every(Number.isFinite) && { metrics }),
  };
}
