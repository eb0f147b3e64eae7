"""Names of the graphs in a bundle that only some processors can run.

A bundle may hold a second form of a graph, for ONNX Runtime's blocked convolutions: `train.onnx`
and beside it `train.nchwc16.onnx`, whose images have blocks of 16 channels. The number has to be
that of the device's runtime. Other devices neither need nor fetch such a file.
"""

import re

BLOCKS = (16, 8)
"""The numbers of channels in a block: with AVX-512, and with older processors of x86-64."""
PATTERN = re.compile(r"\.nchwc(\d+)\.onnx$")


def blocked_name(graph: str, block: int) -> str:
    """The file name of the blocked form of the file `graph`.

    Examples:
        >>> blocked_name("train.onnx", 16)
        'train.nchwc16.onnx'
    """
    return f"{graph.removesuffix('.onnx')}.nchwc{block}.onnx"


def block_of(name: str) -> int | None:
    """The block of the graph in the file `name`; None if every device may need the file."""
    found = PATTERN.search(name)
    return int(found[1]) if found else None
