// Builds both pages into built/: hashed names, compressed once, listed in files.json.

import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { build } from "esbuild";

const HERE = new URL(".", import.meta.url);
const OUT = new URL("built/", HERE);
const ORT = new URL("node_modules/onnxruntime-web/", HERE);
const LICENCE = new URL("../../LICENSE", HERE);
/** The libraries in both pages, without the runtime. Each has a file LICENSE. */
const LIBRARIES = [
  "@noble/ciphers",
  "@noble/curves",
  "@noble/hashes",
  "@petamoriken/float16",
  "@zip.js/zip.js",
  "papaparse",
  "htmx.org",
  "uplot",
];
const TYPES = {
  css: "text/css; charset=utf-8",
  html: "text/html; charset=utf-8",
  js: "text/javascript; charset=utf-8",
  png: "image/png",
  svg: "image/svg+xml",
  txt: "text/plain; charset=utf-8",
  wasm: "application/wasm",
  webmanifest: "application/manifest+json",
};
const files = {};
const written = new Set(["files.json"]);

const read = (name) => readFileSync(new URL(name, HERE));
const sha256Of = (raw) => createHash("sha256").update(raw).digest("hex");

/** Adds a file of the page under its own name. */
function add(name, content, immutable = false) {
  const raw = Buffer.from(content);
  const type = name.slice(name.lastIndexOf(".") + 1);
  const params = { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_LGWIN]: 24 };
  const encoders = { br: () => brotliCompressSync(raw, { params }) };
  // Browsers that can run the page accept brotli. The largest file is sent only in this form.
  if (type !== "wasm") encoders.gz = () => gzipSync(raw, { level: 9 });
  for (const [suffix, encode] of Object.entries(encoders)) {
    const file = `${name}.${suffix}`;
    written.add(file);
    // If the WebAssembly is the same as in the last build, this saves half a minute.
    if (!immutable || !existsSync(new URL(file, OUT))) writeFileSync(new URL(file, OUT), encode());
  }
  const encodings = Object.keys(encoders);
  files[name] = { type: TYPES[type], sha256: sha256Of(raw), size: raw.length, immutable, encodings };
  return name;
}

/** Adds a file under a name with a hash of its content; returns that name. */
function addHashed(name, content) {
  const [stem, type] = name.split(".");
  return add(`${stem}.${sha256Of(content).slice(0, 10)}.${type}`, content, true);
}

async function bundled(entry, values = {}) {
  const define = Object.entries(values).map(([name, value]) => [name, JSON.stringify(value)]);
  const result = await build({
    entryPoints: [new URL(entry, HERE).pathname],
    bundle: true,
    format: "esm",
    target: "es2022",
    minify: true,
    legalComments: "none", // they are in third-party-notices.txt
    write: false,
    define: Object.fromEntries(define),
    // This variant includes the loader of its WebAssembly, so no second script is fetched.
    alias: { "onnxruntime-web/wasm": new URL("dist/ort.wasm.bundle.min.mjs", ORT).pathname },
  });
  return result.outputFiles[0].contents;
}

/** Reads the text file `name` and replaces {{names}} by their `words`. */
function filled(name, words, escape) {
  const word = (key) => {
    if (words[key] === undefined) throw new Error(`${name}: no text ${key}`);
    return escape(words[key]);
  };
  return String(read(name))
    .replace(/\{\{(\w+)\}\}/g, (_, key) => word(key))
    // Elements that page/words.ts fills in other languages.
    .replace(/ data-text="(\w+)"[^>]*>/g, (found, key) => found + word(key))
    .replace(/ data-label="(\w+)"/g, (found, key) => `${found} aria-label="${word(key)}"`)
    .replace(/ data-value="(\w+)"/g, (found, key) => `${found} value="${word(key)}"`);
}

const inHtml = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.codePointAt(0)};`);
const inJson = (text) => JSON.stringify(text).slice(1, -1);
const asIs = (text) => text;

mkdirSync(OUT, { recursive: true });
const texts = Buffer.from(await bundled("phone/texts/english.ts")).toString("base64");
const { PAGE } = await import(`data:text/javascript;base64,${texts}`);
const { version } = JSON.parse(readFileSync(new URL("package.json", ORT), "utf8"));

const wasm = addHashed("ort.wasm", readFileSync(new URL("dist/ort-wasm-simd-threaded.wasm", ORT)));
const worker = addHashed("worker.js", await bundled("phone/agent/worker.ts", { WASM_URL: `./${wasm}` }));
const script = addHashed("page.js", await bundled("phone/page/page.ts", { WORKER_URL: `./${worker}` }));
const style = addHashed("page.css", read("phone/page/page.css"));
addHashed("operator.js", await bundled("operator/page.ts"));
addHashed("operator.css", Buffer.concat([read("node_modules/uplot/dist/uPlot.min.css"), read("operator/page.css")]));
for (const icon of ["icon.svg", "icon-192.png", "icon-512.png"]) add(icon, read(`phone/page/${icon}`));
add("manifest.webmanifest", filled("phone/page/manifest.webmanifest", PAGE, inJson));
add("index.html", filled("phone/page/index.html", { ...PAGE, script, style }, inHtml));
const apache = readFileSync(LICENCE, "utf8");
const licences = LIBRARIES.map((name) => `${name}\n\n${read(`node_modules/${name}/LICENSE`)}`);
const notices = { version, libraries: licences.join(`\n${"-".repeat(79)}\n\n`), apache };
add("third-party-notices.txt", filled("phone/page/third-party-notices.txt", notices, asIs));
// The files that the page needs offline. A new build has new names, so it never uses an old file.
const cached = ["./", ...[wasm, worker, script, style, "icon.svg"].map((name) => `./${name}`)];
const buildName = files["index.html"].sha256.slice(0, 10);
add("service-worker.js", await bundled("phone/page/service-worker.ts", { CACHED: cached, BUILD: buildName }));
const sums = Object.entries(files).map(([name, { sha256 }]) => `${sha256}  ${name}\n`);
add("hashes.txt", sums.join(""));

writeFileSync(new URL("files.json", OUT), `${JSON.stringify(files, null, 1)}\n`);
for (const name of readdirSync(OUT)) if (!written.has(name)) rmSync(new URL(name, OUT));
