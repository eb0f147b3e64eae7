/** Makes samples from CSV files of a sensor: windows of lines (device_agent/data/csv_windows.py). */

import Papa from "papaparse";
import { Failure } from "./faults.js";
import { normalise, type OnProgress, type Prepared, type Series } from "./sample_form.js";
import type { Dtype } from "./tensors.js";

const DELIMITERS = [",", ";", "\t"];
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
/** Progress is reported after this many lines. */
const REPORTED = 5000;
const LARGEST = 3e38;
/** The most numbers in a piece of samples. */
const PIECE = 1 << 18;

/** A problem lists at most this many columns of a file. */
const MOST_NAMED = 12;

interface Where {
  file: string;
  line: number;
}
interface Lines {
  /** Normalised values, (lines, columns). */
  numbers: Float64Array;
  starts: number[];
}

export async function windowsOf(
  files: readonly File[],
  series: Series,
  sampleSize: number,
  labelType: Dtype,
  onProgress: OnProgress,
): Promise<Prepared> {
  const of = files.reduce((sum, file) => sum + file.size, 0);
  let done = 0;
  const width = series.columns.length;
  const length = sampleSize / width;
  const lines: Lines[] = [];
  const ends: number[] = [];
  for (const file of [...files].sort((one, other) => (one.name < other.name ? -1 : 1))) {
    onProgress({ unit: "bytes", done, of });
    const { numbers, labels } = await readSeries(file, series, labelType, (share) =>
      onProgress({ unit: "bytes", done: done + share * file.size, of }),
    );
    done += file.size;
    normalise(numbers, series.mean, series.std);
    const starts = windowStarts(labels, length, series.step || length, labelType === "int64");
    for (const start of starts) ends.push(labels[start + length - 1]!);
    lines.push({ numbers, starts });
  }
  function* samples(): Generator<Float32Array<ArrayBuffer>, void> {
    const most = Math.max(1, Math.floor(PIECE / sampleSize));
    for (const { numbers, starts } of lines) {
      for (let begin = 0; begin < starts.length; begin += most) {
        yield windows(numbers, starts.slice(begin, begin + most), series, length);
      }
    }
  }
  if (ends.length === 0) {
    const same = labelType === "int64" ? "/same-label" : "";
    throw new Failure(`data.too-few-samples${same}`, { lines: length });
  }
  const y = labelType === "int64" ? BigInt64Array.from(ends, BigInt) : Float32Array.from(ends);
  return { y, samples };
}

/** A window of the last lines of `file`, and how many. The file needs no column of labels. */
export async function lastWindow(
  file: File,
  series: Series,
  sampleSize: number,
): Promise<{ sample: Float32Array<ArrayBuffer>; lines: number }> {
  const width = series.columns.length;
  const lines = sampleSize / width;
  const { numbers } = await readSeries(file, series, null, () => undefined);
  const start = numbers.length / width - lines;
  if (start < 0) throw new Failure("data.too-few-samples", { lines });
  normalise(numbers, series.mean, series.std);
  return { sample: windows(numbers, [start], series, lines), lines };
}

/** The windows of `length` lines from each of `starts`, one after another. `numbers` are (lines, columns). */
function windows(
  numbers: Float64Array,
  starts: readonly number[],
  { columns, channels }: Series,
  length: number,
): Float32Array<ArrayBuffer> {
  const width = columns.length;
  const size = length * width;
  const piece = new Float32Array(starts.length * size);
  starts.forEach((start, sample) => {
    for (let line = 0; line < length; line++) {
      for (let column = 0; column < width; column++) {
        const index = channels === "first" ? column * length + line : line * width + column;
        piece[sample * size + index] = numbers[(start + line) * width + column]!;
      }
    }
  });
  return piece;
}

/** The first line of each window of `length` lines. With `runs`, a window has only one label. */
function windowStarts(labels: readonly number[], length: number, step: number, runs: boolean): number[] {
  const starts: number[] = [];
  let begin = 0;
  for (let at = 1; at <= labels.length; at++) {
    if (at < labels.length && !(runs && labels[at] !== labels[at - 1])) continue;
    for (let start = begin; start <= at - length; start += step) starts.push(start);
    begin = at;
  }
  return starts;
}

/** @param labelType The type of the labels; null if only the numbers are read. */
async function readSeries(
  file: File,
  series: Series,
  labelType: Dtype | null,
  onShare: (share: number) => void,
): Promise<{ numbers: Float64Array; labels: number[] }> {
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Failure("data.unreadable-file/csv", { file: file.name });
  }
  text = text.replace(/\r\n?/g, "\n");
  const bare = text.slice(0, text.search(/\n|$/)).replace(/"[^"]*"/g, "");
  const count = (mark: string): number => bare.split(mark).length;
  const delimiter = DELIMITERS.reduce((best, mark) => (count(mark) > count(best) ? mark : best));
  const decimals = new Decimals(delimiter);
  const numbers: number[] = [];
  const labels: number[] = [];
  const wanted = labelType === null ? series.columns : [...series.columns, series.label];
  let indices: number[] | null = null;
  let line = 1;
  let counted = 0;
  Papa.parse<string[]>(text, {
    delimiter,
    newline: "\n",
    skipEmptyLines: true,
    step: ({ data: row, errors, meta: { cursor } }) => {
      if (errors.length > 0) throw new Failure("data.unreadable-file/quotation", { file: file.name });
      if (indices === null) {
        indices = columnsOf(file, row, wanted);
        return;
      }
      for (; counted < cursor - 1; counted++) if (text[counted] === "\n") line++;
      const where = { file: file.name, line };
      const cells = indices.map((index) => (row[index] ?? "").trim());
      series.columns.forEach((column, i) => numbers.push(decimals.number(where, column, cells[i]!)));
      if (labelType !== null) labels.push(labelOf(where, series, cells.at(-1)!, labelType, decimals));
      if (labels.length % REPORTED === 0) onShare(cursor / text.length);
    },
  });
  if (indices === null) columnsOf(file, [], wanted);
  return { numbers: Float64Array.from(numbers), labels };
}

/** The indices of the columns `wanted`, from the first row of `file`. */
function columnsOf(file: File, row: readonly string[], wanted: readonly string[]): number[] {
  const names = row.map((name) => name.trim().normalize());
  return wanted.map((name) => {
    const index = names.indexOf(name.normalize());
    if (index < 0 || names.lastIndexOf(name.normalize()) !== index) {
      const several = index < 0 ? "" : "/several";
      throw new Failure(`data.missing-column${several}`, {
        file: file.name,
        column: name,
        columns: names.slice(0, MOST_NAMED),
      });
    }
    return index;
  });
}

/** Reads the numbers of a file. If commas do not separate columns, numbers may have decimal commas: all or none. */
class Decimals {
  private mark: string | null = null;

  constructor(private readonly delimiter: string) {}

  number(where: Where, column: string, text: string): number {
    const comma = this.delimiter !== "," && text.includes(",");
    const plain = comma ? text.replace(",", ".") : text;
    const number = Number(plain);
    const wrong = !NUMBER.test(plain) || Math.abs(number) > LARGEST;
    const mark = comma ? "," : text.includes(".") ? "." : this.mark;
    this.mark ??= mark;
    if (wrong || mark !== this.mark) {
      const shown = { ...where, column, text: text.slice(0, 40) };
      throw new Failure(wrong ? "data.not-a-number" : "data.not-a-number/mixed", shown);
    }
    return number;
  }
}

function labelOf(
  where: Where,
  { classes, label }: Series,
  text: string,
  labelType: Dtype,
  decimals: Decimals,
): number {
  if (classes.length === 0 && labelType !== "int64") return Math.fround(decimals.number(where, label, text));
  const names = classes.map((name) => name.normalize());
  const number = /^\d{1,15}$/.test(text) ? Number(text) : -1;
  const index = classes.length > 0 ? names.indexOf(text.normalize()) : number;
  if (index >= 0) return index;
  const said = { ...where, text: text.slice(0, 40) };
  if (classes.length === 0) throw new Failure("data.unknown-class/number", said);
  throw new Failure("data.unknown-class", { ...said, classes });
}
