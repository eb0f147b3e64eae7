/** Every word that a person reads on the page, in one place for translation. */

import type { PauseReason, Stage } from "../agent/messages.js";

export const TEXTS = {
  insecure:
    "This page was opened without https. Without it, browsers give a page no key and no storage. " +
    "Ask the operator for a link that begins with https.",
  missing: (feature: string) =>
    `This browser cannot take part: it has no ${feature}. Use a newer browser, such as the current ` +
    "Chrome, Firefox or Safari.",
  otherTab: "This page is open in another tab. Close that tab, then reload this one.",
  noToken:
    "This link is incomplete: it ends without a token. Open the whole link, or scan the code again.",
  host: (host: string) => `For the federation at ${host}.`,
  stages: {
    starting: "Opening",
    new: "Not joined yet",
    joining: "Joining",
    joined: "Ready to train",
    waiting: "Waiting for the next round",
    downloading: "Downloading the model",
    training: "Training",
    uploading: "Sending the result",
    paused: "Paused",
    finished: "All rounds are over. Thank you!",
  } satisfies Record<Stage, string>,
  paused: {
    owner: "Paused by you",
    hidden: "Paused, because the page is hidden",
    unplugged: "Paused, because the device is not charging",
    metered: "Paused, because the connection is metered",
  } satisfies Record<PauseReason, string>,
  waitingFor: (joined: number, expected: number) =>
    `Waiting for devices: ${joined} of ${expected} have joined`,
  round: (round: number) => `Round ${round}`,
  epoch: (epoch: number, epochs: number) => `pass ${epoch} of ${epochs} over your data`,
  minutesLeft: (minutes: number) =>
    minutes < 1 ? "less than a minute left in this round" : `about ${minutes} min left in this round`,
  member: (name: string, id: string, submodel: string) => `${name} (${id}) trains ${submodel}`,
  data: (name: string, samples: number, size: string) => `${name}: ${samples} samples, ${size}`,
  noData: "No data chosen yet.",
  traffic: (down: string, up: string) => `${down} received, ${up} sent`,
  trained: (minutes: string) => `${minutes} min of training`,
  battery: (percent: number) => `${percent}% of the battery used since this page was opened`,
  persisted: "The browser keeps the stored data.",
  notPersisted: "The browser may remove the stored data when it needs room.",
  keepOpen: "Keep this page open while it trains.",
  losses: (text: string) => `Loss after each round: ${text}`,
  pause: "Pause",
  resume: "Continue",
};
