"""The page rounds to float16 and back as numpy does: the same recordings as a native agent's."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from toolkit.web import built_page

pytestmark = pytest.mark.web

PHONE = Path(built_page.__file__).parent / "phone"
SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";
const [out, given, halves, beyond] = process.argv.slice(1);
const entryPoints = ["agent/half_floats.ts"];
await build({ entryPoints, bundle: true, format: "esm", outfile: out, logLevel: "error" });
const { toHalf, fromHalf } = await import(out);
const read = (path) => new Uint8Array(readFileSync(path)).buffer;
writeFileSync(`${given}.half`, toHalf(new Float32Array(read(given))));
writeFileSync(`${halves}.float`, fromHalf(new Uint16Array(read(halves))));
for (const number of new Float32Array(read(beyond))) {
  try {
    toHalf(Float32Array.of(1, number));
    throw new Error(`${number} was taken`);
  } catch (error) {
    if (error.code !== "update.beyond-float16") throw error;
  }
}
"""


def test_same_numbers(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    every = np.arange(2**16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    numbers = finite.view(np.float16).astype(np.float64)
    # Halfway between each two neighbours, and the float32 numbers on both sides of it.
    sizes = numbers[: len(numbers) // 2]
    ties = np.float32((sizes[:-1] + sizes[1:]) / 2)
    around = [np.nextafter(ties, np.float32(side)) for side in (0, np.inf)]
    below = np.float32([65519, 65504, 0, -0.0, 1e-45, np.inf, -np.inf, np.nan])
    any_bits = draw.integers(2**32, size=100_000, dtype=np.uint32).view(np.float32)
    any_bits = any_bits[~(np.isfinite(any_bits) & (np.abs(any_bits) >= 65520))]
    given = np.concatenate([np.float32(numbers), ties, -ties, *around, below, any_bits])
    beyond = np.float32([65520, -65520, 1e5, 3.4e38])
    for name, array in (("given", given), ("halves", every), ("beyond", beyond)):
        array.tofile(tmp_path / name)
    command = ["node", "--input-type=module", "-e", SCRIPT, "--", str(tmp_path / "out.mjs")]
    command += [str(tmp_path / name) for name in ("given", "halves", "beyond")]
    done = subprocess.run(command, cwd=PHONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.fromfile(tmp_path / "given.half", np.float16)
    expected = given.astype(np.float16)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
    back = np.fromfile(tmp_path / "halves.float", np.float32)
    np.testing.assert_array_equal(back, every.view(np.float16).astype(np.float32))
