/** "Try the model": takes a file of the owner, and draws the answer of the model. */

import type { Answer, SingleAnswer, Trial, View } from "../agent/messages.js";
import { element, itemWith, say, write } from "./elements.js";
import { taken } from "./sources.js";
import { dayOf, messageOf, percent, TEXTS } from "./words.js";

const ACCEPTED = { images: "image/*", series: ".csv,text/csv", arrays: ".npz" };
/** The most classes, and the most numbers or positions, that are shown. */
const MOST_CLASSES = 5;
const MOST_VALUES = 50;

let picture: string | null = null;

/** @param use Gets the chosen file. */
export function offerTrial(use: (file: File) => void): void {
  const field = element<HTMLInputElement>("try-file");
  field.onchange = () => {
    const [file] = taken(field);
    if (file === undefined) return;
    if (picture !== null) URL.revokeObjectURL(picture);
    picture = URL.createObjectURL(file);
    element("try-picture").replaceChildren(Object.assign(new Image(), { src: picture, alt: "" }));
    use(file);
  };
}

let drawn: Trial | null = null;

export function drawTrial(view: View): void {
  const { stage, model, refusedRelease, preprocessing, trying, trial, trialProblem } = view;
  const kind = preprocessing?.kind ?? "arrays";
  write("try-model", modelOf(stage === "training", model));
  say("try-refused", refusedRelease === null ? "" : TEXTS.refusedRelease(refusedRelease));
  write("try-label", TEXTS.tryFile[kind]);
  element<HTMLInputElement>("try-file").accept = ACCEPTED[kind];
  element<HTMLFieldSetElement>("try-source").disabled = model === null || trying || stage === "training";
  say("try-problem", trialProblem === null ? "" : messageOf(trialProblem));
  element("try-picture").hidden = trial?.sample.is !== "picture";
  say("try-about", trial === null ? "" : aboutOf(trial));
  say("try-answer", trying ? TEXTS.trying : trial === null ? "" : sentenceOf(trial));
  if (trial === drawn) return;
  drawn = trial;
  const items = trial === null ? [] : classesOf(trial);
  element("try-classes").replaceChildren(...items);
  element("try-classes").hidden = items.length === 0;
}

function modelOf(training: boolean, model: View["model"]): string {
  if (model === null) return TEXTS.noModel;
  if (training) return TEXTS.tryLater;
  const { right } = model;
  const judged = right ? ` ${TEXTS.right(right.right, right.of, percent(right.right / Math.max(1, right.of)))}` : "";
  return nameOfModel(model) + judged;
}

/** Which model it is: the personal one, a release, or the shared model of a round. */
function nameOfModel({ round, personal, last, release }: NonNullable<View["model"]>): string {
  if (personal) return TEXTS.personalModel(round);
  if (release) return TEXTS.releasedModel(release.number, round, dayOf(release.issued));
  return last ? TEXTS.lastModel : TEXTS.model(round);
}

function aboutOf({ file, sample }: Trial): string {
  if (sample.is === "window") return TEXTS.tried(file, sample.lines);
  return sample.is === "array" ? TEXTS.triedFirst(file, sample.of) : file;
}

function nameOf(index: number, names: readonly string[]): string {
  return names[index] ?? TEXTS.className(index);
}

/** A probability in percent. No model is certain, also if its share would round to 0 or 100. */
function shareOf(probability: number): string {
  if (probability >= 0.995) return TEXTS.almostCertain;
  return probability < 0.005 ? TEXTS.almostImpossible : percent(probability);
}

function sentenceOf({ answer, names }: Trial): string {
  if (answer.is === "classes") {
    const [best] = ordered(answer);
    return TEXTS.mostProbable(nameOf(best!.index, names), shareOf(best!.probability));
  }
  if (answer.is !== "outputs") return TEXTS.answer(textOf(answer, names));
  return TEXTS.answer(answer.outputs.map((output) => `${output.name}: ${textOf(output.answer, [])}`).join("; "));
}

function textOf(answer: SingleAnswer, names: readonly string[]): string {
  switch (answer.is) {
    case "classes": {
      const [best] = ordered(answer);
      return `${nameOf(best!.index, names)} (${shareOf(best!.probability)})`;
    }
    case "questions":
      return listed(answer.probabilities.map((probability, index) => `${nameOf(index, names)} (${shareOf(probability)})`));
    case "sequence":
      return listed(answer.classes.map((index) => nameOf(index, names))) || TEXTS.emptySequence;
    case "numbers":
      return listed(answer.numbers.map((value) => value.toLocaleString(TEXTS.language, FOUR_DIGITS)));
  }
}

const FOUR_DIGITS = { maximumSignificantDigits: 4 };

function listed(values: string[]): string {
  return [...values.slice(0, MOST_VALUES), ...(values.length > MOST_VALUES ? ["…"] : [])].join("; ");
}

function ordered({ probabilities }: Answer & { is: "classes" }): { index: number; probability: number }[] {
  return probabilities
    .map((probability, index) => ({ probability, index }))
    .sort((one, other) => other.probability - one.probability);
}

/** The most probable classes, each with a bar. The numbers are text; screen readers skip the bars. */
function classesOf({ answer, names }: Trial): HTMLElement[] {
  if (answer.is !== "classes") return [];
  const all = ordered(answer);
  const items = all.slice(0, MOST_CLASSES).map(({ index, probability }) => {
    const [name, share, bar] = [document.createElement("span"), document.createElement("span"), progress(probability)];
    name.textContent = nameOf(index, names);
    share.textContent = shareOf(probability);
    const item = itemWith(name);
    item.append(share, bar);
    return item;
  });
  const more = all.length - items.length;
  return more === 0 ? items : [...items, itemWith(TEXTS.moreClasses(more))];
}

function progress(value: number): HTMLProgressElement {
  const bar = document.createElement("progress");
  bar.setAttribute("aria-hidden", "true");
  bar.value = value;
  return bar;
}
