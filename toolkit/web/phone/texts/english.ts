/** All texts that a person reads on the page, in English. */

import type { Line } from "../agent/disclosure.js";
import type { PauseReason, Stage } from "../agent/messages.js";
import { ENGLISH_FAULTS } from "./english_faults.js";

/** The texts of index.html and the manifest; the build writes them there. */
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
  byClass: "Also send these counts for each kind of example",
  staysHeading: "What never leaves this device",
  staysData: "your data",
  staysPersonal: "your personal model, if this federation has personal models",
  staysKey: "the private key by which the coordinator recognises this device",
  tryHeading: "Try the model",
  tryClasses: "Probability of each class",
  tryStays: "What you choose here stays on this device, and this page does not store it.",
  dataHeading: "Your data",
  picturesAbout: "Choose or take pictures of each kind. They stay on this device.",
  usePictures: "Use these pictures",
  csvLabel: "Measurements (CSV)",
  otherData: "A file with prepared examples",
  fileLabel: "Data file",
  fileHelp:
    "A numpy file whose name ends in .npz, with the arrays x (examples) and y (labels). A copy stays on this device.",
  adding: "Keep the examples that are already here, and add new ones",
  changeData: "Change or add data",
  changeAbout: "New data are used from the next round on.",
  operatorHeading: "Details for questions to the operator",
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
    "This page was opened without https. Browsers do not let such a page make keys or store data, so it " +
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
    "This device has not joined, and this address is not a complete link. Open the complete link that you " +
    "got from the operator, or scan its QR code.",
  bareLink:
    "This link does not contain a fingerprint of its coordinator's key, so this page trusts any server that " +
    "answers. If the operator has sent you a longer link, open that one.",
  left: "You have left. Everything that this page had stored is removed.",
  contact: (contact: string) => `Questions: ${contact}`,
  /**
   * The cost of taking part. `minutes` is the limit of each round, `size` is for all rounds. 0 rounds
   * means rounds without end. Then `size` is for each round.
   */
  estimate: (rounds: number, minutes: string, size: string) =>
    (rounds === 0
      ? "There is no last round. Each round takes"
      : rounds === 1
        ? "One round of"
        : `${rounds} rounds, each of`) +
    ` at most ${minutes} min.` +
    `${size === "" ? "" : ` About ${size} are received and sent in ${rounds === 0 ? "each round" : "total"}.`} ` +
    "Training uses the battery: keep this device on its charger.",
  leaves: {
    numbers: "the trained numbers of this device's part of the model",
    sums:
      "if the coordinator learns only sums: masked numbers, which replace the trained numbers, the counts and the " +
      "errors. Also keys and encrypted parts of keys, with which only the sum can be read",
    counts: "how many examples you have, and how many steps this device has trained",
    loss: "how well the model fits your examples: a few numbers for each round",
    judged:
      "if the devices judge the model of this federation: how many of the kept-apart examples the model gets right, " +
      "and the sum of its errors",
    classes: "if the federation's models ask for it: which kinds occur among your examples",
    inputs:
      "if the coordinator compares ranges: the range in which most values of your examples lie, rounded to two digits",
    name: "the name that you give this device",
    browser: "a description of this device: its browser, its model, the processor and its cores, memory and free storage",
    speed: "when this device trained, how fast it computes, and how much memory the training takes",
    doing:
      "what this device is doing, and why it pauses: you paused it, the page is hidden, the device is not charging " +
      "or the connection is metered",
    problems: "if the training fails: what went wrong",
    release:
      "which released model this device uses. If it refused a released model, also the reason: for example, how many " +
      "of your examples that model gets right",
    key: "when this device joins: a public key and the time of its clock",
  } satisfies Record<Line, string>,
  /** What a federation asks for if its devices judge the model. */
  apart: (share: string) =>
    `${share} of your examples are kept apart: this device never trains on them. In each round it counts how many of ` +
    "them the model gets right, before and after its training, and sends these counts.",
  /** In a federation with secure sums. */
  onlySums: (fewest: number) =>
    `The coordinator learns only the sum of the updates of at least ${fewest} devices, never the update of this ` +
    "device.",
  leavesAddress: "as with every web page: the internet address of this device",
  workerFailed: "A part of this page could not be loaded. Reload the page.",
  tryingAgain: (seconds: number) => `Trying again in ${seconds} s.`,
  host: (host: string) => `For the federation at ${host}`,
  stages: {
    starting: "Opening",
    held: "Waiting: this page is open in another tab, or the last step before the reload has not ended yet",
    new: "Not joined yet",
    joining: "Joining",
    joined: "Ready to train",
    waiting: "Waiting for the next round",
    downloading: "Downloading the model",
    training: "Training",
    evaluating: "Counting how many of your examples the new model gets right",
    uploading: "Sending the result",
    paused: "Paused",
    leaving: "Leaving and erasing",
    finished: "All rounds are over. Thank you!",
  } satisfies Record<Stage, string>,
  measuring: (percent: number) =>
    `Measuring how fast this device is (this takes about half a minute): ${percent}% done`,
  afterTheEnd: `You can close this page. What it has stored stays until you press “${PAGE.leave}” below.`,
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
  round: (round: number, rounds: number) => (rounds === 0 ? `Round ${round}` : `Round ${round} of ${rounds}`),
  epoch: (epoch: number, epochs: number) => `pass ${epoch} of ${epochs} over your data`,
  minutesLeft: (minutes: number) =>
    minutes < 1 ? "Less than a minute left in this round." : `About ${minutes} min left in this round.`,
  allLeft: (minutes: number) =>
    minutes < 1
      ? "Less than a minute of training left in all rounds."
      : `About ${minutes} min of training left in all rounds.`,
  member: (name: string, part: string) => `This device is “${name}”. It trains ${part}.`,
  operatorNeeds: (id: string, submodel: string) => `Device ${id}, submodel ${submodel}`,
  /** The part that a device trains, by the family of its submodel. */
  parts: {
    full: "the whole model",
    "low-rank": "the model in a compressed form",
    cp: "the model in a compressed form, and a personal model that stays here",
    slice: "a part of the model",
    width: "a narrower form of the model",
    depth: "a shallower form of the model",
  },
  otherPart: "its part of the model",
  farOff: (channel: number, own: [string, string], usual: [string, string]) =>
    `Check the unit of your data: your values of channel ${channel} are mostly between ${own[0]} and ${own[1]}, but ` +
    `the values of the whole federation are mostly between ${usual[0]} and ${usual[1]}.`,
  noData: "No data in use yet.",
  data: (name: string, files: number, samples: number, size: string) =>
    `${files === 1 ? name : `${files} files`}: ${samples === 1 ? "1 example" : `${samples} examples`}, ${size}`,
  preparing: {
    pictures: (one: number, of: number) => `Preparing picture ${one} of ${of}`,
    bytes: (percent: string) => `Reading the data: ${percent}`,
  },
  picturesOf: (name: string, count: number) =>
    count === 0 ? `Pictures: ${name}` : `Pictures: ${name} (${count} chosen)`,
  usePictures: (count: number) => (count === 0 ? PAGE.usePictures : `${PAGE.usePictures} (${count})`),
  lookingAt: (one: number, of: number) => `Looking at picture ${one} of ${of}`,
  takeOut: (name: string) => `Remove ${name}`,
  more: (count: number) => `and ${count} more`,
  unreadable: (names: string[]) => `Left out, because this browser cannot read them: ${names.join(", ")}.`,
  twice: (names: string[]) => `Left out, because they are already chosen: ${names.join(", ")}.`,
  csvHelp: (columns: string, label: string, classes: string) =>
    `The first line names the columns. Each further line is one point in time. Columns: ${columns}. ` +
    `The column ${label} says what was measured${classes === "" ? "" : `: ${classes}`}.`,
  sent: (size: string) => `${size} sent since this page was opened`,
  sinceOpened: (minutes: string, down: string, up: string, battery: number | null) =>
    `Since this page was opened: ${minutes} min of training, ${down} received, ${up} sent` +
    `${battery === null ? "" : `, ${battery}% of the battery used`}.`,
  persisted: "The browser has promised to keep what this page stores.",
  notPersisted: "When the browser needs room, it may remove what this page has stored.",
  keepOpen: "Keep this page open: training stops when the page is closed, and continues when you open the page again.",
  passLoss: (loss: string) => `Error of the model in the last pass: ${loss}`,
  oneLoss: (round: number, loss: string) => `Error of the model in round ${round}: ${loss} (less is better)`,
  losses: (first: number, from: string, last: number, to: string) =>
    `Error of the model: ${from} in round ${first}, ${to} in round ${last} (less is better)`,
  predictions: (round: number, before: string, beforeShare: string, after: string, afterShare: string) =>
    `Your first example in round ${round}: ${before} (${beforeShare}) before your training, ` +
    `${after} (${afterShare}) after it`,
  /** What can be tried, by the kind of data. */
  tryFile: {
    images: "Take or choose a picture",
    series: "Choose a table to try (CSV)",
    arrays: "Choose a file with examples (.npz)",
  },
  noModel: "The model comes with the first round. Then you can try it here.",
  tryLater: "This device is training. You can try the model when the training waits, is paused or has finished.",
  model: (round: number) =>
    round === 1
      ? "The answer comes from the shared model before the first round. Its answers may be mere guesses."
      : `The answer comes from the shared model at the start of round ${round}.`,
  lastModel: "The answer comes from the shared model after the last round.",
  releasedModel: (number: number, round: number, date: string) =>
    `The answer comes from release ${number} of ${date}: the shared model after round ${round}.`,
  /** How the model predicts examples of this device. */
  right: (right: number, of: number, share: string) =>
    `This model was judged on ${of} of your own examples and got ${right} right (${share}).`,
  refusedRelease: (number: number) =>
    `This device refused release ${number}: that model is worse on your own examples, or cannot be used here.`,
  personalModel: (round: number) =>
    `The answer comes from your personal model, as this device trained it in round ${round}.`,
  trying: "The model is working",
  tried: (file: string, lines: number) => `The last ${lines} lines of ${file}`,
  triedFirst: (file: string, of: number) => (of === 1 ? file : `The first of ${of} examples in ${file}`),
  className: (index: number) => `class ${index}`,
  mostProbable: (name: string, share: string) => `Most probable: ${name}, ${share}`,
  almostCertain: "over 99%",
  almostImpossible: "under 1%",
  moreClasses: (count: number) => (count === 1 ? "and one other class" : `and ${count} other classes`),
  answer: (values: string) => `Answer: ${values}`,
  emptySequence: "nothing",
  resume: "Continue",
  /** What to do about a problem that stopped the training, by the start of its code. */
  remedies: [
    [
      "client.not-authorised",
      `This device is no longer a member. Press “${PAGE.leave}” below, then open the link again.`,
    ],
    ["trust.", "Ask the operator before you continue."],
    ["storage.lost", "Choose your data again. Then press Start training."],
    ["data.", "Choose your data again."],
    ["client.", "Your data are still here. Press Start training to try again."],
    [
      "",
      "Your data are still here. To try again, press Start training. If it fails again, tell the operator.",
    ],
  ] as [string, string][],
  /** Refusals of the coordinator in words for owners, by code. For others, its own message is shown. */
  refusals: {
    "client.not-authorised": "The coordinator does not know this device any more.",
    "federation.finished": "This federation is over: all of its rounds are done.",
    "join.expired-token": "This link has expired. Ask the operator for a new one.",
    "join.operator-token": "This link is the operator's own. Ask the operator for the link for devices.",
    "join.revoked-token": "This link is no longer valid. Ask the operator for a new one.",
    "join.skewed-clock":
      "The clock of this device differs too much from the coordinator's. In the device's settings, set date, time " +
      "and time zone to automatic.",
    "join.unknown-memory":
      "The browser does not say how much memory this device has, and the coordinator needs to know. Try Chrome, or " +
      "tell the operator.",
    "join.unknown-token":
      "The coordinator does not know this link. Open the complete link that you got from the operator, or ask for a " +
      "new one.",
    "join.used-up-token": "All places of this link are taken. Ask the operator for another link.",
    "plan.nothing-fits": "No part of the model is small enough for this device. Tell the operator.",
  },
};

/** Another language must have every text: a missing text is a type error. */
export type Words = typeof ENGLISH;
