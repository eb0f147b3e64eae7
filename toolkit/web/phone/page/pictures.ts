/** The choice of pictures by class. Each is checked, shown small, and can be removed again. */

import { element, itemWith, say } from "./elements.js";
import { TEXTS } from "./words.js";

/** Pixels of the longer side of a small picture. */
const SMALL = 144;
/** The most small pictures of a class that are shown: thousands would fill the memory. */
const MOST_SHOWN = 60;

interface Picture {
  file: File;
  hash: string;
  /** URL of the small picture. */
  small: string;
}

export class PictureChoice {
  private chosen: [string, Picture[]][];
  private looking = 0;
  /** Whether the chosen pictures are already in use. */
  private used = false;
  private last: Promise<void> = Promise.resolve();

  constructor(classes: readonly string[]) {
    this.chosen = classes.map((name) => [name, []]);
    element("classes").replaceChildren(...classes.map((_, index) => this.fieldOf(index)));
    this.draw();
  }

  /** Sets whether the chosen pictures are in use. They cannot be used again until the choice changes. */
  setUsed(used: boolean): void {
    this.used = used;
    this.offerUse();
  }

  get pictures(): { file: File; label: string }[] {
    return this.chosen.flatMap(([label, pictures]) => pictures.map(({ file }) => ({ file, label })));
  }

  /** The field of a class. Pictures chosen there are added to those chosen before. */
  private fieldOf(index: number): HTMLElement {
    const field = document.createElement("div");
    const label = document.createElement("label");
    const input = document.createElement("input");
    const list = document.createElement("ul");
    label.htmlFor = input.id = `class-${index}`;
    list.id = `pictures-${index}`;
    list.className = "small-pictures";
    Object.assign(input, { type: "file", accept: "image/*", multiple: true });
    input.onchange = () => {
      const files = [...(input.files ?? [])];
      input.value = ""; // so that a removed file can be chosen again
      this.looking++;
      this.offerUse();
      this.last = this.last.then(() => this.add(index, files));
    };
    field.append(label, input, list);
    return field;
  }

  /** Adds pictures one after another, so that only one is in memory at full size. */
  private async add(index: number, files: readonly File[]): Promise<void> {
    const unreadable: string[] = [];
    const twice: string[] = [];
    for (const [done, file] of files.entries()) {
      say("looking", TEXTS.lookingAt(done + 1, files.length));
      const picture = await lookAt(file);
      if (picture === null) unreadable.push(file.name);
      else if (this.chosen.some(([, pictures]) => pictures.some(({ hash }) => hash === picture.hash))) {
        URL.revokeObjectURL(picture.small);
        twice.push(file.name);
      } else {
        this.chosen[index]![1].push(picture);
        this.used = false;
      }
    }
    this.looking--;
    say("looking", "");
    const told = [
      ...(unreadable.length > 0 ? [TEXTS.unreadable(unreadable)] : []),
      ...(twice.length > 0 ? [TEXTS.twice(twice)] : []),
    ];
    say("left-out", told.join(" "));
    this.draw();
  }

  private takeOut(index: number, picture: Picture): void {
    URL.revokeObjectURL(picture.small);
    const [, pictures] = this.chosen[index]!;
    pictures.splice(pictures.indexOf(picture), 1);
    this.used = false;
    this.draw();
    element(`class-${index}`).focus(); // the button that had the focus is gone
  }

  private draw(): void {
    for (const [index, [name, pictures]] of this.chosen.entries()) {
      const field = element(`class-${index}`);
      field.previousElementSibling!.textContent = TEXTS.picturesOf(name, pictures.length);
      const items = pictures.slice(-MOST_SHOWN).map((picture) => this.itemOf(index, picture));
      if (pictures.length > MOST_SHOWN) items.push(itemWith(TEXTS.more(pictures.length - MOST_SHOWN)));
      const list = element(`pictures-${index}`);
      list.replaceChildren(...items);
      list.hidden = items.length === 0;
    }
    this.offerUse();
  }

  private itemOf(index: number, picture: Picture): HTMLElement {
    const button = document.createElement("button");
    const image = document.createElement("img");
    button.type = "button";
    button.setAttribute("aria-label", TEXTS.takeOut(picture.file.name));
    Object.assign(image, { src: picture.small, alt: "" });
    button.append(image);
    button.onclick = () => this.takeOut(index, picture);
    return itemWith(button);
  }

  private offerUse(): void {
    const count = this.pictures.length;
    const button = element<HTMLButtonElement>("use-pictures");
    button.disabled = count === 0 || this.looking > 0 || this.used;
    button.textContent = TEXTS.usePictures(count);
  }
}

/** Reads a picture and makes it small; null if this browser cannot read the file as a picture. */
async function lookAt(file: File): Promise<Picture | null> {
  try {
    const digest = await crypto.subtle.digest("SHA-256", await file.arrayBuffer());
    const bitmap = await createImageBitmap(file);
    const scale = Math.min(1, SMALL / Math.max(bitmap.width, bitmap.height));
    const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(scale * side)));
    const canvas = new OffscreenCanvas(width!, height!);
    canvas.getContext("2d")!.drawImage(bitmap, 0, 0, width!, height!);
    bitmap.close();
    const small = await canvas.convertToBlob({ type: "image/jpeg" });
    return { file, hash: new Uint8Array(digest).join(), small: URL.createObjectURL(small) };
  } catch {
    return null;
  }
}
