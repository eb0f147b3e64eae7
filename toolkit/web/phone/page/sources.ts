/** The fields in which an owner chooses data: pictures by class, CSV files, or arrays. */

import type { Source } from "../agent/preparation.js";
import type { Preprocessing } from "../agent/sample_form.js";
import { element, say } from "./elements.js";
import { TEXTS } from "./words.js";

/** Pictures that were chosen or taken, but not yet used, by class. */
const chosen = new Map<string, File[]>();

export function offerSources(use: (source: Source) => void): void {
  const npz = element<HTMLInputElement>("npz");
  npz.onchange = () => {
    const [file] = taken(npz);
    if (file) use({ kind: "npz", file });
  };
  const csv = element<HTMLInputElement>("csv");
  csv.onchange = () => {
    const files = taken(csv);
    if (files.length > 0) use({ kind: "series", files });
  };
  element("use-pictures").onclick = () => {
    const pictures = [...chosen].flatMap(([label, files]) => files.map((file) => ({ file, label })));
    use({ kind: "images", pictures });
  };
}

/** The files of a field. Afterwards it is empty, so that a file that was corrected can come again. */
function taken(field: HTMLInputElement): File[] {
  const files = [...(field.files ?? [])];
  field.value = "";
  return files;
}

let drawn: string | null = null;

/** Shows the fields for what the federation takes. */
export function drawSources(preprocessing: Preprocessing | null): void {
  const text = JSON.stringify(preprocessing);
  if (text === drawn) return;
  drawn = text;
  element("pictures").hidden = preprocessing?.kind !== "images";
  element("series").hidden = preprocessing?.kind !== "series";
  element<HTMLDetailsElement>("arrays").open = preprocessing === null;
  chosen.clear();
  if (preprocessing?.kind === "images") {
    element("classes").replaceChildren(...preprocessing.classes.map(fieldOf));
    offerUse();
  }
  if (preprocessing?.kind === "series") {
    const { columns, label, classes } = preprocessing;
    say("csv-help", TEXTS.csvHelp(columns.join(", "), label, classes.join(", ")));
  }
}

/** The field for pictures of one class. What is chosen there is added to what was chosen before. */
function fieldOf(name: string, place: number): HTMLElement {
  const field = document.createElement("div");
  const label = document.createElement("label");
  const input = document.createElement("input");
  label.htmlFor = input.id = `class-${place}`;
  label.textContent = TEXTS.picturesOf(name, 0);
  Object.assign(input, { type: "file", accept: "image/*", multiple: true });
  input.onchange = () => {
    const files = [...(chosen.get(name) ?? []), ...taken(input)];
    chosen.set(name, files);
    label.textContent = TEXTS.picturesOf(name, files.length);
    offerUse();
  };
  field.append(label, input);
  return field;
}

function offerUse(): void {
  const count = [...chosen.values()].reduce((sum, files) => sum + files.length, 0);
  const button = element<HTMLButtonElement>("use-pictures");
  button.disabled = count === 0;
  button.textContent = TEXTS.usePictures(count);
}
