/** What has gone wrong, as it is thrown and as the page is told. */

import type { Fault, FaultName, Faults } from "./faults.js";
import type { Problem } from "./messages.js";

export class Failure<F extends FaultName = FaultName> extends Error {
  readonly fault: Fault;

  /** @param code That of `is`, unless it came from the coordinator. */
  constructor(
    is: F,
    values: Faults[F],
    readonly code: string = is.replace(/\/.*/, ""),
  ) {
    super(`${is} ${JSON.stringify(values)}`);
    this.fault = { is, values } as Fault;
  }

  get problem(): Problem {
    return { code: this.code, fault: this.fault, retryAt: null };
  }
}

/** `error` as the page shows it. The message of an unforeseen error is its own. */
export function problemOf(error: unknown): Problem {
  if (error instanceof Failure) return error.problem;
  if (error instanceof DOMException && error.name === "QuotaExceededError") {
    return new Failure("storage.disk-full", {}).problem;
  }
  const message = error instanceof Error ? error.message : String(error);
  return new Failure("page.fault", { message }).problem;
}
