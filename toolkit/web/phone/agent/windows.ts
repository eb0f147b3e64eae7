/** Samples from CSV files of a sensor: windows of lines (device_agent/data/windows.py). */

import { Failure } from "./failure.js";
import { normalise, type Prepared, type Series } from "./sample_form.js";
import type { Dtype } from "./tensors.js";

const DELIMITERS = [",", ";", "\t"];
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
const LARGEST = 3e38;
/** Numbers in a piece of samples. */
const PIECE = 1 << 18;

/** Columns of a file that a problem names. */
const MOST_NAMED = 12;

interface Where {
  file: string;
  line: number;
}
interface Lines {
  /** (lines, columns), normalised. */
  numbers: Float64Array;
  starts: number[];
}

export async function windowsOf(
  files: readonly File[],
  series: Series,
  sampleSize: number,
  labelType: Dtype,
): Promise<Prepared> {
  const width = series.columns.length;
  const length = sampleSize / width;
  const read: Lines[] = [];
  const ends: number[] = [];
  for (const file of [...files].sort((one, other) => (one.name < other.name ? -1 : 1))) {
    const { numbers, labels } = await readSeries(file, series, labelType);
    normalise(numbers, series.mean, series.std);
    const starts = windowStarts(labels, length, series.step || length, labelType === "int64");
    for (const start of starts) ends.push(labels[start + length - 1]!);
    read.push({ numbers, starts });
  }
  function* samples(): Generator<Float32Array<ArrayBuffer>, void> {
    const most = Math.max(1, Math.floor(PIECE / sampleSize));
    for (const { numbers, starts } of read) {
      for (let begin = 0; begin < starts.length; begin += most) {
        const taken = starts.slice(begin, begin + most);
        const piece = new Float32Array(taken.length * sampleSize);
        taken.forEach((start, sample) => {
          for (let line = 0; line < length; line++) {
            for (let column = 0; column < width; column++) {
              const place = series.channels === "first" ? column * length + line : line * width + column;
              piece[sample * sampleSize + place] = numbers[(start + line) * width + column]!;
            }
          }
        });
        yield piece;
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

/** The first line of each window of `length` lines; with `runs` a window has only one label. */
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

async function readSeries(
  file: File,
  series: Series,
  labelType: Dtype,
): Promise<{ numbers: Float64Array; labels: number[] }> {
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Failure("data.unreadable-file/csv", { file: file.name });
  }
  const head = text.slice(0, text.search(/[\r\n]|$/));
  const bare = head.replace(/"[^"]*"/g, "");
  const count = (mark: string): number => bare.split(mark).length;
  const delimiter = DELIMITERS.reduce((best, mark) => (count(mark) > count(best) ? mark : best));
  const rows = rowsOf(text, delimiter);
  if (rows === null) throw new Failure("data.unreadable-file/quotation", { file: file.name });
  const names = (rows.shift()?.cells ?? []).map((name) => name.trim().normalize());
  const places = [...series.columns, series.label].map((name) => {
    const place = names.indexOf(name.normalize());
    if (place < 0 || names.lastIndexOf(name.normalize()) !== place) {
      const several = place < 0 ? "" : "/several";
      throw new Failure(`data.missing-column${several}`, {
        file: file.name,
        column: name,
        columns: names.slice(0, MOST_NAMED),
      });
    }
    return place;
  });
  const numbers = new Float64Array(rows.length * series.columns.length);
  const labels = rows.map((row, place) => {
    const where = { file: file.name, line: row.line };
    const cells = places.map((place) => (row.cells[place] ?? "").trim());
    series.columns.forEach((column, i) => {
      numbers[place * series.columns.length + i] = numberOf(where, column, cells[i]!);
    });
    return labelOf(where, series, cells.at(-1)!, labelType);
  });
  return { numbers, labels };
}

function numberOf(where: Where, column: string, text: string): number {
  const number = Number(text);
  if (!NUMBER.test(text) || Math.abs(number) > LARGEST) {
    throw new Failure("data.not-a-number", { ...where, column, text: text.slice(0, 40) });
  }
  return number;
}

function labelOf(where: Where, { classes, label }: Series, text: string, labelType: Dtype): number {
  if (classes.length === 0 && labelType !== "int64") return Math.fround(numberOf(where, label, text));
  const names = classes.map((name) => name.normalize());
  const found = classes.length > 0 ? names.indexOf(text.normalize()) : /^\d{1,15}$/.test(text) ? Number(text) : -1;
  if (found >= 0) return found;
  const said = { ...where, text: text.slice(0, 40) };
  if (classes.length === 0) throw new Failure("data.unknown-class/number", said);
  throw new Failure("data.unknown-class", { ...said, classes });
}

interface Row {
  cells: string[];
  /** Its last line, from 1. */
  line: number;
}

/** The rows of a CSV text (RFC 4180), without empty lines; null if a quotation mark is not closed. */
function rowsOf(text: string, delimiter: string): Row[] | null {
  const rows: Row[] = [];
  let cells: string[] = [];
  let cell = "";
  let quoted = false;
  let line = 1;
  const endRow = (): void => {
    cells.push(cell);
    if (cells.length > 1 || cell !== "") rows.push({ cells, line });
    cells = [];
    cell = "";
  };
  for (let at = 0; at < text.length; at++) {
    const mark = text[at]!;
    const ends = mark === "\n" || (mark === "\r" && text[at + 1] !== "\n");
    if (quoted) {
      if (mark !== '"') cell += mark;
      else if (text[at + 1] === '"') cell += text[++at];
      else quoted = false;
    } else if (mark === '"' && cell === "") quoted = true;
    else if (mark === delimiter) {
      cells.push(cell);
      cell = "";
    } else if (ends) endRow();
    else if (mark !== "\r") cell += mark;
    if (ends) line++;
  }
  endRow();
  return quoted ? null : rows;
}
