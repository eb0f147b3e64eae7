/**
 * The messages between the page and its worker.
 *
 * The worker owns the key, the files and the training. The page sends it Commands, and draws the last
 * View that it received. The page has no state that would be lost with a killed tab.
 */

import type { Fault } from "./faults.js";
import type { Preparing, Preprocessing, Source } from "./sample_form.js";

/** Why a training waits. The worker also tells this to the coordinator. */
export type PauseReason = "owner" | "hidden" | "unplugged" | "metered";

export type Command =
  /** Asks the coordinator for the invitation of the link's token. */
  | { do: "look"; token: string }
  /** Joins with a token from the link, or finds out who this page already is. */
  | { do: "join"; token: string; name: string }
  /** Copies samples into the page's storage; with `adding`, the samples that are there stay. */
  | { do: "data"; source: Source; adding: boolean }
  /** Asks the stored model about a picture, the last lines of a CSV file, or an array. */
  | { do: "try"; file: File }
  /** Takes part in rounds until the last one. Also continues the training of a killed tab. */
  | { do: "train" }
  /** Pauses between two batches; null continues. */
  | { do: "pause"; reason: PauseReason | null }
  /** Whether the owner agrees to counts of each class, in a federation that asks for them. */
  | { do: "by-class"; agreed: boolean }
  /** Asks a coordinator that was away again at once. */
  | { do: "retry" }
  /** Removes everything that this page has stored, and tells the coordinator if it answers. */
  | { do: "leave" };

export type Stage =
  | "starting" // the worker reads what is stored
  | "held" // waits for another tab with this page, or for a step before a reload, to end
  | "new" // not joined
  | "joining"
  | "joined" // a member that does not train yet: it has no data, or its owner has not started
  | "waiting" // for the next round
  | "downloading"
  | "training"
  | "evaluating" // counts how the last model predicts samples that are kept apart
  | "uploading"
  | "paused"
  | "leaving"
  | "finished"; // the last round is over

/** A refusal or failure: a code for programs, and the fault whose sentence the page shows. */
export interface Problem {
  code: string;
  fault: Fault;
  /** If the coordinator is away: when the page asks it again, in ms of Date.now(). Otherwise null. */
  retryAt: number | null;
}

/** The most likely class of a sample. */
export interface Prediction {
  name: string;
  probability: number;
}

/** What the model says about a sample. Classes are numbers, from 0. */
export type SingleAnswer =
  | { is: "classes"; probabilities: number[] }
  /** The probability of yes, for each of several questions. */
  | { is: "questions"; probabilities: number[] }
  /** The most probable class at each position; with the loss ctc, the sequence itself. */
  | { is: "sequence"; classes: number[] }
  | { is: "numbers"; numbers: number[] };
export type Answer = SingleAnswer | { is: "outputs"; outputs: { name: string; answer: SingleAnswer }[] };

/** A file that the owner has tried. */
export interface Trial {
  file: string;
  /** The part of the file that the model has read. */
  sample: { is: "picture" } | { is: "window"; lines: number } | { is: "array"; of: number };
  answer: Answer;
  /** The names of the classes; empty if they have none. */
  names: string[];
}

/** A channel whose inputs are far from the federation's, with the ranges of both. */
export interface FarOff {
  channel: number;
  own: [number, number];
  usual: [number, number];
}

/** A federation's description: texts of its operator, and numbers. */
export interface Invitation {
  title: string;
  purpose: string;
  contact: string;
  rounds: number;
  /** The longest time of a round, in seconds. */
  round_s: number;
  /** Bytes that a device receives and sends in its first round, and in each later round; 0 if not known. */
  first_bytes: number;
  round_bytes: number;
  /** What is asked of devices if they judge the models. Earlier versions did not store it. */
  evaluation?: EvaluationRequest | null;
  /** Set if the coordinator learns sums of updates only. Earlier versions did not store it. */
  secure?: SecureTerms | null;
}

/** What a federation asks of devices that judge its models. */
export interface EvaluationRequest {
  share: number;
  by_class: boolean;
}

/** Differential privacy of a sum, for which devices clip their changes and add noise themselves. */
export interface SumPrivacy {
  /** The largest norm of a device's change. */
  clip: number;
  /** The least standard deviation of the noise in the sum, divided by `clip`. */
  noise_multiplier: number;
}

/** How the devices of a round add up their updates. The coordinator signs this with the work. */
export interface SecureTerms {
  /** The smallest number of devices in a sum. */
  fewest: number;
  /** The most by which a number of an update may change. */
  most_change: number;
  /** The most samples that count. */
  most_samples: number;
  privacy: SumPrivacy | null;
}

/** How many of the counted labels a model predicts correctly; null if labels are numbers or sequences. */
export type Right = { right: number; of: number } | null;

/** The model with which this device predicts. */
export interface ModelInUse {
  round: number;
  /** Whether it is the personal model of this device. */
  personal: boolean;
  /** Whether it is the model after the last round; otherwise the model with which `round` began. */
  last?: boolean;
  /** How it predicts samples of this device that were kept apart or used for a trial. */
  right?: Right;
  /** The release that it is; `issued` is its time in seconds since 1970. */
  release?: { number: number; issued: number };
}

/** The progress of the training in a round. */
export interface Progress {
  epoch: number;
  epochs: number;
  batch: number;
  batches: number;
  /** Mean loss of the last complete epoch; null in the first epoch. */
  loss: number | null;
  /** Median time of a batch in seconds; null before the first batch. */
  batchSeconds: number | null;
}

export interface View {
  stage: Stage;
  /** The federation's description; null until the coordinator has sent it. */
  invitation: Invitation | null;
  /** Whether the link lacks the fingerprint of its coordinator's key. */
  bareLink: boolean;
  /** The device that this page is for its coordinator; null before it has joined. */
  device: { id: string; name: string; submodel: string } | null;
  data: { name: string; files: number; samples: number; bytes: number } | null;
  /** How the owner's files become samples; null if the federation takes only arrays. */
  preprocessing: Preprocessing | null;
  /** A channel of the data that is far from the federation's; null if there is none. */
  farOff: FarOff | null;
  /** The progress of making samples from files; null if none are made. */
  preparing: Preparing | null;
  /** The share of the calibration that is done, in tenths; null if none runs. */
  measured: number | null;
  /** The open round, from 1; 0 before the first. */
  round: number;
  /** While the first round waits for devices: how many have joined and are expected. */
  joined: number;
  expected: number;
  training: Progress | null;
  /** Mean loss of the last epoch of each round that this page has trained. */
  losses: { round: number; loss: number }[];
  /** Predictions for the owner's first sample, before and after this device trained the model. */
  predictions: { round: number; before: Prediction; after: Prediction } | null;
  /** The model that answers when the owner tries it; null before this page has trained one. */
  model: ModelInUse | null;
  /** The number of a later release that this device has not taken; null if there is none. */
  refusedRelease: number | null;
  /** What is asked of this device if devices judge the models. */
  evaluation: EvaluationRequest | null;
  /** Set if the coordinator learns sums of updates only. */
  secure: SecureTerms | null;
  /** Whether the owner agrees to counts of each class. */
  byClass: boolean;
  /** Whether the model is answering. */
  trying: boolean;
  trial: Trial | null;
  /** Why the last trial has no answer, until the next one. */
  trialProblem: Problem | null;
  /** Bytes of message bodies since this page was opened. */
  bytesDown: number;
  bytesUp: number;
  /** Seconds of training since this page was opened. */
  trainedSeconds: number;
  paused: PauseReason | null;
  /** Whether the browser promised to keep stored data; null if it does not say. */
  persisted: boolean | null;
  /** The last problem, until the next command. */
  problem: Problem | null;
  /** Why the last choice of data could not be used, until the next one. */
  dataProblem: Problem | null;
}
