/** The page: draws the Views of the worker, and sends it the owner's Commands. */

import type { Command, PauseReason, View } from "../agent/messages.js";
import { Conditions } from "./conditions.js";
import { element, say } from "./elements.js";
import { keepCopy, removeCopy } from "./own_copy.js";
import { draw, drawLeaves, isWorking, offerPause, sayProblem } from "./render.js";
import { offerPicturesAgain, offerSources } from "./sources.js";
import { missingFeatures } from "./support.js";
import { TEXTS, translate } from "./words.js";

/** The worker's script; the build fills it in. */
declare const WORKER_URL: string;

/** Set once the owner wants to train, so that a page goes on when it is opened, or says that all is over. */
const TRAINING = "training";
const PAUSED = "paused";
/** Kept for this tab until it has joined. */
const TOKEN = "token";
/** How long the page waits for what the federation says of itself, so that nothing moves then. */
const LOOKED_MS = 2000;
/** The least time between two drawings. */
const DRAW_MS = 250;

// The operator's link escapes the token. It is a secret: it does not stay in the address bar.
const given = unescaped(location.hash.slice(1));
history.replaceState(null, "", location.pathname);
const token = given || (stored() ?? "");

/** The token of the tab, which a reload before the join has to keep. */
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
    return text; // the coordinator will refuse it, and say why
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
    return ownerPaused ? "owner" : conditions.pauseReason();
  }

  /** Sends the reason until a View shows it: a training that only begins may miss it. */
  function applyPause(): void {
    const reason = pauseReason();
    if (view !== null && isWorking(view.stage) && view.paused !== reason) send({ do: "pause", reason });
  }

  /** Draws soon. Views come with every batch: only the newest is drawn, a few times a second. */
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

  /** The page changes at once, not when the worker has begun. */
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
  // A page that the browser keeps for the back button would keep another one waiting.
  addEventListener("pagehide", () => worker.terminate());
  addEventListener("pageshow", ({ persisted }) => {
    if (persisted) location.reload();
  });
  const sure = element<HTMLDialogElement>("sure");
  element("leave").onclick = () => {
    sure.returnValue = ""; // the Escape key leaves the last answer as it was
    sure.showModal();
  };
  sure.onclose = () => {
    const answer = sure.returnValue;
    if (answer === "leave") send({ do: "leave" });
  };
  element("retry-now").onclick = () => send({ do: "retry" });
  addEventListener("online", () => send({ do: "retry" }));
  setInterval(redraw, 1000); // the seconds until a coordinator is asked again
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
