// Builds the page into ../built/: hashed names, compressed once, listed in files.json.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { build } from "esbuild";

const HERE = new URL(".", import.meta.url);
const OUT = new URL("../built/", HERE);
const ORT = new URL("node_modules/onnxruntime-web/", HERE);
const TYPES = {
  css: "text/css; charset=utf-8",
  html: "text/html; charset=utf-8",
  js: "text/javascript; charset=utf-8",
  svg: "image/svg+xml",
  txt: "text/plain; charset=utf-8",
  wasm: "application/wasm",
  webmanifest: "application/manifest+json",
};
const files = {};

/** Adds a file of the page; returns its name, with a hash of its content unless it is `fixed`. */
function add(name, content, fixed = false) {
  const raw = Buffer.from(content);
  const sha256 = createHash("sha256").update(raw).digest("hex");
  const dot = name.lastIndexOf(".");
  const type = name.slice(dot + 1);
  const given = fixed ? name : `${name.slice(0, dot)}.${sha256.slice(0, 10)}.${type}`;
  const params = { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_LGWIN]: 24 };
  writeFileSync(new URL(`${given}.br`, OUT), brotliCompressSync(raw, { params }));
  const encodings = ["br"];
  // No browser that can run the page asks for WebAssembly without brotli.
  if (type !== "wasm") {
    writeFileSync(new URL(`${given}.gz`, OUT), gzipSync(raw, { level: 9 }));
    encodings.push("gz");
  }
  files[given] = { type: TYPES[type], sha256, size: raw.length, immutable: !fixed, encodings };
  return given;
}

async function bundled(entry, define = {}) {
  const result = await build({
    entryPoints: [new URL(entry, HERE).pathname],
    bundle: true,
    format: "esm",
    target: "es2022",
    minify: true,
    legalComments: "none",
    write: false,
    define,
    // This variant holds the loader of its WebAssembly, so that no second script is fetched.
    alias: { "onnxruntime-web/wasm": new URL("dist/ort.wasm.bundle.min.mjs", ORT).pathname },
  });
  return result.outputFiles[0].contents;
}

const text = (name) => readFileSync(new URL(name, HERE), "utf8");
const quoted = (name) => JSON.stringify(`./${name}`);

rmSync(OUT, { recursive: true, force: true });
mkdirSync(OUT, { recursive: true });
const wasm = add("ort.wasm", readFileSync(new URL("dist/ort-wasm-simd-threaded.wasm", ORT)));
const worker = add("worker.js", await bundled("agent/worker.ts", { WASM_URL: quoted(wasm) }));
const page = add("page.js", await bundled("page/page.ts", { WORKER_URL: quoted(worker) }));
const style = add("page.css", text("page/page.css"));
add("icon.svg", text("page/icon.svg"), true);
add("manifest.webmanifest", text("page/manifest.webmanifest"), true);
const { version } = JSON.parse(readFileSync(new URL("package.json", ORT), "utf8"));
const notices = readFileSync(new URL("page/third-party-notices.txt", HERE), "utf8");
add("third-party-notices.txt", notices.replace("{version}", version), true);
const html = text("page/index.html").replace("{page}", page).replace("{style}", style);
add("index.html", html, true);
// Offline the page opens from these; a new build has other names, so that an old one is never mixed in.
const cached = JSON.stringify(["./", ...[wasm, worker, page, style].map((name) => `./${name}`)]);
const service = await bundled("page/service-worker.ts", { CACHED: cached });
add("service-worker.js", service, true);
writeFileSync(new URL("files.json", OUT), JSON.stringify(files, null, 1));
