/** Watches single requests: ends one in which nothing moves, or ends it at once. */

import { Failure, type Faults, type FaultName } from "./faults.js";
import type { Bytes } from "./storage.js";

/** The coordinator cannot be reached now. */
export class Away<F extends FaultName = FaultName> extends Failure<F> {
  /** @param afterMs The wait that the coordinator asks for. */
  constructor(
    is: F,
    values: Faults[F],
    readonly afterMs = 0,
  ) {
    super(is, values);
  }
}

/** The request was ended by this page. */
export class Interrupted extends Error {}

/** The owner has left or erased everything. */
export class Stopped extends Error {}

/** Ends a request in which nothing moves for `milliseconds`. */
export class Watch {
  private readonly controller = new AbortController();
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly milliseconds: number) {
    this.moved();
  }

  get signal(): AbortSignal {
    return this.controller.signal;
  }

  /** Call it when something was sent or received. */
  readonly moved = (): void => {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.abort(new Away("client.away/silent", {})), this.milliseconds);
  };

  abort(reason: Error): void {
    clearTimeout(this.timer);
    this.controller.abort(reason);
  }

  /** Waits for `request`. If it was aborted, throws the reason. */
  async over<T>(request: Promise<T>): Promise<T> {
    try {
      return await request;
    } catch (error) {
      throw this.signal.aborted ? this.signal.reason : error;
    } finally {
      clearTimeout(this.timer);
    }
  }
}

/** Sends `body` by PUT. Uses XMLHttpRequest, because fetch does not report the progress of uploads. */
export async function upload(
  url: string,
  headers: Record<string, string>,
  body: Blob,
  watch: Watch,
): Promise<Response> {
  const request = new XMLHttpRequest();
  request.open("PUT", url);
  for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
  request.upload.onprogress = watch.moved;
  watch.signal.addEventListener("abort", () => request.abort());
  return new Promise((done, failed) => {
    request.onload = () => {
      const answer = request.status === 204 ? null : request.responseText;
      done(new Response(answer, { status: request.status }));
    };
    request.onerror = request.onabort = () => failed(new Away("client.away/broke-off", {}));
    request.send(body);
  });
}

/** Reads a body of at most `most` bytes. */
export async function readBody(
  response: Response,
  most: number,
  origin: string,
  watch: Watch,
  take: (piece: Bytes) => void,
): Promise<void> {
  const reader = response.body?.getReader();
  if (reader === undefined) return;
  let left = most;
  for (;;) {
    let read: ReadableStreamReadResult<Bytes>;
    try {
      read = await reader.read();
    } catch {
      throw new Away("client.away/broke-off", {});
    }
    if (read.done) return;
    watch.moved();
    left -= read.value.length;
    if (left < 0) {
      await reader.cancel();
      throw new Failure("client.too-long", { origin });
    }
    take(read.value);
  }
}
