"""Names of the graphs in a bundle that only some devices run.

In addition to a graph, `train.onnx`, a bundle may have other forms of this graph with the same
results:

- `train.nchwc16.onnx`, for ONNX Runtime's blocked convolutions, which store images in blocks of 16
  channels. A device can run this form only if its runtime uses blocks of the same size.
- `train.winograd.onnx`, for runtimes without blocked convolutions. This form uses Winograd's
  method, which needs fewer multiplications and more memory.

A device does not need or download the forms that it does not run.
"""

import re

BLOCKS = (16, 8)
"""The numbers of channels in a block: 16 with AVX-512, 8 on other x86-64 processors."""
PLAIN = "plain"
"""The unchanged graphs, where a name must be written."""
WINOGRAD = "winograd"
PATTERN = re.compile(r"\.(nchwc\d+|winograd)\.onnx$")


def blocked_form(block: int) -> str:
    """The name of the form with blocks of `block` channels.

    >>> blocked_form(16)
    'nchwc16'
    """
    return f"nchwc{block}"


def form_file(graph: str, form: str) -> str:
    """The name of the file with another form of the graph in the file `graph`.

    >>> form_file("train.onnx", "nchwc16")
    'train.nchwc16.onnx'
    """
    return f"{graph.removesuffix('.onnx')}.{form}.onnx"


def form_of(file: str) -> str | None:
    """The form in the file name of a graph. Returns None if every device may need the file."""
    matched = PATTERN.search(file)
    return matched[1] if matched else None
