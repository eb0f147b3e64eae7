/** The texts in this browser's language. */

import { sentenceOf } from "../agent/faults.js";
import type { Problem } from "../agent/messages.js";
import { ENGLISH, type Words } from "../texts/english.js";
import { GERMAN } from "../texts/german.js";

/** The texts in the first of the owner's languages that the page has; otherwise in English. */
export const TEXTS: Words =
  navigator.languages
    .map((wanted) => [ENGLISH, GERMAN].find(({ language }) => wanted.toLowerCase().split("-")[0] === language))
    .find((words) => words !== undefined) ?? ENGLISH;

/** Writes the texts into index.html, which the build has filled with English. */
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

/** The sentence about a problem, in words for owners. */
export function messageOf({ code, fault }: Problem): string {
  const known = fault.is === "refused" ? TEXTS.refusals[code as keyof typeof TEXTS.refusals] : undefined;
  return known ?? sentenceOf(fault, TEXTS.faults);
}

/** A number in the form of this language, with `digits` digits after the point. */
export function number(value: number, digits = 0): string {
  const form = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return value.toLocaleString(TEXTS.language, form);
}

export function percent(share: number): string {
  return share.toLocaleString(TEXTS.language, { style: "percent" });
}

/** The day of a time in seconds since 1970. */
export function dayOf(seconds: number): string {
  return new Date(1000 * seconds).toLocaleDateString(TEXTS.language, { dateStyle: "long" });
}
