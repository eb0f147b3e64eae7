"""The table of constructs: a small model for each row of `constructs.toml`, and the page."""

import html
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("constructs.toml")
IMPORTS = """\
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
"""
INPUTS = {
    "vector": ("nn.Linear(6, 8)", "nn.Linear(8, 3)", "h"),
    "steps": ("nn.Linear(4, 8)", "nn.Linear(8, 3)", "h.mean(1)"),
    "image": ("nn.Conv2d(2, 4, 3, padding=1)", "nn.Linear(64, 3)", "h.flatten(1)"),
    "ids": ("nn.Embedding(20, 8)", "nn.Linear(8, 3)", "h.mean(1)"),
}
"""The first and the last layer by kind of input, and what the last layer reads."""
SHAPES = {"vector": (6,), "steps": (5, 4), "image": (2, 4, 4), "ids": (6,)}
"""The shapes of samples."""
TOKENS = {"ids": 20}
"""The number of tokens, if samples are tokens."""


@dataclass(frozen=True)
class Row:
    """A construct.

    Attributes:
        name: Its name, unique in the table.
        input: The kind of samples, a key of `SHAPES`.
        code: Lines of `forward` that change the value `h`.
        init: Lines of `__init__` for them.
        before: Lines before the class.
        refused: The error's code if the model cannot be recorded, else empty.
        words: Words of the error that say what to write instead; empty if the code says enough.
        instead: For a refused row, the row that shows what to write.
        line: Whether the error names the line.
        formats: The formats that have it.
        note: A sentence for the page.
        oracle: Whether a training step can be compared with plain PyTorch's.
    """

    name: str
    input: str
    code: str
    init: str = ""
    before: str = ""
    refused: str = ""
    words: str = ""
    instead: str = ""
    line: bool = True
    formats: tuple[str, ...] = ("onnx", "tflite")
    note: str = ""
    oracle: bool = True

    def source(self) -> str:
        """A Python file with the model as the class `Net`."""
        first, last, read = INPUTS[self.input]
        init = [*self.init.strip().splitlines(), f"self.first, self.last = {first}, {last}"]
        return "\n".join(
            [
                IMPORTS,
                self.before,
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in init),
                "    def forward(self, x):",
                "        h = self.first(x)",
                *(f"        {line}" for line in self.code.strip().splitlines()),
                f"        return self.last({read})",
                "",
            ]
        )

    def shown(self) -> str:
        """The lines of this row, as a cell of a table."""
        lines = [self.before.strip(), self.init.strip(), self.code.strip()]
        text = "\n".join(filter(None, lines))
        text = html.escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;")
        text = text.replace("_", "&#95;").replace("[", "&#91;")
        indented = [
            "&nbsp;" * (len(line) - len(line.lstrip())) + line.lstrip()
            for line in text.splitlines()
        ]
        return f"<code>{'<br>'.join(indented)}</code>"

    def outcome(self) -> str:
        """What happens to a model with this construct."""
        if self.refused:
            anchor = self.refused.replace(".", "")
            return f"refused ([`{self.refused}`](errors.md#{anchor})): see “{self.instead}”"
        only = "" if len(self.formats) > 1 else f" in {self.formats[0].upper()}"
        return f"exported{only}{'. ' + self.note if self.note else ''}"


def table() -> dict[str, tuple[Row, ...]]:
    """The rows by group."""
    groups = tomllib.loads(FILE.read_text("utf-8"))["group"]
    return {
        group["name"]: tuple(
            Row(**{**row, "formats": tuple(row.get("formats", ("onnx", "tflite")))})
            for row in group["row"]
        )
        for group in groups
    }


def rows() -> dict[str, Row]:
    """All rows by name."""
    return {row.name: row for group in table().values() for row in group}


def page() -> str:
    """`constructs.md`: every construct with its lines and what happens to it."""
    lines = [
        "# Constructs",
        "",
        "What people write in `forward`, and whether a model with it can be exported with its",
        "training step. `edgetailor inspect` refuses what cannot be exported, with the line if it",
        "is known; the row in quotation marks shows what to write instead. In each row, `h` is a",
        "value that the model computes from its samples `x`. Tests make a model of each row. They",
        "compare the training of exported ones with plain PyTorch's, except where random numbers",
        "or half precision differ. [Operators](operators.md) lists the operators.",
    ]
    for group, own in table().items():
        lines += ["", f"## {group}", "", "| construct | lines | result |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.shown()} | {row.outcome()} |" for row in own]
    return "\n".join([*lines, "", "This page is generated: `python docs/generate.py`.", ""])
