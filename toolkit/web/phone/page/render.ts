/** Draws a View. All text is set as text: nothing that came from elsewhere is read as HTML. */

import type { View } from "../agent/messages.js";
import { TEXTS } from "./texts.js";

export function element<T extends HTMLElement = HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

/** Shows `text` in the element `id`, which is hidden while it has none. */
export function say(id: string, text: string): void {
  const place = element(id);
  if (place.textContent !== text) place.textContent = text;
  place.hidden = text === "";
}

function size(bytes: number): string {
  return bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** @param canJoin Whether the link had a token. */
export function draw(view: View, canJoin: boolean, batteryUsed: number | null): void {
  const { stage, device, data } = view;
  const isNew = stage === "new" || stage === "joining";
  const working = !["starting", "new", "joining", "joined"].includes(stage);
  say("problem", view.problem?.message ?? (stage === "new" && !canJoin ? TEXTS.noToken : ""));
  element("joining").hidden = !isNew || !canJoin;
  element("join").querySelector("button")!.disabled = stage === "joining";
  element("member").hidden = device === null;
  element("end").hidden = device === null;
  element("work").hidden = !working;
  if (device !== null) say("who", TEXTS.member(device.name, device.id, device.submodel));
  say("data", data === null ? TEXTS.noData : TEXTS.data(data.name, data.samples, size(data.bytes)));
  element<HTMLButtonElement>("train").disabled = data === null;
  element("train").hidden = working;
  element<HTMLInputElement>("file").disabled = working;
  if (!working) return;
  say("status", statusOf(view));
  drawProgress(view);
  drawLosses(view.losses);
  const facts = [
    TEXTS.trained((view.trainedSeconds / 60).toFixed(1)),
    TEXTS.traffic(size(view.bytesDown), size(view.bytesUp)),
    ...(batteryUsed === null ? [] : [TEXTS.battery(batteryUsed)]),
    ...(view.persisted === null ? [] : [view.persisted ? TEXTS.persisted : TEXTS.notPersisted]),
    TEXTS.keepOpen,
  ];
  const list = element("facts");
  list.replaceChildren(
    ...facts.map((fact) => {
      const item = document.createElement("li");
      item.textContent = fact;
      return item;
    }),
  );
}

function statusOf(view: View): string {
  if (view.stage === "paused" && view.paused !== null) return TEXTS.paused[view.paused];
  if (view.stage === "waiting" && view.joined < view.expected) {
    return TEXTS.waitingFor(view.joined, view.expected);
  }
  const words = TEXTS.stages[view.stage];
  if (view.stage === "finished" || view.round === 0) return words;
  const epoch = view.training && TEXTS.epoch(view.training.epoch, view.training.epochs);
  return [TEXTS.round(view.round), words, ...(epoch === null ? [] : [epoch])].join(": ");
}

function drawProgress({ training, stage }: View): void {
  const bar = element<HTMLProgressElement>("progress");
  bar.hidden = training === null || stage === "finished";
  if (training === null) return say("left", "");
  const { epoch, epochs, batch, batches, batchSeconds } = training;
  const done = (epoch - 1) * batches + batch;
  bar.max = epochs * batches;
  bar.value = done;
  const minutes = batchSeconds === null ? null : ((bar.max - done) * batchSeconds) / 60;
  say("left", minutes === null ? "" : TEXTS.minutesLeft(Math.round(minutes)));
}

function drawLosses(losses: View["losses"]): void {
  say("losses", losses.length ? TEXTS.losses(losses.map((one) => one.loss.toFixed(3)).join(", ")) : "");
  const chart = document.getElementById("chart")!;
  chart.toggleAttribute("hidden", losses.length < 2);
  if (losses.length < 2) return;
  const most = Math.max(...losses.map((one) => one.loss), 1e-9);
  const points = losses.map(
    ({ loss }, i) => `${8 + (304 * i) / (losses.length - 1)},${88 - (80 * loss) / most}`,
  );
  chart.querySelector("polyline")!.setAttribute("points", points.join(" "));
  chart.setAttribute("aria-label", element("losses").textContent ?? "");
}
