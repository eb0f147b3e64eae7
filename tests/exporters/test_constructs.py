"""Models as their users write them train as in plain PyTorch, after an export as written."""

from pathlib import Path

import pytest
import torch

from constructs import CONSTRUCTS
from one_step import check_one_step
from parameters import some_quick, without

ROWS = [(name, format) for name, row in CONSTRUCTS.items() for format in row.formats]
TFLITE = ("root mean square", "quantile", "mean of neighbours", "float64 constants")
SLOW = [("mask of a transformer", "onnx"), ("packed sequences", "onnx")]
ONNX = [(name, format) for name, format in ROWS if format == "onnx"]
QUICK = [*without(ONNX, *SLOW), *((name, "tflite") for name in TFLITE)]


@pytest.mark.parametrize(("name", "format"), some_quick(ROWS, *QUICK))
def test_one_step_equals_pytorchs(name: str, format: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    build, shape, tokens, _ = CONSTRUCTS[name]
    check_one_step(build(), shape, tokens, format, tmp_path)
