/** What can go wrong, as a code for programs and a sentence for the person who reads it. */

import type { Problem } from "./messages.js";

export class Failure extends Error {
  constructor(
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** `error` as the page shows it. The message of an unforeseen error is its own. */
export function problemOf(error: unknown): Problem {
  if (error instanceof Failure) return { code: error.code, message: error.message };
  if (error instanceof DOMException && error.name === "QuotaExceededError") {
    return {
      code: "storage.disk-full",
      message: "The browser has no room left for this page. Free some storage, then continue.",
    };
  }
  const message = error instanceof Error ? error.message : String(error);
  return { code: "page.fault", message: `Something unforeseen went wrong: ${message}` };
}
