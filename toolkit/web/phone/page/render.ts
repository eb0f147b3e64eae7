/** Draws a View. All text is set as text: nothing that came from elsewhere is read as HTML. */

import type { PauseReason, Prediction, Problem, Stage, View } from "../agent/messages.js";
import { sentenceOf } from "../agent/faults.js";
import { element, say } from "./elements.js";
import { drawSources } from "./sources.js";
import { number, percent, TEXTS } from "./words.js";

/** What the page knows and the worker does not. */
export interface Surroundings {
  /** Whether the link had a token. */
  canJoin: boolean;
  /** Why the training shall wait. The worker gets there after the current batch. */
  wanted: PauseReason | null;
  /** Percent; null if the browser does not say. */
  batteryUsed: number | null;
}

export function sayProblem(message: string, remedy = ""): void {
  say("problem-message", message);
  say("problem-remedy", remedy);
  element("problem").hidden = message === "";
}

export function isWorking(stage: Stage): boolean {
  return !["starting", "held", "new", "joining", "joined", "leaving", "finished"].includes(stage);
}

export function draw(view: View, surroundings: Surroundings): void {
  const { stage, device, data } = view;
  const working = isWorking(stage);
  const mayJoin = (stage === "new" || stage === "joining") && surroundings.canJoin;
  const screen = working || stage === "finished" ? "work" : device !== null ? "member" : "joining";
  show(screen, {
    joining: mayJoin,
    shares: mayJoin || device !== null,
    work: screen === "work",
    member: device !== null,
    choices: screen !== "joining",
    end: device !== null,
  });
  say("status", statusOf(view, surroundings.wanted));
  drawProblem(view, surroundings.canJoin);
  drawRetry(view);
  element("join").querySelector("button")!.disabled = stage === "joining";
  if (device !== null) say("who", TEXTS.member(device.name, device.id, device.submodel));
  drawSources(view.preprocessing);
  say("data", dataOf(view));
  document.querySelector<HTMLElement>(".source")!.hidden = screen === "work";
  element<HTMLButtonElement>("train").disabled = data === null || view.preparing !== null;
  element("train").hidden = screen === "work";
  element("pause").hidden = !working;
  drawProgress(view);
  drawLosses(view);
  say("prediction", predictionOf(view));
  drawFacts(view, surroundings.batteryUsed);
  say("sent", view.bytesUp === 0 ? "" : `(${TEXTS.sent(size(view.bytesUp))})`);
}

export function offerPause(ownerPaused: boolean): void {
  element("pause").textContent = ownerPaused ? TEXTS.resume : TEXTS.page.pause;
}

/** Shows the sections of a screen. A new screen gets the focus, which its button had before. */
function show(screen: string, sections: Record<string, boolean>): void {
  for (const [id, shown] of Object.entries(sections)) element(id).hidden = !shown;
  const main = document.querySelector("main")!;
  const before = main.dataset.screen;
  main.dataset.screen = screen;
  if (before !== undefined && before !== screen) element(`${screen}-title`).focus();
}

function dataOf({ data, preparing }: View): string {
  if (preparing !== null) return TEXTS.preparing(preparing.done + 1, preparing.of);
  return data === null ? TEXTS.noData : TEXTS.data(data.name, data.files, data.samples, size(data.bytes));
}

function statusOf(view: View, wanted: PauseReason | null): string {
  const { stage, round, training, measured } = view;
  if (measured !== null && stage === "joining") return TEXTS.measuring(Math.round(100 * measured));
  if (stage === "paused" && view.paused !== null) return TEXTS.paused[view.paused];
  if (stage === "training" && wanted !== null) return TEXTS.pausing;
  if (stage === "joined" && view.data === null) return TEXTS.chooseData;
  if (stage === "waiting" && view.joined < view.expected) {
    return TEXTS.waitingFor(view.joined, view.expected);
  }
  const words = TEXTS.stages[stage];
  if (!isWorking(stage) || round === 0) return words;
  const epoch = training && stage === "training" ? `, ${TEXTS.epoch(training.epoch, training.epochs)}` : "";
  return `${TEXTS.round(round)}: ${words}${epoch}`;
}

function drawProblem({ stage, problem }: View, canJoin: boolean): void {
  if (problem !== null) sayProblem(sentenceOf(problem.fault, TEXTS.faults), stage === "joined" ? remedyOf(problem) : "");
  else sayProblem(stage === "new" && !canJoin ? TEXTS.noToken : "");
}

/** When a coordinator that is away is asked again. Screen readers are not told of every second. */
function drawRetry({ problem }: View): void {
  const retryAt = problem?.retryAt ?? null;
  element("retry").hidden = retryAt === null;
  if (retryAt === null) return;
  say("retry-in", TEXTS.tryingAgain(Math.max(0, Math.ceil((retryAt - Date.now()) / 1000))));
}

function remedyOf({ code }: Problem): string {
  return TEXTS.remedies.find(([start]) => code.startsWith(start))?.[1] ?? "";
}

function drawProgress({ training, stage }: View): void {
  const bar = element<HTMLProgressElement>("progress");
  bar.hidden = training === null || !isWorking(stage);
  if (training === null || bar.hidden) return say("left", "");
  const { epoch, epochs, batch, batches, batchSeconds } = training;
  bar.max = epochs * batches;
  bar.value = (epoch - 1) * batches + batch;
  const left = batchSeconds === null ? null : ((bar.max - bar.value) * batchSeconds) / 60;
  say("left", left === null ? "" : TEXTS.minutesLeft(Math.round(left)));
}

function drawLosses({ losses }: View): void {
  const chart = document.getElementById("chart")!;
  chart.toggleAttribute("hidden", losses.length < 2);
  const [first, last] = [losses[0], losses.at(-1)];
  if (first === undefined || last === undefined) return say("losses", "");
  if (first === last) return say("losses", TEXTS.oneLoss(last.round, loss(last.loss)));
  const caption = TEXTS.losses(first.round, loss(first.loss), last.round, loss(last.loss));
  say("losses", caption);
  chart.setAttribute("aria-label", caption);
  const most = Math.max(...losses.map((one) => one.loss), Number.MIN_VALUE);
  const points = losses.map((one) => {
    const x = 14 + (292 * (one.round - first.round)) / (last.round - first.round);
    return `${x.toFixed(1)},${(88 - (76 * one.loss) / most).toFixed(1)}`;
  });
  document.getElementById("curve")!.setAttribute("points", points.join(" "));
}

function predictionOf({ predictions }: View): string {
  if (predictions === null) return "";
  const { round, before, after } = predictions;
  const share = ({ probability }: Prediction): string => percent(probability);
  return TEXTS.predictions(round, before.name, share(before), after.name, share(after));
}

function drawFacts(view: View, batteryUsed: number | null): void {
  const passLoss = view.training?.loss ?? null;
  const facts = [
    ...(passLoss === null ? [] : [TEXTS.passLoss(loss(passLoss))]),
    TEXTS.trained(number(view.trainedSeconds / 60, 1)),
    TEXTS.traffic(size(view.bytesDown), size(view.bytesUp)),
    ...(batteryUsed === null ? [] : [TEXTS.battery(batteryUsed)]),
    ...(view.persisted === null ? [] : [view.persisted ? TEXTS.persisted : TEXTS.notPersisted]),
    ...(isWorking(view.stage) ? [TEXTS.keepOpen] : []),
  ];
  const items = facts.map((fact) => {
    const item = document.createElement("li");
    item.textContent = fact;
    return item;
  });
  element("facts").replaceChildren(...items);
}

function size(bytes: number): string {
  return bytes < 1e6 ? `${number(Math.ceil(bytes / 1e3))} kB` : `${number(bytes / 1e6, 1)} MB`;
}

function loss(value: number): string {
  return value.toLocaleString(TEXTS.language, { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
}
