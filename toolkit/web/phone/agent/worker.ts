/** The worker of the page. It runs Commands one after another, and posts Views. */

import { CoordinatorClient } from "./client.js";
import { Failure, problemOf } from "./faults.js";
import { importData, removeReplaced, type DataRecord } from "./local_data.js";
import { join, type Identity } from "./membership.js";
import type { Command, View } from "./messages.js";
import { modelsOf } from "./model_in_use.js";
import { BY_CLASS, FINISHED, Rounds } from "./rounds.js";
import { Stopped } from "./requests.js";
import { readForm, type Source } from "./sample_form.js";
import { eraseAll, Values } from "./storage.js";
import { tryModel } from "./trial.js";
import { invited, splitToken } from "./trust.js";
import { Results } from "./update.js";

/** If another worker takes longer than this to end, the page says that it waits. */
const HELD_MS = 500;

const EMPTY: View = {
  stage: "starting",
  invitation: null,
  bareLink: false,
  device: null,
  data: null,
  farOff: null,
  preprocessing: null,
  preparing: null,
  measured: null,
  round: 0,
  joined: 0,
  expected: 0,
  training: null,
  losses: [],
  predictions: null,
  model: null,
  refusedRelease: null,
  evaluation: null,
  secure: null,
  byClass: false,
  trying: false,
  trial: null,
  trialProblem: null,
  bytesDown: 0,
  bytesUp: 0,
  trainedSeconds: 0,
  paused: null,
  persisted: null,
  problem: null,
  dataProblem: null,
};
let view = EMPTY;
/** The client in use. */
let contact: CoordinatorClient | null = null;
let rounds: Rounds | null = null;
let running: Promise<void> = Promise.resolve();

function show(change: Partial<View>): void {
  view = { ...view, ...change };
  postMessage({ view });
}

const values = new Values();
/** Opened once: two of them would not know of each other's writes. */
let results: Promise<Results> | null = null;

async function openResults(): Promise<Results> {
  results ??= Results.open().catch((error: unknown) => {
    results = null;
    throw error;
  });
  return results;
}

function client(secret: string): CoordinatorClient {
  return (contact = new CoordinatorClient(self.location.origin, secret, (problem) => show({ problem })));
}

async function showStored(): Promise<void> {
  const identity = await values.get<Identity>("device");
  const data = await values.get<DataRecord>("data");
  const invitation = (await values.get<View["invitation"]>("invitation")) ?? view.invitation;
  show({
    ...(rounds === null ? idle(identity, (await values.get<boolean>(FINISHED)) === true) : {}),
    invitation,
    evaluation: view.evaluation ?? invitation?.evaluation ?? null,
    secure: view.secure ?? invitation?.secure ?? null,
    byClass: (await values.get(BY_CLASS)) === true,
    device: identity && { id: identity.device, name: identity.name, submodel: identity.submodel },
    data: data && {
      name: data.name,
      files: data.hashes?.length ?? 1,
      samples: data.samples,
      bytes: data.bytes,
    },
    preprocessing: identity && readForm(identity).preprocessing,
    preparing: null,
    measured: null,
    losses: (await values.get<View["losses"]>("losses")) ?? [],
    predictions: await values.get<View["predictions"]>("predictions"),
    ...(await modelsOf(values)),
    persisted: await navigator.storage.persisted(),
  });
}

/** The changes of the View while no rounds run. */
function idle(identity: Identity | null, finished: boolean): Partial<View> {
  const stage = identity === null ? "new" : finished ? "finished" : "joined";
  return { stage, round: 0, training: null, paused: null };
}

/** Fetches the link's invitation while other work goes on: a coordinator that is away delays nothing. */
async function look(given: string): Promise<void> {
  const [token, fingerprint] = splitToken(given);
  show({ bareLink: fingerprint === null });
  try {
    const invitation = await invited(client(token), fingerprint);
    show({ invitation, evaluation: invitation.evaluation ?? null, secure: invitation.secure ?? null });
  } catch (error) {
    show({ problem: problemOf(error) });
  }
}

async function train(): Promise<void> {
  const identity = await values.get<Identity>("device");
  if (identity === null || rounds !== null) return;
  const over = (await values.get<boolean>(FINISHED)) === true;
  show({ problem: null, stage: over ? "finished" : "waiting" });
  rounds = new Rounds(client(identity.secret), identity, values, await openResults(), show);
  try {
    await rounds.run();
  } catch (error) {
    if (!(error instanceof Stopped)) show({ stage: "joined", training: null, problem: problemOf(error) });
  } finally {
    rounds = null;
  }
}

/** Tries a file. Not while a training uses the processor and the memory. */
async function tryFile(file: File): Promise<void> {
  show({ trial: null, trialProblem: null, trying: true });
  try {
    if (view.stage === "training") throw new Failure("trial.training", {});
    show({ trial: await tryModel(file, values, await openResults()) });
  } catch (error) {
    show({ trialProblem: problemOf(error) });
  } finally {
    show({ trying: false });
  }
}

async function importDataOf(source: Source, adding: boolean): Promise<void> {
  const identity = await values.get<Identity>("device");
  if (identity === null) return;
  try {
    await importData(source, readForm(identity), adding, values, (preparing) => show({ preparing }));
  } catch (error) {
    show({ dataProblem: problemOf(error) });
  }
  if (rounds === null) await removeReplaced(values);
}

/** Erases everything, whether the coordinator answers or not. */
async function leave(): Promise<void> {
  show({ stage: "leaving", problem: null });
  rounds?.stages.stop();
  await running;
  const identity = await values.get<Identity>("device");
  const told = identity === null ? true : client(identity.secret).leave();
  await eraseAll(values);
  results = null;
  const untold = (await told) || identity === null ? null : { device: identity.name, id: identity.device };
  view = EMPTY;
  show({ stage: "new", problem: untold && new Failure("leave.untold", untold).problem });
}

async function obey(command: Exclude<Command, { do: "look" | "pause" | "retry" | "by-class" }>): Promise<void> {
  switch (command.do) {
    case "join": {
      show({ stage: "joining", problem: null });
      const [token, fingerprint] = splitToken(command.token);
      const measured = (share: number): void => {
        const tenths = Math.floor(10 * share) / 10;
        if (view.measured !== tenths) show({ measured: tenths });
      };
      await join(client(token), token, fingerprint, command.name, view.invitation, values, measured);
      return showStored();
    }
    case "data":
      show({ problem: null, dataProblem: null, farOff: null, preparing: { unit: "bytes", done: 0, of: 1 } });
      await importDataOf(command.source, command.adding);
      return showStored();
    case "try":
      return tryFile(command.file);
    case "train":
      // Do this before the rounds begin: data imported during the rounds must not be removed.
      if (rounds === null) await removeReplaced(values);
      running = train();
      return;
    case "leave":
      return leave();
  }
}

/**
 * Waits until no other worker of this page runs, and then makes others wait. A worker still ends its
 * step after its page is closed. A second worker would then find files open, and train with the same key.
 */
async function alone(): Promise<void> {
  const waiting = setTimeout(() => show({ stage: "held" }), HELD_MS);
  await new Promise<void>((alone) => {
    void navigator.locks.request("edgetailor", () => {
      alone();
      return new Promise(() => undefined); // until this worker ends
    });
  });
  clearTimeout(waiting);
}

async function start(): Promise<void> {
  await alone();
  await showStored();
}

// Commands may arrive before the storage is open. Each waits for the commands before it.
let last = start();
self.onmessage = ({ data }: MessageEvent<Command>) => {
  // These commands do not wait: they change the running command, or run at the same time.
  if (data.do === "look") return void look(data.token);
  if (data.do === "pause") return rounds?.stages.setPause(data.reason);
  if (data.do === "retry") return void (rounds === null ? contact?.interrupt() : rounds.stages.askNow());
  if (data.do === "by-class") {
    show({ byClass: data.agreed });
    return void values.put({ [BY_CLASS]: data.agreed });
  }
  last = last
    .then(() => obey(data))
    .catch(async (error: unknown) => {
      await showStored();
      show({ problem: problemOf(error) });
    });
};
