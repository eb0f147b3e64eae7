/** A bundle in the page's files. Before a file is used, it is checked against its SHA-256. */

import type { CoordinatorClient, FileOffer } from "./client.js";
import { Failure } from "./faults.js";
import { MANIFEST, readManifest, WEIGHTS, type Manifest } from "./manifest.js";
import { keptBundles, type StoredBundle } from "./model_in_use.js";
import { folderOf, names, OpenFile, remove, sha256, type Bytes, type Values } from "./storage.js";
import { readPlaces, readTensor, zeros, type Place, type Tensors } from "./tensors.js";
import { multipliesFaster } from "./winograd_probe.js";

const FOLDER = "bundle";
/** The most bytes of a manifest: several times the size for a model of 1,000 layers. */
const LONGEST_MANIFEST = 32 << 20;
/** Files of other graph forms, which only some devices run (device_agent/formats/graph_forms.py). */
const FORM = /\.(nchwc\d+|winograd)\.onnx$/;
const WINOGRAD = ".winograd.onnx";

const PART = ".part";

/** Fetches the files of `offers` that the page lacks, and removes those of bundles that it does not need any more. */
export async function fetchBundle(
  client: CoordinatorClient,
  offers: FileOffer[],
  values: Values,
  patienceMs = Infinity,
): Promise<Bundle> {
  await removeOthers(offers, values);
  const winograd = await runsWinograd(offers, values);
  const folder = await folderOf(FOLDER);
  for (const offer of await missing(runHere(offers, winograd))) await fetchFile(client, folder, offer, patienceMs);
  return Bundle.open(offers, winograd);
}

/** Removes the files of bundles, except those of `offers` and those from which this page predicts. */
export async function removeOthers(offers: FileOffer[], values: Values): Promise<void> {
  const folder = await folderOf(FOLDER);
  const bundles = await keptBundles(values);
  const kept = [...offers, ...bundles.flatMap(({ files }) => files)];
  const wanted = new Set(kept.flatMap(({ sha256 }) => [sha256, sha256 + PART]));
  for (const name of await names(folder)) if (!wanted.has(name)) await remove(folder, name);
}

/** Those of `offers` that this page lacks. While a file is written, its part is there, too. */
async function missing(offers: FileOffer[]): Promise<FileOffer[]> {
  const have = new Set(await names(await folderOf(FOLDER)));
  return offers.filter(({ sha256 }) => !have.has(sha256) || have.has(sha256 + PART));
}

/** Whether the files of a bundle are there and have their hashes. Removes a damaged file. */
export async function isWhole(stored: StoredBundle, values: Values): Promise<boolean> {
  const offers = runHere(stored.files, await runsWinograd(stored.files, values));
  const lacking = new Set(await missing(offers));
  for (const offer of offers) {
    if (lacking.has(offer)) continue;
    const held = await withFile(offer, (file) => (file.size === offer.size ? file.read(0, offer.size) : null));
    if (held !== null && (await sha256(held)) === offer.sha256) continue;
    lacking.add(offer);
    await remove(await folderOf(FOLDER), offer.sha256);
  }
  return lacking.size === 0;
}

/** The most bytes that fetching `offers` adds: for a moment, a file is there twice. */
export async function bytesToFetch(offers: FileOffer[], values: Values): Promise<number> {
  const sizes = (await missing(runHere(offers, await runsWinograd(offers, values)))).map(({ size }) => size);
  return sizes.reduce((sum, size) => sum + size, Math.max(0, ...sizes));
}

/** Opens the bundle `stored` of an earlier round, without the coordinator. */
export async function openStored(stored: StoredBundle, values: Values): Promise<Bundle> {
  const winograd = await runsWinograd(stored.files, values);
  if ((await missing(runHere(stored.files, winograd))).length > 0) throw new Failure("storage.lost/model", {});
  return Bundle.open(stored.files, winograd);
}

async function runsWinograd(offers: FileOffer[], values: Values): Promise<boolean> {
  return offers.some(({ name }) => name.endsWith(WINOGRAD)) && multipliesFaster(values);
}

/** The files of `offers` without the graph forms that this device does not run. */
function runHere(offers: FileOffer[], winograd: boolean): FileOffer[] {
  return offers.filter(({ name }) => !FORM.test(name) || (winograd && name.endsWith(WINOGRAD)));
}

async function fetchFile(
  client: CoordinatorClient,
  folder: FileSystemDirectoryHandle,
  offer: FileOffer,
  patienceMs: number,
): Promise<void> {
  const part = offer.sha256 + PART;
  const file = await OpenFile.at(folder, part);
  let content: Bytes;
  try {
    const write = (piece: Bytes, at: number): void => file.write(piece, at);
    await client.download(offer, { received: Math.min(file.size, offer.size), write }, patienceMs);
    file.flush();
    content = file.read(0, offer.size);
  } finally {
    file.close();
  }
  if ((await sha256(content)) !== offer.sha256) {
    await remove(folder, part);
    throw new Failure("bundle.altered-file", { file: offer.name });
  }
  const whole = await OpenFile.at(folder, offer.sha256);
  try {
    whole.write(content, 0);
    whole.truncate(content.length);
    whole.flush();
  } finally {
    whole.close();
  }
  await remove(folder, part);
}

export class Bundle {
  private constructor(
    readonly manifest: Manifest,
    readonly sha256: string,
    private readonly offers: Map<string, FileOffer>,
    private readonly winograd: boolean,
    private readonly places: Map<string, Place>,
  ) {}

  static async open(offers: FileOffer[], winograd: boolean): Promise<Bundle> {
    const byName = new Map(offers.map((offer) => [offer.name, offer]));
    const offer = byName.get(MANIFEST);
    if (offer === undefined || offer.size > LONGEST_MANIFEST) {
      throw new Failure("bundle.malformed", { where: MANIFEST });
    }
    const manifest = readManifest(new TextDecoder().decode(await content(offer)));
    for (const [name, entry] of Object.entries(manifest.files)) {
      const given = byName.get(name);
      if (given?.sha256 !== entry.sha256 || given.size !== entry.size) {
        throw new Failure("bundle.altered-file/manifest", { file: name });
      }
    }
    const weights = byName.get(WEIGHTS);
    const places =
      weights === undefined
        ? new Map<string, Place>()
        : await withFile(weights, (file) => readPlaces(file.read, file.size, WEIGHTS));
    for (const entry of manifest.tensors) {
      const place = places.get(entry.name);
      const same = place?.dtype === entry.dtype && `${place.shape}` === `${entry.shape}`;
      if (entry.stored && !same) {
        throw new Failure("bundle.malformed", { where: `${WEIGHTS}: ${entry.name}` });
      }
    }
    return new Bundle(manifest, offer.sha256, byName, winograd, places);
  }

  /** The bytes of the graph of `signature`, in the form that the page runs. */
  async graph(signature: string): Promise<Bytes> {
    const file = this.manifest.signatures[signature]!.graph;
    const other = this.winograd ? this.offers.get(file.replace(/\.onnx$/, WINOGRAD)) : undefined;
    return content(other ?? this.offers.get(file)!);
  }

  /** The values of the tensors `wanted` at the start of a round: those in the bundle, or zeros. */
  async tensors(wanted: Iterable<string>): Promise<Tensors> {
    const chosen = new Set(wanted);
    const entries = this.manifest.tensors.filter((entry) => chosen.has(entry.name));
    const tensors: Tensors = new Map();
    for (const entry of entries) {
      if (!entry.stored) tensors.set(entry.name, zeros(entry.dtype, entry.shape));
    }
    const stored = entries.filter((entry) => entry.stored);
    if (stored.length > 0) {
      await withFile(this.offers.get(WEIGHTS)!, (file) => {
        for (const { name } of stored) tensors.set(name, readTensor(file.read, this.places.get(name)!));
      });
    }
    return tensors;
  }
}

async function content(offer: FileOffer): Promise<Bytes> {
  return withFile(offer, (file) => file.read(0, offer.size));
}

async function withFile<T>(offer: FileOffer, use: (file: OpenFile) => T): Promise<T> {
  const file = await OpenFile.at(await folderOf(FOLDER), offer.sha256);
  try {
    return use(file);
  } finally {
    file.close();
  }
}
