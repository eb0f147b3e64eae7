/** What this device does now: its stage, the pauses of its owner, and its waits. */

import type { CoordinatorClient } from "./client.js";
import type { PauseReason, View } from "./messages.js";
import { Stopped } from "./requests.js";
import { PAUSES } from "../texts/english_faults.js";

/** How often a running training asks whether its round is still open. */
export const ROUND_CHECK_MS = 60_000;

type WorkingStage = "waiting" | "downloading" | "training" | "evaluating" | "uploading";

export class Stages {
  /** Whether the coordinator has said that the last round is over. Then no stage is shown. */
  over = false;
  /** The stage of the device, also the one to return to after a pause. */
  private stage: WorkingStage = "waiting";
  private pause: PauseReason | null = null;
  private stopped = false;
  private wake: () => void = () => undefined;
  private pausedMs = 0;

  constructor(
    private readonly client: CoordinatorClient,
    private readonly show: (change: Partial<View>) => void,
  ) {}

  /** Pauses or continues. Ends a running request, which may be stuck; its next attempt continues it. */
  setPause(reason: PauseReason | null): void {
    if (reason === this.pause) return;
    this.pause = reason;
    this.client.interrupt();
    this.wake();
  }

  /** Ends a wait, for example when the network is back. */
  askNow(): void {
    this.client.interrupt();
    this.wake();
  }

  stop(): void {
    this.stopped = true;
    this.client.interrupt();
    this.wake();
  }

  /** Waits for the next round, and does not report it: the coordinator knows. */
  wait(): void {
    this.stage = "waiting";
    this.show({ stage: "waiting", training: null });
  }

  /** Begins a stage, and reports it. */
  async enter(stage: WorkingStage): Promise<void> {
    this.stage = stage;
    this.show({ stage });
    await this.client.progress(stage);
  }

  /** Returns at once, or when the owner continues. */
  async whilePaused(): Promise<void> {
    if (this.stopped) throw new Stopped();
    if (this.pause === null) return;
    const begun = performance.now();
    while (this.pause !== null) {
      const reason: PauseReason = this.pause;
      if (!this.over) {
        this.show({ stage: "paused", paused: reason, problem: null });
        await this.client.progress("paused", null, PAUSES[reason]);
      }
      // The owner may have continued during the request.
      if (this.pause === reason) await this.rest(ROUND_CHECK_MS);
    }
    this.show({ paused: null });
    if (!this.over) await this.enter(this.stage);
    this.pausedMs += performance.now() - begun;
  }

  /** Milliseconds since the page was opened, without pauses. */
  unpausedMs(): number {
    return performance.now() - this.pausedMs;
  }

  /** Waits, but ends early if the owner pauses, continues or leaves. */
  async rest(milliseconds: number): Promise<void> {
    if (this.stopped) throw new Stopped();
    await new Promise<void>((done) => {
      const timer = setTimeout(done, milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        done();
      };
    });
    if (this.stopped) throw new Stopped();
  }
}
