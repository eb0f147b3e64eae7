/** The fields in which an owner chooses data: pictures by class, CSV files, or arrays. */

import type { View } from "../agent/messages.js";
import type { Preprocessing, Source } from "../agent/sample_form.js";
import { element, say } from "./elements.js";
import { PictureChoice } from "./pictures.js";
import { TEXTS } from "./words.js";

let choice: PictureChoice | null = null;

/** Offers the chosen pictures again, although they were used before. */
export function offerPicturesAgain(): void {
  choice?.setUsed(false);
}

/** @param use Gets the chosen files, and whether to add them to the data of the page. */
export function offerSources(use: (source: Source, adding: boolean) => void): void {
  const adding = (): boolean => {
    const box = element<HTMLInputElement>("add");
    return box.checked && !element("adding").hidden;
  };
  const npz = element<HTMLInputElement>("npz");
  npz.onchange = () => {
    const [file] = taken(npz);
    if (file) use({ kind: "npz", file }, adding());
  };
  const csv = element<HTMLInputElement>("csv");
  csv.onchange = () => {
    const files = taken(csv);
    if (files.length > 0) use({ kind: "series", files }, adding());
  };
  element("use-pictures").onclick = () => {
    if (choice === null) return;
    use({ kind: "images", pictures: choice.pictures }, adding());
    choice.setUsed(true);
  };
  element("add").onchange = offerPicturesAgain;
  const change = element("change");
  change.onclick = () => change.setAttribute("aria-expanded", `${change.ariaExpanded !== "true"}`);
  change.addEventListener("click", () => showSource(true));
}

/** Takes the files of a field and empties it, so that a corrected file can be chosen again. */
export function taken(field: HTMLInputElement): File[] {
  const files = [...(field.files ?? [])];
  field.value = "";
  return files;
}

/** Shows the fields. While a training runs, they are shown only on demand. */
function showSource(training: boolean): void {
  element("source").hidden = training && element("change").ariaExpanded !== "true";
}

let drawn: string | null = null;

/** Shows the fields for the kind of data that the federation takes. */
export function drawSources({ stage, preprocessing, data, preparing }: View, training: boolean): void {
  const over = stage === "finished";
  element("change").hidden = element("change-about").hidden = !training || over;
  showSource(training);
  if (over) element("source").hidden = true;
  element("adding").hidden = data === null;
  element<HTMLFieldSetElement>("source").disabled = preparing !== null;
  const text = JSON.stringify(preprocessing);
  if (text === drawn) return;
  drawn = text;
  drawFields(preprocessing);
}

function drawFields(preprocessing: Preprocessing | null): void {
  element("pictures").hidden = preprocessing?.kind !== "images";
  element("series").hidden = preprocessing?.kind !== "series";
  element<HTMLDetailsElement>("arrays").open = preprocessing === null;
  if (preprocessing?.kind === "images") choice = new PictureChoice(preprocessing.classes);
  if (preprocessing?.kind === "series") {
    const { columns, label, classes } = preprocessing;
    say("csv-help", TEXTS.csvHelp(columns.join(", "), label, classes.join(", ")));
  }
}
