"""The page draws the numbers that numpy draws: the same batches, the same seeds of masks."""

import json
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from toolkit.web import built_page

pytestmark = pytest.mark.web

PHONE = Path(built_page.__file__).parent / "phone"
SCRIPT = """
import { build } from "esbuild";
const out = process.argv[1];
const entryPoints = ["agent/numpy_random.ts"];
await build({ entryPoints, bundle: true, format: "esm", outfile: out, logLevel: "error" });
const { NumpyRandom } = await import(out);
const drawn = JSON.parse(process.argv[2]).map((entropy) => {
  const first = new NumpyRandom(entropy);
  const numbers = [...first.permutation(1000), first.integers(2 ** 31 - 1), first.integers(7)];
  const again = NumpyRandom.from(JSON.parse(JSON.stringify(first.save())));
  return [...numbers, again.integers(2 ** 31 - 1), ...again.permutation(5)];
});
console.log(JSON.stringify(drawn));
"""


def test_same_numbers(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    seeds = [[0, 1], [1, 0], [2**32, 3], [2**40 + 5, 2**31], [1, 2, 3, 4, 5, 6]]
    seeds += [[draw.randrange(2**53), draw.randrange(100)] for _ in range(50)]
    command = ["node", "--input-type=module", "-e", SCRIPT, "--"]
    arguments = [str(tmp_path / "out.mjs"), json.dumps(seeds)]
    done = subprocess.run([*command, *arguments], cwd=PHONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for entropy, found in zip(seeds, json.loads(done.stdout), strict=True):
        numpys = np.random.default_rng(entropy)
        expected = [*numpys.permutation(1000), numpys.integers(2**31 - 1), numpys.integers(7)]
        expected += [numpys.integers(2**31 - 1), *numpys.permutation(5)]
        assert found == [int(number) for number in expected], entropy
