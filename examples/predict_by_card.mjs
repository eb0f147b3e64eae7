// Predicts with a deployed model in JavaScript, with nothing but its card and its graph.
//
//     npm install onnxruntime-web
//     node predict_by_card.mjs deployed/board samples.json
//
// samples.json is a list of samples: nested lists of numbers, in the shape that the card gives.
// In a page, replace readFile by fetch.
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as ort from "onnxruntime-web";

const [folder, file] = process.argv.slice(2);
const card = JSON.parse(await readFile(join(folder, "card.json"), "utf8"));
const samples = JSON.parse(await readFile(file, "utf8"));

const values = samples.flat(Infinity);
const data = card.input.dtype === "int64" ? BigInt64Array.from(values, BigInt) : Float32Array.from(values);
const shape = card.input.shape.map((size) => size ?? samples.length);
let tensor = new ort.Tensor(card.input.dtype, data, shape);
// There are several graphs if the model runs in stages: one is in memory at a time.
for (const graph of card.graphs) {
  const session = await ort.InferenceSession.create(await readFile(join(folder, graph.file)));
  tensor = (await session.run({ [graph.input]: tensor }))[graph.output];
  await session.release();
}
const { data: numbers, dims } = tensor;

if (card.output.probabilities !== "softmax" || dims.length !== 2) {
  console.log(JSON.stringify({ dims, numbers: [...numbers] }));
} else {
  const classes = dims[1];
  for (let sample = 0; sample < dims[0]; sample++) {
    const logits = numbers.subarray(sample * classes, (sample + 1) * classes);
    const largest = Math.max(...logits);
    const powers = Array.from(logits, (logit) => Math.exp(logit - largest));
    const total = powers.reduce((sum, power) => sum + power, 0);
    const best = logits.indexOf(largest);
    console.log(`${card.class_names[best] ?? best} ${(powers[best] / total).toFixed(4)}`);
  }
}
