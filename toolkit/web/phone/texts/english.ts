/** Every word that a person reads on the page, in English. */

import type { PauseReason, Stage } from "../agent/messages.js";
import { ENGLISH_FAULTS } from "./english_faults.js";

/** What index.html and the manifest say; the build writes it into them. */
export const PAGE = {
  title: "EdgeTailor: train with this device",
  shortTitle: "EdgeTailor",
  heading: "Train with this device",
  noScript: "This page needs JavaScript. Allow it for this page, then reload.",
  opening: "Opening",
  retryNow: "Try now",
  joinHeading: "Join",
  about:
    "Several devices train one model together. Each one trains on its own data, and sends only " +
    "what it has learned.",
  nameLabel: "Name of this device",
  nameDefault: "my phone",
  nameHelp: "The operator sees this name.",
  join: "Join",
  sharesHeading: "What leaves this device",
  leavesNumbers: "the trained numbers of its part of the model",
  leavesCounts: "the number of your samples, the loss and the time of the training",
  leavesMachine: "the name that you give this device, and a description of its browser and speed",
  staysHeading: "What never leaves it",
  staysData: "your data",
  staysPersonal: "your personal model, if this federation has personal models",
  staysKey: "the key by which the coordinator recognises this device",
  dataHeading: "Your data",
  picturesAbout: "Choose or take pictures of each kind. They stay on this device.",
  usePictures: "Use these pictures",
  csvLabel: "Measurements (CSV)",
  otherData: "Arrays from numpy",
  fileLabel: "Data file",
  fileHelp: "A numpy file (.npz) with the arrays x (samples) and y (labels). A copy stays on this device.",
  train: "Start training",
  trainHeading: "Training",
  progressLabel: "Progress in this round",
  pause: "Pause",
  choicesHeading: "When to train",
  awake: "Keep the screen on while training",
  hidden: "Pause while this page is hidden",
  unplugged: "Pause while the device is not charging",
  metered: "Pause on metered connections",
  leaveHeading: "Leave",
  leaveAbout:
    "Everything that this page has stored is removed: the data, the key, the personal model and the page " +
    "itself. Then another device can take your place.",
  leave: "Leave and erase",
  sureHeading: "Leave and erase?",
  sureAbout:
    "Your data, the key and the personal model are removed from this page. Your own files stay. " +
    "You cannot undo this.",
  stay: "Stay",
  hashes: "Hashes of this page",
  licences: "Licences",
};

export const ENGLISH = {
  language: "en",
  page: PAGE,
  faults: ENGLISH_FAULTS,
  insecure:
    "This page was opened without https. Browsers give such a page no key and no storage, so it " +
    "cannot take part. Ask the operator for a link that begins with https.",
  missing: (features: string[]) =>
    `This browser cannot take part: it lacks ${features.join(", ")}. Use a current version of ` +
    "Chrome, Firefox or Safari, and not a private window.",
  features: {
    modules: "module workers",
    files: "a private file system (OPFS)",
    keys: "Ed25519 keys",
  },
  noToken:
    "This device has not joined, and this address has no join token. Open the whole link that you " +
    "got from the operator, or scan its code.",
  workerFailed: "A part of this page could not be loaded. Reload the page.",
  tryingAgain: (seconds: number) => `Trying again in ${seconds} s.`,
  host: (host: string) => `For the federation at ${host}`,
  stages: {
    starting: "Opening",
    held: "Waiting until this page has ended in another tab, or the last step before the reload is over",
    new: "Not joined yet",
    joining: "Joining",
    joined: "Ready to train",
    waiting: "Waiting for the next round",
    downloading: "Downloading the model",
    training: "Training",
    uploading: "Sending the result",
    paused: "Paused",
    leaving: "Leaving and erasing",
    finished: "All rounds are over. Thank you! You can close this page.",
  } satisfies Record<Stage, string>,
  measuring: (percent: number) =>
    `Measuring how fast this device is, about half a minute: ${percent}% done`,
  chooseData: "Joined. Choose your data next.",
  pausing: "Pausing after this step",
  paused: {
    owner: "Paused by you",
    hidden: "Paused while the page is hidden",
    unplugged: "Paused until the device is charging",
    metered: "Paused while the connection is metered",
  } satisfies Record<PauseReason, string>,
  waitingFor: (joined: number, expected: number) =>
    `Waiting for other devices: ${joined} of ${expected} have joined`,
  round: (round: number) => `Round ${round}`,
  epoch: (epoch: number, epochs: number) => `pass ${epoch} of ${epochs} over your data`,
  minutesLeft: (minutes: number) =>
    minutes < 1 ? "Less than a minute left in this round" : `About ${minutes} min left in this round`,
  member: (name: string, id: string, submodel: string) =>
    `This device is “${name}” (${id}). Its part of the model: ${submodel}.`,
  noData: "No data chosen yet.",
  data: (name: string, files: number, samples: number, size: string) =>
    `${files === 1 ? name : `${files} files`}: ${samples} samples, ${size}`,
  preparing: (one: number, of: number) => `Preparing picture ${one} of ${of}`,
  picturesOf: (name: string, count: number) =>
    count === 0 ? `Pictures: ${name}` : `Pictures: ${name} (${count} chosen)`,
  usePictures: (count: number) => (count === 0 ? PAGE.usePictures : `${PAGE.usePictures} (${count})`),
  csvHelp: (columns: string, label: string, classes: string) =>
    `A line with names, then a line for each point in time. Columns: ${columns}. The column ${label} ` +
    `says what it was${classes === "" ? "" : `: ${classes}`}.`,
  sent: (size: string) => `${size} sent since this page was opened`,
  traffic: (down: string, up: string) => `${down} received, ${up} sent`,
  trained: (minutes: string) => `${minutes} min of training`,
  battery: (percent: number) => `${percent}% of the battery used since this page was opened`,
  persisted: "The browser has promised to keep what this page stores.",
  notPersisted: "The browser may remove what this page stores when it needs room.",
  keepOpen: "Keep this page open: training stops when it is closed, and goes on when it is opened again.",
  passLoss: (loss: string) => `Loss of the last pass: ${loss}`,
  oneLoss: (round: number, loss: string) => `Loss in round ${round}: ${loss}`,
  losses: (first: number, from: string, last: number, to: string) =>
    `Loss: ${from} in round ${first}, ${to} in round ${last}`,
  predictions: (round: number, before: string, beforeShare: string, after: string, afterShare: string) =>
    `Your first sample in round ${round}: ${before} (${beforeShare}) before your training, ` +
    `${after} (${afterShare}) after it`,
  resume: "Continue",
  /** What to do about a problem that stopped the training, by the start of its code. */
  remedies: [
    ["client.not-authorised", "This device has lost its place. Erase below, then open the link again."],
    ["trust.", "Do not go on before you have asked the operator."],
    ["data.", "Choose another file."],
    ["", "Nothing is lost. To try again, press Start training. If it fails again, tell the operator."],
  ] as [string, string][],
};

/** Another language has every word: a missing one is an error of types. */
export type Words = typeof ENGLISH;
