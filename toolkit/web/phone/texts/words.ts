/** The words of the page in the owner's language. */

import { ENGLISH, type Words } from "./english.js";
import { GERMAN } from "./german.js";

const LANGUAGES: readonly Words[] = [ENGLISH, GERMAN];

/** The first of the owner's languages that the page has; otherwise English. */
export function wordsFor(languages: readonly string[]): Words {
  for (const wanted of languages) {
    const found = LANGUAGES.find(({ language }) => wanted.toLowerCase().split("-")[0] === language);
    if (found !== undefined) return found;
  }
  return ENGLISH;
}
