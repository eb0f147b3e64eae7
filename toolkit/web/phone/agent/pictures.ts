/** Makes samples from pictures: decodes, turns, scales, normalises (device_agent/data/pictures.py). */

import { Failure } from "./faults.js";
import { normalise, type Images, type OnProgress, type Prepared } from "./sample_form.js";

/** The weights of red, green and blue in a grey value (ITU-R BT.601). */
const GREY = [0.299, 0.587, 0.114] as const;
const MOST_POINTS = 2 ** 27;
const RGB = 3;

export function picturesOf(
  pictures: readonly { file: File; label: string }[],
  images: Images,
  sampleShape: readonly number[],
  onProgress: OnProgress,
): Prepared {
  const order = pictures
    .map(({ file, label }) => ({ file, label: images.classes.indexOf(label) }))
    .sort((one, other) => one.label - other.label || (one.file.name < other.file.name ? -1 : 1));
  async function* samples(): AsyncGenerator<Float32Array<ArrayBuffer>, void> {
    for (const [done, { file }] of order.entries()) {
      onProgress({ unit: "pictures", done, of: order.length });
      yield await pictureOf(file, images, sampleShape);
    }
  }
  return { y: BigInt64Array.from(order, ({ label }) => BigInt(label)), samples };
}

/** The numbers of a picture, (channels, height, width). */
export async function pictureOf(
  file: File,
  images: Images,
  [channels = RGB, height = 1, width = 1]: readonly number[],
): Promise<Float32Array<ArrayBuffer>> {
  const picture = await decoded(file);
  const crop = images.fit === "crop";
  const scale = Math.min(picture.height / height, picture.width / width);
  const tall = crop ? height * scale : picture.height;
  const wide = crop ? width * scale : picture.width;
  const rows = filters((picture.height - tall) / 2, tall, height, picture.height);
  const columns = filters((picture.width - wide) / 2, wide, width, picture.width);
  const values = acrossColumns(downRows(picture, rows), picture.width, columns, height);
  const points = height * width;
  let colours = values;
  if (channels === 1) {
    colours = new Float64Array(points);
    for (let i = 0; i < points; i++) {
      colours[i] = GREY.reduce((sum, share, channel) => sum + share * values[RGB * i + channel]!, 0);
    }
  }
  for (let i = 0; i < colours.length; i++) colours[i]! /= 255;
  normalise(colours, images.mean, images.std);
  const sample = new Float32Array(channels * points);
  for (let i = 0; i < colours.length; i++) {
    sample[(i % channels) * points + Math.floor(i / channels)] = colours[i]!;
  }
  return sample;
}

/** The pixels of a picture, four bytes each: red, green, blue and alpha. */
async function decoded(file: File): Promise<ImageData> {
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  } catch {
    throw new Failure("data.unreadable-file/picture", { file: file.name });
  }
  try {
    const { width, height } = bitmap;
    if (width * height > MOST_POINTS) {
      throw new Failure("data.unreadable-file/large-picture", { file: file.name, width, height });
    }
    // Without alpha, transparent pixels become black.
    const canvas = new OffscreenCanvas(width, height).getContext("2d", { alpha: false, willReadFrequently: true });
    if (canvas === null) throw new Failure("page.fault/pictures", {});
    canvas.drawImage(bitmap, 0, 0);
    return canvas.getImageData(0, 0, width, height);
  } finally {
    bitmap.close();
  }
}

/** The old points from which a new point is computed, and their weights. */
interface Filter {
  first: number;
  weights: Float64Array;
}

/**
 * Triangle filters that scale `length` points from `start` to `size` points. The weight of an old point
 * falls linearly with its distance from the new point. It is 0 at the larger of an old and a new step.
 */
function filters(start: number, length: number, size: number, points: number): Filter[] {
  const step = length / size;
  const reach = Math.max(step, 1);
  return Array.from({ length: size }, (_, index) => {
    const centre = start + (index + 0.5) * step;
    const first = Math.max(0, Math.ceil(centre - reach - 0.5));
    const last = Math.min(points - 1, Math.floor(centre + reach - 0.5));
    const weights = Float64Array.from({ length: last - first + 1 }, (_, i) =>
      Math.max(0, 1 - Math.abs(first + i + 0.5 - centre) / reach),
    );
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return { first, weights: weights.map((weight) => weight / sum) };
  });
}

/** Scales a picture to `rows` rows. Returns (rows, width, RGB). */
function downRows({ data, width }: ImageData, rows: readonly Filter[]): Float64Array {
  const scaled = new Float64Array(rows.length * width * RGB);
  rows.forEach(({ first, weights }, row) => {
    weights.forEach((weight, i) => {
      let from = (first + i) * width * 4;
      let to = row * width * RGB;
      for (let x = 0; x < width; x++, from += 4, to += RGB) {
        scaled[to]! += weight * data[from]!;
        scaled[to + 1]! += weight * data[from + 1]!;
        scaled[to + 2]! += weight * data[from + 2]!;
      }
    });
  });
  return scaled;
}

/** Scales the result of `downRows`, (height, width, RGB), to (height, columns, RGB). */
function acrossColumns(values: Float64Array, width: number, columns: readonly Filter[], height: number): Float64Array {
  const scaled = new Float64Array(height * columns.length * RGB);
  for (let y = 0; y < height; y++) {
    columns.forEach(({ first, weights }, column) => {
      const to = (y * columns.length + column) * RGB;
      weights.forEach((weight, i) => {
        const from = (y * width + first + i) * RGB;
        for (let channel = 0; channel < RGB; channel++) scaled[to + channel]! += weight * values[from + channel]!;
      });
    });
  }
  return scaled;
}
