/** The owner's conditions for training: the screen, the charger, the connection. */

import type { PauseReason } from "../agent/messages.js";
import { element } from "./elements.js";

interface Battery extends EventTarget {
  charging: boolean;
  level: number;
}
interface Connection extends EventTarget {
  type?: string;
  saveData?: boolean;
}
type Extended = Navigator & { getBattery?: () => Promise<Battery>; connection?: Connection };

const BOXES = ["awake", "hidden", "unplugged", "metered"] as const;
type Box = (typeof BOXES)[number];

export class Conditions {
  private battery: Battery | null = null;
  private levelAtStart: number | null = null;
  private screen: Promise<WakeLockSentinel | null> | null = null;
  private training = false;
  private readonly connection = (navigator as Extended).connection ?? null;

  /** `changed` is called when the reason to pause may have changed. */
  constructor(changed: () => void) {
    for (const box of BOXES) {
      const input = element<HTMLInputElement>(box);
      input.checked = localStorage.getItem(box) === "yes";
      input.onchange = () => {
        localStorage.setItem(box, input.checked ? "yes" : "no");
        this.keepAwake(this.training);
        changed();
      };
    }
    document.addEventListener("visibilitychange", () => {
      this.keepAwake(this.training); // a hidden page loses its wake lock
      changed();
    });
    if ("wakeLock" in navigator) this.offer("awake");
    if (this.connection !== null) {
      this.offer("metered");
      this.connection.addEventListener("change", changed);
    }
    void (navigator as Extended).getBattery?.().then((battery) => {
      this.battery = battery;
      this.levelAtStart = battery.level;
      this.offer("unplugged");
      battery.addEventListener("chargingchange", changed);
      changed();
    });
  }

  pauseReason(): PauseReason | null {
    if (this.chosen("hidden") && document.hidden) return "hidden";
    if (this.chosen("unplugged") && this.battery?.charging === false) return "unplugged";
    const metered = this.connection?.type === "cellular" || this.connection?.saveData === true;
    if (this.chosen("metered") && metered) return "metered";
    return null;
  }

  /** Percent of the battery used since the page was opened; null if the browser does not say. */
  batteryUsed(): number | null {
    if (this.battery === null || this.levelAtStart === null) return null;
    return Math.max(0, Math.round((this.levelAtStart - this.battery.level) * 100));
  }

  /** Keeps the screen on while `training`, if the owner has agreed. */
  keepAwake(training: boolean): void {
    this.training = training;
    const wanted = training && this.chosen("awake") && !document.hidden;
    if (wanted && this.screen === null) {
      // The browser refuses, for example, when the battery is low.
      this.screen = navigator.wakeLock.request("screen").catch(() => null);
    } else if (!wanted && this.screen !== null) {
      void this.screen.then((lock) => lock?.release());
      this.screen = null;
    }
  }

  private offer(box: Box): void {
    element(box).closest("label")!.hidden = false;
  }

  private chosen(box: Box): boolean {
    return element<HTMLInputElement>(box).checked;
  }
}
