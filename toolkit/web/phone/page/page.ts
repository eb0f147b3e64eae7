/** The page: draws the Views of the worker, and sends it the owner's Commands. */

import type { Command, PauseReason, View } from "../agent/messages.js";
import { Conditions } from "./conditions.js";
import { draw, element, say } from "./render.js";
import { TEXTS } from "./texts.js";

/** The worker's script; the build fills it in. */
declare const WORKER_URL: string;

/** Set while the owner wants to train, so that a reloaded page goes on by itself. */
const TRAINING = "training";

const token = location.hash.slice(1);
// The token is a secret: it does not stay in the address bar or in the history.
history.replaceState(null, "", location.pathname);

async function missingFeature(): Promise<string | null> {
  if (typeof WebAssembly === "undefined") return "WebAssembly";
  if (!("locks" in navigator)) return "Web Locks";
  if (typeof navigator.storage?.getDirectory !== "function") return "private file system";
  try {
    await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"]);
  } catch {
    return "Ed25519 keys";
  }
  return null;
}

function start(): void {
  const worker = new Worker(WORKER_URL, { type: "module" });
  const send = (command: Command): void => worker.postMessage(command);
  let view: View | null = null;
  let ownerPaused = false;
  const conditions = new Conditions(() => applyPause());

  function applyPause(): void {
    const reason: PauseReason | null = ownerPaused ? "owner" : conditions.pauseReason();
    if (view !== null && view.paused !== reason) send({ do: "pause", reason });
  }

  worker.onmessage = ({ data }: MessageEvent<{ view: View }>) => {
    const first = view === null;
    const before = view?.stage;
    view = data.view;
    draw(view, token !== "", conditions.batteryUsed());
    conditions.keepAwake(view.stage === "training");
    if (view.stage === "finished") localStorage.removeItem(TRAINING);
    if (first && view.device !== null && view.data !== null && localStorage.getItem(TRAINING)) {
      send({ do: "train" });
    }
    if (before === "joining" && view.device !== null) void navigator.storage.persist();
    // A training that begins takes over what the owner and the page have set.
    if (before === "joined" && view.stage === "waiting") applyPause();
  };
  worker.onerror = (event) => say("problem", event.message || "The page's worker has failed.");

  element<HTMLFormElement>("join").onsubmit = (event) => {
    event.preventDefault();
    send({ do: "join", token, name: element<HTMLInputElement>("name").value });
  };
  const file = element<HTMLInputElement>("file");
  file.onchange = () => {
    const chosen = file.files?.[0];
    if (chosen) send({ do: "data", file: chosen });
  };
  element("train").onclick = () => {
    localStorage.setItem(TRAINING, "yes");
    send({ do: "train" });
  };
  const pause = element<HTMLButtonElement>("pause");
  pause.onclick = () => {
    ownerPaused = !ownerPaused;
    pause.textContent = ownerPaused ? TEXTS.resume : TEXTS.pause;
    applyPause();
  };
  const sure = element<HTMLDialogElement>("sure");
  element("leave").onclick = () => sure.showModal();
  sure.onclose = () => {
    const chosen = sure.returnValue;
    if (chosen !== "leave" && chosen !== "erase") return;
    localStorage.clear();
    send({ do: chosen });
  };
}

async function open(): Promise<void> {
  say("host", TEXTS.host(location.host));
  if (!isSecureContext) return say("problem", TEXTS.insecure);
  const missing = await missingFeature();
  if (missing !== null) return say("problem", TEXTS.missing(missing));
  void navigator.serviceWorker?.register("./service-worker.js").catch(() => undefined);
  // Held until the page closes: two tabs would train with one key and the same files.
  await navigator.locks.request("edgetailor", { ifAvailable: true }, async (lock) => {
    if (lock === null) return say("problem", TEXTS.otherTab);
    start();
    await new Promise(() => undefined);
  });
}

void open();
