/**
 * What the page and its worker say to one another.
 *
 * The worker owns everything: the key, the files, the training. The page sends it Commands, and
 * draws the last View that came back; it keeps no state of its own that a killed tab could lose.
 */

import type { Fault } from "./faults.js";
import type { Preparing, Preprocessing, Source } from "./sample_form.js";

/** Why a training waits. The worker says so to the coordinator too. */
export type PauseReason = "owner" | "hidden" | "unplugged" | "metered";

export type Command =
  /** Asks what the token of the link is for. */
  | { do: "look"; token: string }
  /** Joins with a token from the link, or finds out who this page already is. */
  | { do: "join"; token: string; name: string }
  /** Local data. The samples are copied into the page's own storage; `adding` keeps those that are there. */
  | { do: "data"; source: Source; adding: boolean }
  /** Takes part in rounds until the last one. It also continues what a killed tab had begun. */
  | { do: "train" }
  /** Pauses between two batches; null continues. */
  | { do: "pause"; reason: PauseReason | null }
  /** Asks a coordinator that was away again, now. */
  | { do: "retry" }
  /** Removes everything that this page has stored, and tells the coordinator if it answers. */
  | { do: "leave" };

export type Stage =
  | "starting" // the worker reads what is stored
  | "held" // another tab with this page, or a step before a reload, has to end first
  | "new" // not joined
  | "joining"
  | "joined" // a member that does not train yet: it has no data, or its owner has not started
  | "waiting" // for the next round
  | "downloading"
  | "training"
  | "uploading"
  | "paused"
  | "leaving"
  | "finished"; // the last round is over

/** A refusal or failure: a code for programs, and what the page says about it. */
export interface Problem {
  code: string;
  fault: Fault;
  /** When the page asks a coordinator again that is away, in ms of Date.now(); otherwise null. */
  retryAt: number | null;
}

/** The most likely class of a sample. */
export interface Prediction {
  name: string;
  probability: number;
}

/** A channel whose inputs lie far from those of the federation: the ranges of both. */
export interface FarOff {
  channel: number;
  own: [number, number];
  usual: [number, number];
}

/** What a federation says of itself, in words of its operator and in numbers. */
export interface Invitation {
  title: string;
  purpose: string;
  contact: string;
  rounds: number;
  /** Seconds that a round takes at most. */
  round_s: number;
  /** Bytes that a device receives and sends in its first round, and in each later one; 0: not known. */
  first_bytes: number;
  round_bytes: number;
}

/** How far the training of a round is. */
export interface Progress {
  epoch: number;
  epochs: number;
  batch: number;
  batches: number;
  /** Mean loss of the last whole epoch; null in the first. */
  loss: number | null;
  /** Median seconds of a batch; null before the first. */
  batchSeconds: number | null;
}

export interface View {
  stage: Stage;
  /** What the federation says of itself; null while the coordinator has not said it. */
  invitation: Invitation | null;
  /** Whether the link has no fingerprint of its coordinator's key. */
  bareLink: boolean;
  /** Who this page is for its coordinator; null before it has joined. */
  device: { id: string; name: string; submodel: string } | null;
  data: { name: string; files: number; samples: number; bytes: number } | null;
  /** How the owner's files become samples; null if the federation takes arrays only. */
  preprocessing: Preprocessing | null;
  /** A channel of the data that lies far from the federation's. */
  farOff: FarOff | null;
  /** While files become samples. */
  preparing: Preparing | null;
  /** While this device is calibrated: the share that is done, in tenths. */
  measured: number | null;
  /** The open round, from 1; 0 before the first. */
  round: number;
  /** While the first round waits for devices: how many have joined, of how many. */
  joined: number;
  expected: number;
  training: Progress | null;
  /** Mean loss of the last epoch of each round that this page has trained. */
  losses: { round: number; loss: number }[];
  /** Of the owner's first sample, by the model as it came and as this device has trained it. */
  predictions: { round: number; before: Prediction; after: Prediction } | null;
  /** Message bodies since this page was opened. */
  bytesDown: number;
  bytesUp: number;
  /** Seconds of training since this page was opened. */
  trainedSeconds: number;
  paused: PauseReason | null;
  /** Whether the browser promised to keep what is stored; null if it does not say. */
  persisted: boolean | null;
  /** The last thing that went wrong, until the next command. */
  problem: Problem | null;
  /** Why the last choice of data could not be used, until the next one. */
  dataProblem: Problem | null;
}
