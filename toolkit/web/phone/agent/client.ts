/**
 * Requests to the coordinator (device_agent/formats/protocol.py), with retries. Answers may come
 * from another program, so their sizes are limited and nothing in them is ever run or drawn as HTML.
 */

import { Failure } from "./failure.js";
import type { Problem } from "./messages.js";
import type { SampleForm } from "./sample_form.js";
import type { Bytes } from "./storage.js";

const API = "/v1";
const LONGEST_ANSWER = 16 << 20;
const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 60_000;
const LONGEST_MESSAGE = 1000;
/** Statuses of a coordinator, or of a proxy before it, that is away for a while. */
const RETRIED = new Set([429, 500, 502, 503, 504]);
/** Refusals of a part of an upload that the next attempt, which asks what has come, can mend. */
const SEND_AGAIN = new Set(["upload.other-offset", "upload.superseded", "upload.altered"]);
const ROUND_OVER = new Set([
  "round.closed",
  "round.other-bundle",
  "round.already-sent",
  "round.no-such-file",
]);

export interface FileOffer {
  name: string;
  size: number;
  sha256: string;
}
export interface Work {
  state: "train" | "wait" | "finished";
  round: number;
  files: FileOffer[];
  joined: number;
  expected: number;
  submodel: string;
  issued: number;
  signature: string;
}
export interface JoinReply extends SampleForm {
  device: string;
  secret: string;
  submodel: string;
  /** The coordinator's public key, which signs all work. */
  key: string;
}
interface Upload {
  received: number;
  complete: boolean;
}

/** The coordinator understood the request and refused it. */
export class Refusal extends Failure {
  constructor(
    code: string,
    message: string,
    readonly status: number,
  ) {
    super("refused", { message }, code);
  }

  /** Whether the round continued without this device, which only has to ask for work again. */
  get roundOver(): boolean {
    return ROUND_OVER.has(this.code);
  }

  /** Whether the coordinator does not know this device, or does not know it any more. */
  get unknown(): boolean {
    return this.status === 401 || this.status === 403;
  }
}

/** The coordinator cannot be reached now. */
class Away extends Failure {}

/** Takes the bytes of a download; `received` of them are there already. */
export interface Sink {
  received: number;
  write: (piece: Bytes, at: number) => void;
}

export class CoordinatorClient {
  bytesDown = 0;
  bytesUp = 0;

  /**
   * @param origin Address of the coordinator, such as https://example.org.
   * @param secret A join token or a device's secret.
   * @param onAway Called before each wait for a coordinator that is away.
   */
  constructor(
    readonly origin: string,
    private readonly secret: string,
    private readonly onAway: (problem: Problem) => void,
  ) {}

  async join(request: () => Promise<object>): Promise<JoinReply> {
    // Each attempt signs again, because the signature holds the time.
    return this.patiently(async () => this.json<JoinReply>("POST", "/devices", await request()));
  }

  async work(): Promise<Work> {
    return this.patiently(() => this.json<Work>("GET", "/work"));
  }

  /** Asks once for work; null if there is no answer, because training must not wait. */
  async peek(): Promise<Work | null> {
    return this.json<Work>("GET", "/work").catch(() => null);
  }

  /** Reports progress once. The next request that matters reports the same problem. */
  async progress(state: string, loss: number | null = null, note: string | null = null): Promise<void> {
    await this.json("POST", "/progress", { state, loss, note }).catch(() => null);
  }

  async reportFailure(submodel: string, failures: number, reason: string): Promise<string | null> {
    const body = { submodel, failures, reason: reason.slice(0, LONGEST_MESSAGE) };
    const reply = await this.patiently(() =>
      this.json<{ submodel: string | null }>("POST", "/problems", body),
    );
    return reply.submodel;
  }

  async leave(): Promise<void> {
    await this.json("POST", "/leave");
  }

  /** Fetches the rest of a file. An answer longer than announced is cut off and refused. */
  async download(offer: FileOffer, sink: Sink): Promise<void> {
    await this.patiently(async () => {
      if (sink.received === offer.size) return;
      const range = { Range: `bytes=${sink.received}-`, "If-Range": `"${offer.sha256}"` };
      const response = await this.ask("GET", `/files/${offer.sha256}`, sink.received ? range : {});
      if (response.status === 200) sink.received = 0;
      await this.pieces(response, offer.size - sink.received, (piece) => {
        sink.write(piece, sink.received);
        sink.received += piece.length;
      });
      if (sink.received < offer.size) throw new Away("client.away/broke-off", {});
    });
  }

  /** Sends the tensors of an update. What the coordinator has of them is not sent again. */
  async sendTensors(round: number, tensors: Bytes, sha256: string): Promise<void> {
    const path = `/rounds/${round}/tensors/${sha256}`;
    await this.patiently(async () => {
      const { received, complete } = await this.json<Upload>("GET", path);
      if (complete) return;
      const body = new Blob([tensors.subarray(received)]);
      const headers = {
        "Content-Type": "application/octet-stream",
        "Upload-Offset": `${received}`,
      };
      await this.ask("PUT", path, headers, body);
      this.bytesUp += body.size;
    });
  }

  async sendUpdate(round: number, record: string): Promise<void> {
    await this.patiently(async () => {
      const headers = { "Content-Type": "application/json" };
      await this.ask("POST", `/rounds/${round}/update`, headers, record);
      this.bytesUp += record.length;
    });
  }

  /** Repeats `attempt` until the coordinator answers. */
  private async patiently<T>(attempt: () => Promise<T>): Promise<T> {
    for (let wait = FIRST_WAIT_MS; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
      try {
        return await attempt();
      } catch (error) {
        if (!(error instanceof Away)) throw error;
        this.onAway({ ...error.problem, retryIn: wait / 1000 });
        await new Promise((done) => setTimeout(done, wait));
      }
    }
  }

  private async json<T>(method: string, path: string, body?: object): Promise<T> {
    const headers: Record<string, string> = body ? { "Content-Type": "application/json" } : {};
    const response = await this.ask(method, path, headers, body && JSON.stringify(body));
    if (response.status === 204) return undefined as T;
    const text = await this.text(response);
    try {
      return JSON.parse(text) as T;
    } catch {
      throw new Away("client.away/broke-off", {});
    }
  }

  private async ask(
    method: string,
    path: string,
    headers: Record<string, string>,
    body?: string | Blob,
  ): Promise<Response> {
    let response: Response;
    try {
      response = await fetch(`${this.origin}${API}${path}`, {
        method,
        headers: { Authorization: `Bearer ${this.secret}`, ...headers },
        body: body ?? null,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch {
      throw new Away("client.away/unreachable", {});
    }
    if (!response.ok) throw await this.refusal(response);
    return response;
  }

  private async refusal(response: Response): Promise<Failure> {
    let problem: { code?: unknown; message?: unknown } = {};
    try {
      problem = JSON.parse(await this.text(response)) as typeof problem;
    } catch {
      // Not a coordinator's answer: the status decides.
    }
    const { code, message } = problem;
    if (typeof code !== "string" || typeof message !== "string") {
      const { status } = response;
      if (RETRIED.has(status)) return new Away("client.away/status", { status });
      return new Failure("client.not-a-coordinator/status", { origin: this.origin, status });
    }
    if (RETRIED.has(response.status) || SEND_AGAIN.has(code)) return new Away("client.away/says", { message: message.slice(0, LONGEST_MESSAGE) });
    return new Refusal(code, message.slice(0, LONGEST_MESSAGE), response.status);
  }

  private async text(response: Response): Promise<string> {
    const pieces: Bytes[] = [];
    await this.pieces(response, LONGEST_ANSWER, (piece) => pieces.push(piece));
    return new TextDecoder().decode(await new Blob(pieces).arrayBuffer());
  }

  /** Reads a body of at most `most` bytes. */
  private async pieces(
    response: Response,
    most: number,
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
      left -= read.value.length;
      if (left < 0) {
        await reader.cancel();
        throw new Failure("client.too-long", { origin: this.origin });
      }
      this.bytesDown += read.value.length;
      take(read.value);
    }
  }
}
