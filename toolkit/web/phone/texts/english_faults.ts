/** Faults in English. Reports to the operator are always in English, too. */

import type { Sentences, Unsafe } from "../agent/faults.js";
import type { PauseReason } from "../agent/messages.js";

/** Why a training waits, for the operator. */
export const PAUSES: Record<PauseReason, string> = {
  owner: "paused by its owner",
  hidden: "page hidden",
  unplugged: "not charging",
  metered: "on metered data",
};

const UNSAFE: Record<Unsafe, string> = {
  training: "its own training",
  functions: "functions",
  outside: "values in another file",
  domain: "operators of the domain",
  nested: "too many graphs within graphs",
  "not-onnx": "bytes that are not ONNX",
};

const shape = (sizes: readonly number[]): string => `(n${sizes.map((size) => `, ${size}`).join("")})`;
const listed = (names: readonly string[]): string =>
  names.length === 0 ? "none" : names.map((name) => `“${name}”`).join(", ");

/** A device leaves a sum, because of something with which the coordinator could learn an update. */
const unsafe = (why: string): string =>
  `This device has left the secure sum of the round, because the coordinator broke a rule: ${why}. The update was ` +
  "not revealed. If this happens again, ask the operator.";

export const ENGLISH_FAULTS: Sentences = {
  "bundle.altered-file": ({ file }) =>
    `The content of ${file} differs from what the coordinator announced. The file was discarded.`,
  "bundle.altered-file/manifest": ({ file }) => `${file} is not the file that the manifest describes.`,
  "bundle.malformed": ({ where }) => `The coordinator sent work that this page cannot use (${where}).`,
  "bundle.malformed/version": ({ found, known }) =>
    `The coordinator sent work of version ${found}, but this page reads version ${known}. Reload the page.`,
  "bundle.malformed/runtime": ({ runtime }) =>
    `The coordinator sent work for ${runtime}, but a page needs ONNX graphs.`,
  "bundle.malformed/private": () =>
    "The federation trains with differential privacy for samples, which this page does not support. Nothing was " +
    "trained. Use the agent program on a computer.",
  "bundle.unreadable-tensors": ({ file }) => `${file} is damaged: its numbers cannot be read.`,
  "bundle.unsafe-graph": ({ file, found, domain }) =>
    `${file} was not opened: the graph has ${UNSAFE[found]}${domain && ` '${domain}'`}. Exported graphs never have ` +
    "this. Ask the operator where this file comes from.",
  "bundle.wrong-graph": ({ port, signature }) =>
    `The coordinator sent work that contradicts itself: “${port}” of ${signature} is only in the graph or ` +
    "only in the manifest.",
  "client.away/unreachable": () => "The coordinator cannot be reached.",
  "client.away/broke-off": () => "The connection to the coordinator broke off.",
  "client.away/silent": () => "The coordinator does not answer.",
  "client.away/status": ({ status }) => `The coordinator cannot be reached at the moment (HTTP ${status}).`,
  "client.away/preparing": () =>
    "The coordinator is still preparing the federation. The first time, this takes minutes.",
  "client.away/busy": () => "The coordinator is busy.",
  "client.not-a-coordinator": ({ origin }) => `${origin} did not answer like a coordinator.`,
  "client.not-a-coordinator/status": ({ origin, status }) =>
    `${origin} did not answer like a coordinator (HTTP ${status}).`,
  "client.not-a-coordinator/samples": ({ origin }) =>
    `${origin} asks for data of a kind that this page does not know. Reload the page.`,
  "client.too-long": ({ origin }) => `${origin} sent more than it announced. The answer was not used.`,
  "data.label-out-of-range": ({ name, label, highest }) =>
    `${name}: the label ${label} is outside the model's classes 0 to ${highest}.`,
  "data.missing": () => "This page has no data. Choose some.",
  "data.missing-array": ({ file }) =>
    `${file} must contain the arrays x (examples) and y (labels). Save it with numpy.savez(file, x=x, y=y).`,
  "data.missing-array/several": ({ name, arrays }) =>
    `${name} must contain ${arrays.length === 1 ? "the array" : "the arrays"} ${listed(arrays)}. Save them with ` +
    "numpy.savez.",
  "data.missing-array/x": ({ file }) =>
    `${file} must contain the array x with at least one example. Save it with numpy.savez(file, x=x).`,
  "data.missing-column": ({ file, column, columns }) =>
    `${file} has no column “${column}”. The first line must name the columns; it names ${listed(columns)}.`,
  "data.missing-column/several": ({ file, column, columns }) =>
    `${file} has several columns “${column}”. The first line names ${listed(columns)}.`,
  "data.missing-file": () => "No file was chosen.",
  "data.no-labels": ({ name, ignored }) =>
    `${name}: all labels are ${ignored}. Such labels are ignored, so there is nothing to train on.`,
  "data.not-a-number": ({ file, line, column, text }) =>
    `${file}, line ${line}: ${column} is “${text}”; it must be a number such as -1.5. Correct the line or remove it.`,
  "data.not-a-number/mixed": ({ file, line, column, text }) =>
    `${file}, line ${line}: ${column} is “${text}”, but numbers before it have the other decimal mark. Write all ` +
    "numbers of a file with a point, or all with a comma.",
  "data.not-a-sequence": ({ name, sample, ignored }) =>
    `${name}: with the loss ctc, the labels of an example must be classes other than 0 (the blank), padded at the ` +
    `end with ${ignored}. Example ${sample} (counted from 0) breaks this rule.`,
  "data.not-prepared": () => "This federation does not accept files of this kind.",
  "data.nothing-new": () => "This page has these files already: nothing was added.",
  "data.number-out-of-range": ({ name, sample }) =>
    `${name}: example ${sample} (counted from 0) contains a number that the model cannot take. Correct or ` +
    "remove the example.",
  "data.other-form": ({ name }) =>
    `The examples in ${name} have another form than those on this page. Choose the file again, without keeping the ` +
    "examples that are already here.",
  "data.other-preparation": () =>
    "This federation now prepares data in another way. Choose your data again.",
  "data.too-few-samples": ({ lines }) =>
    `An example for the model needs ${lines} lines in a row. No file has so many lines. Choose longer files.`,
  "data.too-few-samples/same-label": ({ lines }) =>
    `An example for the model needs ${lines} lines in a row with the same label. No file has so many. ` +
    "Choose longer files.",
  "data.unknown-class": ({ file, line, text, classes }) =>
    `${file}, line ${line}: “${text}” is not a class. It must be one of ${listed(classes)}.`,
  "data.unknown-class/number": ({ file, line, text }) =>
    `${file}, line ${line}: “${text}” is not a class. It must be the number of a class, such as 0.`,
  "data.unreadable": ({ file }) =>
    `${file} is not a complete numpy file (.npz). Save it with numpy.savez, then choose it again.`,
  "data.unreadable/fortran": ({ file }) =>
    `${file} has an array in Fortran order. Save it with numpy.ascontiguousarray.`,
  "data.unreadable-file/gone": ({ file }) =>
    `${file} cannot be read any more. If it is in a cloud, load it onto this device first.`,
  "data.unreadable-file/csv": ({ file }) => `${file} is not a CSV file in UTF-8. Save it as “CSV UTF-8”.`,
  "data.unreadable-file/quotation": ({ file }) =>
    `${file} has a quotation mark (") that is not closed. Correct the file.`,
  "data.unreadable-file/picture": ({ file }) => `${file} is not a picture that this browser can read.`,
  "data.unreadable-file/large-picture": ({ file, width, height }) =>
    `${file} has ${width} x ${height} pixels, too many for this page.`,
  "data.wrong-shape/count": ({ name, samples, labels, least }) =>
    samples === labels
      ? `The model needs at least ${least} examples; ${name} has ${samples}.`
      : `${name} has ${samples} examples and ${labels} labels. It needs as many labels as examples.`,
  "data.wrong-shape/x": ({ name, wanted, wantedShape, found, foundShape }) =>
    `${name}: x must be ${wanted} of the shape ${shape(wantedShape)}; it is ${found} of ${shape(foundShape)}.`,
  "data.wrong-shape/y": ({ name, wanted, wantedShape, found, foundShape }) =>
    `${name}: y must be ${wanted} of the shape ${shape(wantedShape)}; it is ${found} of ${shape(foundShape)}.`,
  "data.wrong-type": ({ file, type }) =>
    `${file} has an array of the type ${type}. Use x.astype(numpy.float32) for numbers and ` +
    "y.astype(numpy.int64) for classes.",
  "page.fault": ({ message }) => `Something unexpected went wrong: ${message}`,
  "page.fault/pictures": () => "This browser cannot read pictures.",
  refused: ({ message }) => message,
  "leave.untold": ({ device, id }) =>
    "Everything on this device is erased. The coordinator did not answer, so it still counts this device " +
    `as a member. Tell the operator that “${device}” (${id}) has left.`,
  "release.no-inference-bundle": () => "The release has no model for predictions, so it cannot be used.",
  "release.no-room": ({ needed, free }) =>
    `The release needs ${needed} bytes, but this page may store only ${free} more. The page tries again in an hour.`,
  "release.worse": ({ reason }) => reason,
  "storage.disk-full": () =>
    "The browser has no room left for this page. Free some storage, then continue.",
  "storage.lost": () => "The browser has removed a file of this page.",
  "storage.lost/data": () => "The browser has removed the data of this page.",
  "storage.lost/model": () =>
    "The browser has removed the model of this page. If there is another round, this page gets the model again.",
  "trial.no-memory": () =>
    "This device has not enough memory for the model at the moment. Close other tabs and apps, reload this page, " +
    "then try again.",
  "trial.no-model": () => "There is no model on this device yet. It comes with the first round.",
  "trial.training": () => "This device is training. Try the model when the training waits, is paused or has finished.",
  "trust.forged-invitation": () =>
    "The description of this federation is not signed by its coordinator: somebody has altered it on the way.",
  "trust.forged-key": () =>
    "A new key came that is not signed by your coordinator: somebody has altered it on the way. Nothing was changed.",
  "trust.forged-release": ({ number }) =>
    `Release ${number} is not signed by your coordinator: somebody has altered it on the way. Nothing was changed.`,
  "trust.forged-work": () =>
    "The work that came is not signed by your coordinator: somebody has altered it on the way. Nothing was " +
    "trained.",
  "trust.forged-work/group": () =>
    "The list of devices of a secure sum is not signed by your coordinator: somebody has altered it on the way. " +
    "Nothing was sent.",
  "trust.late-key": () =>
    "The coordinator has a new key, and this page can no longer change to it. Ask for a new link and join with it. " +
    "Also check the date of this device.",
  "trust.unclippable": () =>
    "The change of this device cannot be clipped, because numbers that the coordinator sent are not finite, or " +
    "because the group of devices is too large. Nothing was sent. Ask the operator.",
  "trust.less-noise": ({ promised, noise }) =>
    `At first, secure sums had the noise multiplier ${promised}. The coordinator now asks for a sum with ${noise}. ` +
    "Nothing was sent. Ask the operator. To agree, leave and join again.",
  "trust.no-secure-sum": () =>
    "The coordinator asks for the update of this device, but the federation used secure sums before, which reveal no " +
    "single update. Nothing was sent. To agree, leave and join again.",
  "trust.old-release": ({ number }) =>
    `The offer of release ${number} is older than the newest offer that this page has handled: somebody may have ` +
    "sent an old message again. Nothing was changed.",
  "trust.old-work": () =>
    "The work is signed, but it is not current: somebody may have sent old work again. Nothing was trained. " +
    "Check the date and the time of this device.",
  "trust.other-key": () =>
    "This is not the coordinator of the link: its key is different. Ask for a new link.",
  "trust.single-figures": () =>
    "The coordinator asks how good the model is on your examples, but the federation uses secure sums, which reveal " +
    "no figure of a single device. Nothing was sent. To agree, leave and join again.",
  "trust.unsafe-sum/altered-shares": ({ device }) =>
    unsafe(`the shares of ${device} were altered, or made for another group`),
  "trust.unsafe-sum/few-confirmations": ({ confirmed, needed }) =>
    unsafe(`only ${confirmed} devices of the group have confirmed the same sum, but ${needed} are needed`),
  "trust.unsafe-sum/few-shares": ({ held, needed }) =>
    unsafe(`only ${held} devices have shares of each other, but ${needed} are needed to remove the masks`),
  "trust.unsafe-sum/left-out": () => unsafe("the sum leaves out the update that this device has sent"),
  "trust.unsafe-sum/no-group": () => unsafe("it left out the list of the group"),
  "trust.unsafe-sum/no-update-yet": () =>
    unsafe("it named the devices in the sum before this device had sent its update"),
  "trust.unsafe-sum/other-devices": () => unsafe("it named other devices in the sum than before"),
  "trust.unsafe-sum/other-members": () => unsafe("the sum has a device twice, or a device that is not in the group"),
  "trust.unsafe-sum/other-neighbours": () =>
    unsafe("it passed on shares of devices that are not neighbours of this device"),
  "trust.unsafe-sum/own-keys": () => unsafe("the keys of this device are missing from the group, or were changed"),
  "trust.unsafe-sum/shares-twice": () => unsafe("it asked twice for the shares of the same attempt"),
  "trust.unsafe-sum/small-group": ({ found, needed }) =>
    unsafe(`the group has ${found} devices, but it needs ${needed}`),
  "trust.unsafe-sum/small-sum": ({ found, needed }) => unsafe(`the sum has ${found} devices, but it needs ${needed}`),
  "trust.unsafe-sum/twice": () => unsafe("the group has a device or a key twice"),
  "trust.unsafe-sum/unconfirmed": () =>
    unsafe("it asked for shares for another sum than the one that the devices have confirmed"),
  "trust.unsafe-sum/unsigned-keys": ({ device }) =>
    unsafe(`${device} has not signed its keys for this round, bundle and terms, or these keys cannot be used`),
  "trust.unsafe-sum/update-twice": () => unsafe("it asked twice for the update of the same attempt"),
  "update.beyond-float16": ({ value }) =>
    `In float16, recorded activations can be at most 65,504, but one is ${value}. Check the data. If they ` +
    "are right, the coordinator needs a submodel without recording=float16.",
  "update.diverged": () => "The training gave no usable numbers. The data may contain extreme numbers.",
  "update.not-finite": ({ tensor }) =>
    `The training gave no usable numbers in ${tensor}. The data may contain extreme numbers.`,
};
