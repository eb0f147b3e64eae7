"""Runs modules of the page in Node.js, without a browser."""

import subprocess
from pathlib import Path

from toolkit.web import built_page

PHONE = Path(built_page.__file__).parent / "phone"
BUNDLE = """
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";
const [module, out, ...given] = process.argv.slice(1);
const entryPoints = [module];
await build({ entryPoints, bundle: true, format: "esm", outfile: out, logLevel: "error" });
const page = await import(out);
"""


def run_with(module: str, script: str, folder: Path, *given: str) -> str:
    """What `script` prints. It has the exports of `module` as `page`, and the strings `given`."""
    command = ["node", "--input-type=module", "-e", BUNDLE + script, "--"]
    command += [f"agent/{module}.ts", str(folder / f"{module}.mjs"), *given]
    ended = subprocess.run(command, cwd=PHONE, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
