"""Tests with a tiny run whether this ONNX Runtime has blocked convolutions.

Also finds the block size, which is the number of channels in a block. The runtime's version and the
processor's name do not determine this size reliably. A graph with another block size gives wrong
numbers without an error. A probe is a graph with two outputs: the result of some convolutions, and
the result of these convolutions in blocked form. If the probe has the runtime's block size, the two
outputs are equal. The probes are files in the folder `probes`. `exporters/runtime_probes.py` writes
them.
"""

from functools import cache
from pathlib import Path

import numpy as np

from device_agent.formats.graph_forms import BLOCKS, blocked_form, form_file
from device_agent.runtime.onnx_runtime import open_model
from device_agent.system.process_memory import release_unused

FOLDER = Path(__file__).with_name("probes")
SHAPES = {
    "x": (2, 3, 9, 8),
    "few": (16, 3, 3, 3),
    "dense": (16, 16, 3, 3),
    "bias": (16,),
    "depthwise": (16, 1, 3, 3),
    "point": (32, 16, 1, 1),
}
"""The inputs of a probe: an image, and a weight for each kind of convolution."""
CLOSE = 1e-4


@cache
def block_size() -> int | None:
    """The number of channels in a block of this runtime; None without blocked convolutions."""
    size = next((block for block in BLOCKS if runs(FOLDER / f"{blocked_form(block)}.onnx")), None)
    release_unused()  # memory that the sessions freed would count against a memory limit
    return size


def runs(probe: Path) -> bool:
    """Whether the two outputs of `probe` agree in this runtime."""
    draw = np.random.default_rng(0)
    given = {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    try:
        plain, blocked = open_model(str(probe), 1).run(["plain", "blocked"], given)
    except Exception:  # the exceptions of onnxruntime have no public base class
        return False
    return float(np.abs(plain - blocked).max()) <= CLOSE * float(np.abs(plain).max())


def best_form(graph: Path) -> Path:
    """Choose the file to open: the blocked form of `graph` for this runtime, if there is one.

    Without such a form, the file is `graph` itself.
    """
    block = block_size()
    if block is None:
        return graph
    blocked = graph.with_name(form_file(graph.name, blocked_form(block)))
    return blocked if blocked.exists() else graph
