/** The page: draws the Views of the worker, and sends it the owner's Commands. */

import type { Command, PauseReason, View } from "../agent/messages.js";
import { Conditions } from "./owner_conditions.js";
import { element, say } from "./elements.js";
import { keepCopy, removeCopy } from "./own_copy.js";
import { draw, drawLeaves, isWorking, offerPause, sayProblem } from "./render.js";
import { offerPicturesAgain, offerSources } from "./sources.js";
import { missingFeatures } from "./support.js";
import { offerTrial } from "./trial.js";
import { TEXTS, translate } from "./words.js";

/** The worker's script; the build fills it in. */
declare const WORKER_URL: string;

/** Set when the owner starts training. When the page is opened again, it continues training. */
const TRAINING = "training";
const PAUSED = "paused";
/** Kept for this tab until it has joined. */
const TOKEN = "token";
/** How long the page waits for the federation's description before it draws, so that nothing moves later. */
const LOOKED_MS = 2000;
/** The shortest time between two drawings. */
const DRAW_MS = 250;

// The operator's link escapes the token. The token is secret, so remove it from the address bar.
const given = unescaped(location.hash.slice(1));
history.replaceState(null, "", location.pathname);
const token = given || (stored() ?? "");

/** The token of this tab. It must survive a reload before the join. */
function stored(): string | null {
  try {
    return sessionStorage.getItem(TOKEN);
  } catch {
    return null; // a browser without storage, which the page refuses below
  }
}

function unescaped(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // the coordinator will refuse it with a reason
  }
}

function start(): void {
  const worker = new Worker(WORKER_URL, { type: "module" });
  const send = (command: Command): void => worker.postMessage(command);
  let view: View | null = null;
  let drawing: ReturnType<typeof setTimeout> | null = null;
  let drawnAt = -Infinity;
  let promised: boolean | null = null;
  let resume = localStorage.getItem(TRAINING) !== null;
  let ownerPaused = localStorage.getItem(PAUSED) !== null;
  let hasLeft = false;
  let lookedUntil: number | null = null;
  if (given !== "") sessionStorage.setItem(TOKEN, given);
  const conditions = new Conditions(() => {
    applyPause();
    redraw();
  });

  function pauseReason(): PauseReason | null {
    return ownerPaused && view?.stage !== "finished" ? "owner" : conditions.pauseReason();
  }

  /** Sends the reason to pause until a View shows it, because a training that just begins may miss it. */
  function applyPause(): void {
    const reason = pauseReason();
    // After the end, releases come only if the conditions allow it.
    const asks = view !== null && (isWorking(view.stage) || view.stage === "finished");
    if (asks && view?.paused !== reason) send({ do: "pause", reason });
  }

  /** Draws soon. There is a View for every batch; only the newest is drawn, a few times a second. */
  function redraw(): void {
    drawing ??= setTimeout(drawNow, Math.max(0, drawnAt + DRAW_MS - performance.now()));
  }

  function drawNow(): void {
    drawing = null;
    drawnAt = performance.now();
    if (view === null) return;
    offerPause(ownerPaused);
    const shown = { ...view, persisted: promised ?? view.persisted };
    const answered = view.invitation !== null || view.problem !== null || view.stage === "joining";
    draw(shown, {
      canJoin: token !== "",
      looked: answered || (lookedUntil !== null && performance.now() > lookedUntil),
      hasLeft,
      wanted: pauseReason(),
      batteryUsed: conditions.batteryUsed(),
    });
  }

  /** Starts training. The page changes at once, before the worker has begun. */
  function train(): void {
    send({ do: "train" });
    if (view !== null) view = { ...view, stage: "waiting", problem: null };
    redraw();
  }

  function show(next: View): void {
    const last = view;
    view = next;
    if (next.dataProblem !== null && last?.dataProblem === null) offerPicturesAgain();
    const left = last !== null && last.device !== null && next.device === null;
    if (left) {
      localStorage.clear();
      ownerPaused = false;
      hasLeft = true;
    }
    if (next.device !== null) {
      sessionStorage.removeItem(TOKEN);
      hasLeft = false;
    } else if (next.stage === "new" && token !== "" && lookedUntil === null) {
      lookedUntil = performance.now() + LOOKED_MS;
      setTimeout(redraw, LOOKED_MS + 1);
      send({ do: "look", token });
    }
    if (next.device !== null && last?.device == null) keepCopy();
    if (next.stage === "new" && last?.stage !== "new") void removeCopy();
    if (resume && next.stage === "joined") {
      resume = false;
      if (next.data !== null) return train();
    }
    if (resume && next.stage === "finished") {
      // A federation that was over may have more rounds now.
      resume = false;
      send({ do: "train" });
    }
    conditions.keepAwake(next.stage === "training");
    applyPause();
    redraw();
  }

  worker.onmessage = ({ data }: MessageEvent<{ view: View }>) => show(data.view);
  worker.onerror = (event) => sayProblem(event.message || TEXTS.workerFailed);

  element<HTMLFormElement>("join").onsubmit = (event) => {
    event.preventDefault();
    send({ do: "join", token, name: element<HTMLInputElement>("name").value });
    void navigator.storage.persist().then((answer) => {
      promised = answer;
      redraw();
    });
  };
  offerSources((source, adding) => send({ do: "data", source, adding }));
  offerTrial((file) => send({ do: "try", file }));
  element("train").onclick = () => {
    localStorage.setItem(TRAINING, "yes");
    train();
  };
  element("pause").onclick = () => {
    ownerPaused = !ownerPaused;
    if (ownerPaused) localStorage.setItem(PAUSED, "yes");
    else localStorage.removeItem(PAUSED);
    applyPause();
    redraw();
  };
  // If the browser keeps this page for the back button, another page would have to wait for it.
  addEventListener("pagehide", () => worker.terminate());
  addEventListener("pageshow", ({ persisted }) => {
    if (persisted) location.reload();
  });
  const sure = element<HTMLDialogElement>("sure");
  element("leave").onclick = () => {
    sure.returnValue = ""; // the Escape key does not change the last answer
    sure.showModal();
  };
  sure.onclose = () => {
    const answer = sure.returnValue;
    if (answer === "leave") send({ do: "leave" });
  };
  const byClass = element<HTMLInputElement>("by-class");
  byClass.onchange = () => send({ do: "by-class", agreed: byClass.checked });
  element("retry-now").onclick = () => send({ do: "retry" });
  addEventListener("online", () => send({ do: "retry" }));
  setInterval(redraw, 1000); // updates the seconds until a coordinator is asked again
}

async function open(): Promise<void> {
  translate();
  drawLeaves();
  say("host", TEXTS.host(location.host));
  say("status", "");
  if (!isSecureContext) return sayProblem(TEXTS.insecure);
  const missing = await missingFeatures();
  if (missing.length > 0) return sayProblem(TEXTS.missing(missing));
  start();
}

void open();
