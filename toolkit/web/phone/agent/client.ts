/**
 * Requests to the coordinator (device_agent/formats/protocol/), with retries. An answer may
 * come from another program. So its size is limited, and nothing in it is run or drawn as HTML.
 */

import type { Body } from "./disclosure.js";
import { Failure } from "./faults.js";
import type { InputSummary } from "./input_summary.js";
import type { EvaluationRequest, Problem, SecureTerms } from "./messages.js";
import { Away, Interrupted, readBody, upload, Watch } from "./requests.js";
import type { SampleForm } from "./sample_form.js";
import type { Bytes } from "./storage.js";
import type { KeyChange, SignedInvitation } from "./trust.js";

const API = "/v1";
const LONGEST_ANSWER = 16 << 20;
const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 60_000;
/** A request fails if no bytes move for this time. */
const STILL_MS = 30_000;
/** The same limit for a request for which training waits. */
const SHORT_MS = 5000;
/** The longest wait that a coordinator can ask for while rounds go on. */
export const LONGEST_ASKED_MS = 300_000;
const LONGEST_MESSAGE = 1000;
/** HTTP statuses of a coordinator, or of a proxy in front of it, that is away for a while. */
const RETRIED = new Set([429, 500, 502, 503, 504]);
/** Refusals of a part of an upload. The next attempt asks what has arrived, and sends the rest. */
const SEND_AGAIN = new Set(["upload.other-offset", "upload.superseded", "upload.altered"]);
const PREPARING = "federation.preparing";
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
/** The release with which a device should predict, signed on its own; the number 0 is none. */
export interface ReleaseOffer {
  number: number;
  /** The round whose model it has. */
  round: number;
  files: FileOffer[];
  /** Whether a later release was withdrawn, so that the device returns to this one without a trial. */
  back: boolean;
  evaluation?: EvaluationRequest | null;
  issued: number;
  signature: string;
  /** For how many steps agents may fine-tune it, and the files for that. */
  fine_tune?: number;
  training?: FileOffer[];
}
export interface Work {
  /** Set if devices judge the models. */
  evaluation?: EvaluationRequest | null;
  /** A training ends after the batch in which it has computed for this many seconds. */
  budget_s?: number | null;
  /** The summary of the coordinator's own samples. */
  inputs?: InputSummary | null;
  /** For a device that has nothing to train. */
  release?: ReleaseOffer | null;
  /** `judge`: evaluate the offered model, and send the counts. */
  state: "train" | "wait" | "judge" | "finished";
  round: number;
  files: FileOffer[];
  joined: number;
  expected: number;
  submodel: string;
  /**
   * Seconds after which a waiting device should ask again; with 0 or nothing, the device chooses. After
   * the last round: when a device that stays for releases should ask.
   */
  ask_again_s?: number;
  issued: number;
  signature: string;
  /** Set if the operator wants a new secret of this device: the challenge to answer. */
  new_secret?: string;
  /** Set if this device adds its update to a secure sum, and does not send it. */
  secure?: SecureTerms | null;
  /** Whether the model to judge is not the federation's yet: the owner does not get it. */
  candidate?: boolean;
}
export interface JoinReply extends SampleForm {
  device: string;
  secret: string;
  submodel: string;
  /** The coordinator's public key, which signs all work. */
  key: string;
}
/** The last part of the address of each answer to a step of a secure sum. */
type SumStep = "keys" | "shares" | "input" | "confirmation" | "unmasking";
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

  /** Whether the round continued without this device. Then it only has to ask for work again. */
  get roundOver(): boolean {
    return ROUND_OVER.has(this.code);
  }

  /** Whether the coordinator does not know this device, or does not know it any more. */
  get unknown(): boolean {
    return this.status === 401 || this.status === 403;
  }
}

/** The wait that an answer asks for in its header Retry-After, at most LONGEST_ASKED_MS; 0 without one. */
function retryAfterMs(response: Response): number {
  const seconds = Number(response.headers.get("Retry-After") ?? 0);
  return seconds > 0 ? Math.min(1000 * seconds, LONGEST_ASKED_MS) : 0;
}

/** Takes the bytes of a download. It already has the first `received` bytes. */
export interface Sink {
  received: number;
  write: (piece: Bytes, at: number) => void;
}

export class CoordinatorClient {
  bytesDown = 0;
  bytesUp = 0;
  /** Called before each attempt. The attempt waits for it. */
  permitted: () => Promise<void> = () => Promise.resolve();
  private readonly running = new Set<Watch>();
  private wake: () => void = () => undefined;

  /**
   * @param origin Address of the coordinator, such as https://example.org.
   * @param secret A join token or a device's secret.
   * @param onAway Called before each wait for a coordinator that is away, and with null when it is back.
   */
  constructor(
    readonly origin: string,
    public secret: string,
    private readonly onAway: (problem: Problem | null) => void,
  ) {}

  /** Ends running requests and waits. The next attempt of each begins at once. */
  interrupt(): void {
    for (const watch of this.running) watch.abort(new Interrupted());
    this.wake();
  }

  async join(request: () => Promise<Body<"POST /devices">>): Promise<JoinReply> {
    // Each attempt signs again, because the signature holds the time.
    return this.patiently(async () => this.json<JoinReply>("POST", "/devices", await request()));
  }

  /** Fetches the invitation of the join token, which is this client's secret. */
  async invitation(): Promise<SignedInvitation> {
    return this.patiently(() => this.json<SignedInvitation>("GET", "/invitation"));
  }

  /** Asks once for the changes of the coordinator's key; none if there is no answer. */
  async keyChanges(): Promise<KeyChange[]> {
    const answer = this.json<{ changes: KeyChange[] }>("GET", "/key-changes", undefined, SHORT_MS);
    return answer.then(({ changes }) => changes).catch(() => []);
  }

  /** Replaces this device's secret, which is then void. */
  async renewSecret(answer: Body<"POST /secret">): Promise<void> {
    await this.patiently(() => this.json("POST", "/secret", answer));
  }

  async work(): Promise<Work> {
    return this.patiently(() => this.json<Work>("GET", "/work"));
  }

  /** Asks once for work; null if there is no answer, because training must not wait. */
  async peek(): Promise<Work | null> {
    return this.json<Work>("GET", "/work", undefined, SHORT_MS).catch(() => null);
  }

  /** Reports progress once, and ignores problems: the next important request will report them. */
  async progress(state: string, loss: number | null = null, note: string | null = null): Promise<void> {
    const body: Body<"POST /progress"> = { state, loss, note };
    await this.json("POST", "/progress", body, SHORT_MS).catch(() => null);
  }

  async reportFailure(failure: Body<"POST /problems">): Promise<void> {
    await this.patiently(() => this.json("POST", "/problems", failure));
  }

  /** Asks what this device does next in the secure sum of `round`. */
  async secureStep(round: number): Promise<unknown> {
    return this.patiently(() => this.json("GET", `/rounds/${round}/sum`));
  }

  /** Sends this device's answer to a step of the secure sum of `round`. */
  async sendToSum<S extends SumStep>(
    round: number,
    step: S,
    answer: Body<`POST /rounds/{round}/sum/${S}`>,
  ): Promise<void> {
    await this.patiently(() => this.json("POST", `/rounds/${round}/sum/${step}`, answer));
  }

  /** Sends the counts of a model that this device only evaluates. */
  async sendJudgement(round: number, judgement: Body<"POST /rounds/{round}/evaluation">): Promise<void> {
    await this.patiently(() => this.json("POST", `/rounds/${round}/evaluation`, judgement));
  }

  /** Reports once about a release. Returns whether the coordinator has answered. */
  async reportRelease(report: Body<"POST /releases/{number}">): Promise<boolean> {
    return this.once("POST", `/releases/${Number(report.number)}`, report);
  }

  /** Tells the coordinator once that this device stops, so that no round waits for it. */
  async stopped(words: Body<"POST /stopped">): Promise<void> {
    await this.json("POST", "/stopped", words, SHORT_MS).catch(() => null);
  }

  /** Asks once to leave. Returns whether the coordinator now knows that this device has left. */
  async leave(): Promise<boolean> {
    return this.once("POST", "/leave");
  }

  /** Sends a request once. Returns whether the coordinator has taken or refused it. */
  private async once(method: string, path: string, body?: object): Promise<boolean> {
    return this.json(method, path, body, SHORT_MS).then(
      () => true,
      (error: unknown) => error instanceof Refusal,
    );
  }

  /**
   * Fetches the rest of a file. An answer longer than announced is cut off and refused.
   *
   * @param patienceMs How long it is tried while the coordinator is away.
   */
  async download(offer: FileOffer, sink: Sink, patienceMs = Infinity): Promise<void> {
    await this.patiently(async () => {
      if (sink.received === offer.size) return;
      const range = { Range: `bytes=${sink.received}-`, "If-Range": `"${offer.sha256}"` };
      await this.watched(STILL_MS, async (watch) => {
        const response = await this.ask(watch, "GET", `/files/${offer.sha256}`, sink.received ? range : {});
        if (response.status === 200) sink.received = 0;
        await this.pieces(response, offer.size - sink.received, watch, (piece) => {
          sink.write(piece, sink.received);
          sink.received += piece.length;
        });
      });
      if (sink.received < offer.size) throw new Away("client.away/broke-off", {});
    }, patienceMs);
  }

  /** Sends the tensors of an update. Bytes that the coordinator already has are not sent again. */
  async sendTensors(round: number, tensors: Bytes, sha256: string): Promise<void> {
    const path = `/rounds/${round}/tensors/${sha256}`;
    await this.patiently(async () => {
      const { received, complete } = await this.json<Upload>("GET", path);
      if (complete) return;
      const body = new Blob([tensors.subarray(received)]);
      const headers = {
        ...this.authorisation,
        "Content-Type": "application/octet-stream",
        "Upload-Offset": `${received}`,
      };
      await this.watched(STILL_MS, async (watch) => {
        const response = await upload(`${this.origin}${API}${path}`, headers, body, watch);
        if (!response.ok) throw await this.refusal(response, watch);
      });
      this.bytesUp += body.size;
    });
  }

  async sendUpdate(round: number, record: string): Promise<void> {
    await this.patiently(async () => {
      const headers = { "Content-Type": "application/json" };
      await this.watched(STILL_MS, (watch) =>
        this.ask(watch, "POST", `/rounds/${round}/update`, headers, record),
      );
      this.bytesUp += record.length;
    });
  }

  /** Repeats `attempt` until the coordinator answers, or until the waits would exceed `patienceMs`. */
  private async patiently<T>(attempt: () => Promise<T>, patienceMs = Infinity): Promise<T> {
    let waited = 0;
    for (let next = FIRST_WAIT_MS; ; next = Math.min(2 * next, LONGEST_WAIT_MS)) {
      await this.permitted();
      try {
        const answer = await attempt();
        if (waited > 0) this.onAway(null);
        return answer;
      } catch (error) {
        if (error instanceof Interrupted) continue;
        if (!(error instanceof Away)) throw error;
        const wait = Math.max(next, error.afterMs);
        if (waited + wait > patienceMs) {
          this.onAway(null);
          throw error;
        }
        waited += wait;
        this.onAway({ ...error.problem, retryAt: Date.now() + wait });
        if (await this.interrupted(wait)) next = FIRST_WAIT_MS / 2;
      }
    }
  }

  /** Waits. Returns whether the wait was ended early. */
  private async interrupted(milliseconds: number): Promise<boolean> {
    return new Promise((done) => {
      const timer = setTimeout(() => done(false), milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        done(true);
      };
    });
  }

  private async watched<T>(milliseconds: number, use: (watch: Watch) => Promise<T>): Promise<T> {
    const watch = new Watch(milliseconds);
    this.running.add(watch);
    return watch.over(use(watch)).finally(() => this.running.delete(watch));
  }

  private async json<T>(method: string, path: string, body?: object, milliseconds = STILL_MS): Promise<T> {
    const headers: Record<string, string> = body ? { "Content-Type": "application/json" } : {};
    return this.watched(milliseconds, async (watch) => {
      const response = await this.ask(watch, method, path, headers, body && JSON.stringify(body));
      if (response.status === 204) return undefined as T;
      const text = await this.text(response, watch);
      try {
        return JSON.parse(text) as T;
      } catch {
        throw new Away("client.away/broke-off", {});
      }
    });
  }

  private get authorisation(): Record<string, string> {
    return { Authorization: `Bearer ${this.secret}` };
  }

  private async ask(
    watch: Watch,
    method: string,
    path: string,
    headers: Record<string, string>,
    body?: string,
  ): Promise<Response> {
    let response: Response;
    try {
      response = await fetch(`${this.origin}${API}${path}`, {
        method,
        headers: { ...this.authorisation, ...headers },
        body: body ?? null,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
        signal: watch.signal,
      });
    } catch {
      throw new Away("client.away/unreachable", {});
    }
    if (!response.ok) throw await this.refusal(response, watch);
    return response;
  }

  private async refusal(response: Response, watch: Watch): Promise<Failure> {
    let problem: { code?: unknown; message?: unknown } = {};
    try {
      problem = JSON.parse(await this.text(response, watch)) as typeof problem;
    } catch {
      // The answer is of another program, such as a proxy in front of the coordinator.
    }
    const { code, message } = problem;
    const afterMs = retryAfterMs(response);
    if (typeof code !== "string" || typeof message !== "string") {
      const { status } = response;
      if (RETRIED.has(status)) return new Away("client.away/status", { status }, afterMs);
      return new Away("client.not-a-coordinator/status", { origin: this.origin, status });
    }
    if (RETRIED.has(response.status) || SEND_AGAIN.has(code)) {
      return new Away(code === PREPARING ? "client.away/preparing" : "client.away/busy", {}, afterMs);
    }
    return new Refusal(code, message.slice(0, LONGEST_MESSAGE), response.status);
  }

  private async text(response: Response, watch: Watch): Promise<string> {
    const pieces: Bytes[] = [];
    await this.pieces(response, LONGEST_ANSWER, watch, (piece) => pieces.push(piece));
    return new TextDecoder().decode(await new Blob(pieces).arrayBuffer());
  }

  private async pieces(
    response: Response,
    most: number,
    watch: Watch,
    take: (piece: Bytes) => void,
  ): Promise<void> {
    await readBody(response, most, this.origin, watch, (piece) => {
      this.bytesDown += piece.length;
      take(piece);
    });
  }
}
