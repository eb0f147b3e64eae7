/**
 * The models on this device: the last bundle that it has trained, and its releases.
 *
 * A switch to a release is one write of the pointer. The files of a release are complete before it, and
 * files that nothing names any more are removed later. So a page that is killed at any moment has a
 * whole model.
 */

import type { FileOffer } from "./client.js";
import type { Body } from "./disclosure.js";
import type { ModelInUse, View } from "./messages.js";
import type { Values } from "./storage.js";

/** The last bundle that this page has trained or, after the last round, evaluated. */
export const TRAINED = "trained";
const POINTER = "release";

export interface StoredBundle extends ModelInUse {
  files: FileOffer[];
}

/** A release on this device. `bundle` is the SHA-256 of its manifest. */
export interface InstalledRelease extends StoredBundle {
  bundle: string;
  release: { number: number; issued: number };
}

/** ReleasePointer of device_agent/federation/release_folder.py. */
export interface ReleasePointer {
  current: InstalledRelease | null;
  previous: InstalledRelease | null;
  /** The last releases that were not taken. */
  refused: { number: number; round: number; bundle: string }[];
  /** When the newest offer that was followed was signed, in seconds since 1970. */
  issued: number;
  /** The report that the coordinator does not have yet. */
  unsent: Body<"POST /releases/{number}"> | null;
}

export async function releasePointer(values: Values): Promise<ReleasePointer> {
  const none = { current: null, previous: null, refused: [], issued: 0, unsent: null };
  return (await values.get<ReleasePointer>(POINTER)) ?? none;
}

export async function writePointer(pointer: ReleasePointer, values: Values): Promise<void> {
  await values.put({ [POINTER]: pointer });
}

/** The bundles whose files stay. */
export async function keptBundles(values: Values): Promise<StoredBundle[]> {
  const { current, previous } = await releasePointer(values);
  const trained = await values.get<StoredBundle>(TRAINED);
  return [trained, current, previous].filter((bundle) => bundle !== null);
}

/** The model that answers the owner: the personal model, or the release, or the last trained bundle. */
export async function modelInUse(values: Values): Promise<StoredBundle | null> {
  const trained = await values.get<StoredBundle>(TRAINED);
  return trained?.personal ? trained : modelToCompare(values);
}

/** The model with which a release is compared: the current release, or the last trained bundle. */
export async function modelToCompare(values: Values): Promise<StoredBundle | null> {
  return (await releasePointer(values)).current ?? (await values.get<StoredBundle>(TRAINED));
}

/** What the View says about the models on this device. */
export async function modelsOf(values: Values): Promise<Pick<View, "model" | "refusedRelease">> {
  const { current, refused } = await releasePointer(values);
  const refusedRelease = refused.at(-1)?.number ?? 0;
  const later = refusedRelease > (current?.release.number ?? 0);
  return { model: await modelInUse(values), refusedRelease: later ? refusedRelease : null };
}
