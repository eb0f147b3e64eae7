"""Models as their users write them train as in plain PyTorch, after an export as written."""

from pathlib import Path

import pytest
import torch

from constructs import CONSTRUCTS
from one_step import check_one_step
from parameters import quarter_quick, some_quick

ROWS = [(name, format) for name, row in CONSTRUCTS.items() for format in row.formats]
QUICK = [
    *(("root mean square", "onnx"), ("root mean square", "tflite"), ("quantile", "tflite")),
    *(("vector parameter by id", "onnx"), ("unpooling", "onnx"), ("mask of an encoder", "onnx")),
    *(("mean of neighbours", "onnx"), ("mean of neighbours", "tflite")),
    *(("packed and padded sequences", "onnx"), ("float64 constants", "tflite")),
]
"""One of each kind, of which each run draws a quarter. Most others are also recorded by
test_construct_table.py, and rows of test_operator_support.py have their operators."""


@pytest.mark.parametrize(("name", "format"), quarter_quick(some_quick(ROWS, *QUICK)))
def test_one_step_equals_pytorchs(name: str, format: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    build, shape, tokens, _ = CONSTRUCTS[name]
    check_one_step(build(), shape, tokens, format, tmp_path)
