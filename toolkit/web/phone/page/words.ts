/** The words in this browser's language, and the page itself in them. */

import { ENGLISH, type Words } from "../texts/english.js";
import { GERMAN } from "../texts/german.js";

/** In the first of the owner's languages that the page has; otherwise English. */
export const TEXTS: Words =
  navigator.languages
    .map((wanted) => [ENGLISH, GERMAN].find(({ language }) => wanted.toLowerCase().split("-")[0] === language))
    .find((words) => words !== undefined) ?? ENGLISH;

/** Writes the words into index.html, which the build has filled in English. */
export function translate(): void {
  document.documentElement.lang = TEXTS.language;
  document.title = TEXTS.page.title;
  const word = (name: string | undefined): string => TEXTS.page[name as keyof typeof TEXTS.page];
  for (const place of document.querySelectorAll<HTMLElement>("[data-text]")) {
    place.textContent = word(place.dataset.text);
  }
  for (const place of document.querySelectorAll<HTMLElement>("[data-label]")) {
    place.setAttribute("aria-label", word(place.dataset.label));
  }
  for (const field of document.querySelectorAll<HTMLInputElement>("[data-value]")) {
    field.value = word(field.dataset.value);
  }
}

/** Numbers as this language writes them, with as many digits after the point. */
export function number(value: number, digits = 0): string {
  const form = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return value.toLocaleString(TEXTS.language, form);
}

export function percent(share: number): string {
  return share.toLocaleString(TEXTS.language, { style: "percent" });
}
