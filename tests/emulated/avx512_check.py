"""The agent on an emulated processor with AVX-512: `make test-avx512`.

Its blocks have 16 channels. The bundles were trained on another machine (board_check.py).
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
from board_check import SPECS, compare

from device_agent.formats.graph_forms import BLOCKS, blocked_form
from device_agent.runtime.blocked_probe import FOLDER, SHAPES, best_form, block_size, runs

BLOCK = 16


def check(folder: Path) -> None:
    """Probe the runtime, and train bundles of every family in the form that the probe chose."""
    processor = Path("/proc/cpuinfo").read_text()
    assert "avx512f" in processor
    print(f"onnxruntime {onnxruntime.__version__}, blocks of {block_size()}", flush=True)
    assert block_size() == BLOCK
    for other in set(BLOCKS) - {BLOCK}:
        refuse(FOLDER / f"{blocked_form(other)}.onnx")
    for name in SPECS:
        bundle = folder / f"{name}.onnx"
        # At half its width the model has 8 channels, so its graphs have no form with blocks of 16.
        form = "evaluate.onnx" if name == "width" else f"evaluate.{blocked_form(BLOCK)}.onnx"
        assert best_form(bundle / "evaluate.onnx").name == form
        compare(bundle, None)


def refuse(probe: Path) -> None:
    """A probe of another block runs without an error, gives wrong numbers and is refused."""
    draw = np.random.default_rng(0)
    given = {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    plain, blocked = onnxruntime.InferenceSession(probe).run(["plain", "blocked"], given)
    assert np.abs(plain - blocked).max() > 0.01 * np.abs(plain).max()
    assert not runs(probe)
    print(f"{probe.stem}: runs, is wrong and is refused", flush=True)


if __name__ == "__main__":
    check(Path(sys.argv[1]))
