/** Draws a View. All text is set as text: nothing that was received is read as HTML. */

import type { PauseReason, Prediction, Problem, Stage, View } from "../agent/messages.js";
import { fieldsByLine, type Line } from "../agent/disclosure.js";
import { element, itemWith, say, write } from "./elements.js";
import { drawSources } from "./sources.js";
import { drawTrial } from "./trial.js";
import { messageOf, number, percent, TEXTS } from "./words.js";

/** Codes of refusals of a link with which nobody can join. */
const DEAD_LINKS = [
  "join.unknown-token",
  "join.expired-token",
  "join.revoked-token",
  "join.operator-token",
  "join.used-up-token",
];

/** State that the page knows and the worker does not. */
export interface Surroundings {
  /** Whether the link had a token. */
  canJoin: boolean;
  /** Whether the coordinator has sent the invitation of the token, or could not. */
  looked: boolean;
  /** Whether this device has left since the page was opened. */
  hasLeft: boolean;
  /** Why the training shall wait. The worker pauses after the current batch. */
  wanted: PauseReason | null;
  /** Percent of the battery used; null if the browser does not say. */
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
  const canJoin = surroundings.canJoin && !DEAD_LINKS.includes(view.problem?.code ?? "");
  const mayJoin = (stage === "new" || stage === "joining") && canJoin;
  const screen = working || stage === "finished" ? "work" : device !== null ? "member" : "joining";
  if (stage === "finished") offerTrialFirst();
  show(screen, {
    joining: mayJoin && surroundings.looked,
    shares: (mayJoin && surroundings.looked) || device !== null,
    work: screen === "work",
    try: working || (device !== null && view.model !== null),
    member: device !== null,
    choices: device !== null && stage !== "finished",
    end: device !== null,
  });
  say("status", statusOf(view, surroundings));
  say("bare-link", view.bareLink ? TEXTS.bareLink : "");
  drawProblem(view);
  drawInvitation(view);
  say("only-sums", view.secure === null ? "" : TEXTS.onlySums(view.secure.fewest));
  drawEvaluation(view);
  drawRetry(view);
  element("join").querySelector("button")!.disabled = stage === "joining";
  if (device !== null) {
    say("who", TEXTS.member(device.name, partOf(device.submodel)));
    say("operator-needs", TEXTS.operatorNeeds(device.id, device.submodel));
  }
  drawSources(view, screen === "work");
  say("data", dataOf(view));
  say("far-off", farOffOf(view));
  say("data-problem", view.dataProblem === null ? "" : messageOf(view.dataProblem));
  element<HTMLButtonElement>("train").disabled = data === null || view.preparing !== null;
  element("train").hidden = screen === "work";
  element("pause").classList.toggle("gone", !working);
  drawProgress(view);
  drawLosses(view);
  say("prediction", predictionOf(view));
  drawTrial(view);
  drawFacts(view, surroundings.batteryUsed);
  say("sent", view.bytesUp === 0 ? "" : TEXTS.sent(size(view.bytesUp)));
}

export function offerPause(ownerPaused: boolean): void {
  element("pause").textContent = ownerPaused ? TEXTS.resume : TEXTS.page.pause;
}

/** If the page is opened after the end, the model comes first. In an open page nothing moves by itself. */
function offerTrialFirst(): void {
  if (document.querySelector("main")!.dataset.screen !== "work") element("work").before(element("try"));
}

/** Shows the sections of a screen. A new screen gets the focus, because the focused button is gone. */
function show(screen: string, sections: Record<string, boolean>): void {
  for (const [id, shown] of Object.entries(sections)) element(id).hidden = !shown;
  const main = document.querySelector("main")!;
  const before = main.dataset.screen;
  main.dataset.screen = screen;
  if (before !== undefined && before !== screen) main.querySelector<HTMLElement>("section:not([hidden]) h2")!.focus();
}

function dataOf({ data, preparing }: View): string {
  if (preparing?.unit === "pictures") return TEXTS.preparing.pictures(preparing.done + 1, preparing.of);
  if (preparing !== null) return TEXTS.preparing.bytes(percent(preparing.done / Math.max(1, preparing.of)));
  return data === null ? TEXTS.noData : TEXTS.data(data.name, data.files, data.samples, size(data.bytes));
}

function farOffOf({ farOff }: View): string {
  if (farOff === null) return "";
  const range = ([low, high]: [number, number]): [string, string] => [loose(low), loose(high)];
  return TEXTS.farOff(farOff.channel + 1, range(farOff.own), range(farOff.usual));
}

/** A number of any size with two digits. */
function loose(value: number): string {
  return value.toLocaleString(TEXTS.language, { maximumSignificantDigits: 2 });
}

function partOf(submodel: string): string {
  const family = submodel.replace(/:.*/, "") as keyof typeof TEXTS.parts;
  return TEXTS.parts[family] ?? TEXTS.otherPart;
}

/** Draws the federation's description and the cost of taking part. */
function drawInvitation({ invitation }: View): void {
  if (invitation === null) return;
  const { title, purpose, contact, rounds, round_s, first_bytes, round_bytes } = invitation;
  if (title !== "") {
    say("heading", title);
    say("host", `${TEXTS.page.heading} · ${location.host}`);
  }
  say("purpose", purpose);
  say("contact", contact && TEXTS.contact(contact));
  // Without a last round, the size is that of each round.
  const all = rounds === 0 ? round_bytes : first_bytes + round_bytes * (rounds - 1);
  const minutes = number(Math.ceil(round_s / 60));
  say("estimate", TEXTS.estimate(rounds, minutes, all === 0 ? "" : size(all)));
}

/** Draws what is asked of this device if devices judge the models. */
function drawEvaluation({ stage, evaluation, byClass }: View): void {
  say("apart", evaluation === null ? "" : TEXTS.apart(percent(evaluation.share)));
  const box = element<HTMLInputElement>("by-class");
  box.closest("label")!.hidden = evaluation?.by_class !== true || stage === "finished";
  box.checked = byClass;
}

/** Draws the list of what leaves this device: a line for each kind of field in requests. */
export function drawLeaves(): void {
  const list = element("leaves");
  const fields = fieldsByLine();
  list.dataset.fields = fields.get("")!.join(", ");
  for (const line of Object.keys(TEXTS.leaves) as Line[]) {
    const item = itemWith(TEXTS.leaves[line]);
    item.dataset.fields = fields.get(line)!.join(", ");
    list.append(item);
  }
  list.append(itemWith(TEXTS.leavesAddress));
}

function statusOf(view: View, { wanted, canJoin, hasLeft }: Surroundings): string {
  const { stage, round, training, measured } = view;
  if (stage === "new" && hasLeft) return TEXTS.left;
  if (stage === "new" && !canJoin) return TEXTS.noToken;
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
  return `${TEXTS.round(round, view.invitation?.rounds ?? 0)}: ${words}${epoch}`;
}

function drawProblem({ stage, problem }: View): void {
  if (problem === null) return sayProblem("");
  sayProblem(messageOf(problem), stage === "joined" ? remedyOf(problem) : "");
}

/** Draws when a coordinator that is away is asked again. Screen readers do not read every second. */
function drawRetry({ problem }: View): void {
  const retryAt = problem?.retryAt ?? null;
  element("retry").hidden = retryAt === null;
  if (retryAt === null) return;
  say("retry-in", TEXTS.tryingAgain(Math.max(0, Math.ceil((retryAt - Date.now()) / 1000))));
}

function remedyOf({ code }: Problem): string {
  return TEXTS.remedies.find(([start]) => code.startsWith(start))?.[1] ?? "";
}

function drawProgress({ training, stage, round, invitation }: View): void {
  const bar = element<HTMLProgressElement>("progress");
  if (training === null || !isWorking(stage)) {
    bar.value = stage === "uploading" || stage === "finished" ? bar.max : 0;
    return write("left", stage === "finished" ? TEXTS.afterTheEnd : "");
  }
  const { epoch, epochs, batch, batches, batchSeconds } = training;
  bar.max = epochs * batches;
  bar.value = (epoch - 1) * batches + batch;
  if (batchSeconds === null) return write("left", "");
  const minutes = (batches: number): number => Math.round((batches * batchSeconds) / 60);
  const left = bar.max - bar.value;
  const rounds = (invitation?.rounds ?? 0) - round;
  const all = rounds > 0 ? ` ${TEXTS.allLeft(minutes(left + rounds * bar.max))}` : "";
  write("left", `${TEXTS.minutesLeft(minutes(left))}${all}`);
}

function drawLosses({ losses }: View): void {
  const chart = document.getElementById("chart")!;
  const [first, last] = [losses[0], losses.at(-1)];
  chart.setAttribute("aria-hidden", `${first === last}`);
  if (first === undefined || last === undefined) return write("losses", "");
  if (first === last) return write("losses", TEXTS.oneLoss(last.round, loss(last.loss)));
  const caption = TEXTS.losses(first.round, loss(first.loss), last.round, loss(last.loss));
  if (chart.getAttribute("aria-label") === caption) return;
  write("losses", caption);
  chart.setAttribute("aria-label", caption);
  const most = Math.max(...losses.map(({ loss }) => loss), Number.MIN_VALUE);
  const points = losses.map(({ round, loss }) => {
    const x = 14 + (292 * (round - first.round)) / (last.round - first.round);
    return `${x.toFixed(1)},${(88 - (76 * loss) / most).toFixed(1)}`;
  });
  document.getElementById("curve")!.setAttribute("points", points.join(" "));
}

function predictionOf({ predictions }: View): string {
  if (predictions === null) return "";
  const { round, before, after } = predictions;
  const share = ({ probability }: Prediction): string => percent(probability);
  return TEXTS.predictions(round, before.name, share(before), after.name, share(after));
}

/** Draws the current facts. If a fact does not hold now, its line stays empty. */
function drawFacts(view: View, batteryUsed: number | null): void {
  const passLoss = view.training?.loss ?? null;
  const minutes = number(view.trainedSeconds / 60, 1);
  const facts: [text: string, holds: boolean][] = [
    [TEXTS.sinceOpened(minutes, size(view.bytesDown), size(view.bytesUp), batteryUsed), true],
    [view.persisted ? TEXTS.persisted : TEXTS.notPersisted, view.persisted !== null],
    [TEXTS.passLoss(passLoss === null ? "" : loss(passLoss)), passLoss !== null],
    [TEXTS.keepOpen, isWorking(view.stage)],
  ];
  const list = element("facts");
  while (list.children.length < facts.length) list.append(document.createElement("li"));
  facts.forEach(([text, holds], index) => {
    const item = list.children[index]!;
    if (item.textContent !== text) item.textContent = text;
    item.classList.toggle("gone", !holds);
  });
}

function size(bytes: number): string {
  return bytes < 1e6 ? `${number(Math.ceil(bytes / 1e3))} kB` : `${number(bytes / 1e6, 1)} MB`;
}

function loss(value: number): string {
  return value.toLocaleString(TEXTS.language, { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
}
