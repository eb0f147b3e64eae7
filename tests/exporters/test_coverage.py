"""Every row of the coverage table: recorded, traced, lowered, run, against float64 autograd."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from commands import ROOT, edgetailor
from exporters.coverage import GROUPS, REFUSALS
from exporters.onnx_writer import to_onnx
from layer_cases import Case, Row, check_on_onnxruntime
from operator_rows import ROWS, Function
from profiles.errors import ExportError


@pytest.mark.parametrize("group", ROWS)
def test_gradients_on_onnxruntime(group: str, seed: int) -> None:
    torch.manual_seed(seed)
    cases = {name: Case.of(row, record=True) for name, row in ROWS[group].items()}
    check_on_onnxruntime(cases, seed)


def test_every_row_of_the_table_has_cases_and_no_other() -> None:
    elsewhere = {"dropout", "recurrence"}  # test_dropout.py, test_recurrence.py
    assert list(ROWS) == [group.name for group in GROUPS if group.name not in elsewhere]
    assert all(ROWS.values())


class Volume(nn.Module):
    """A 3-D convolution in the submodule `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv3d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return partial(Function, function)


def shrunk(x: Tensor) -> Tensor:
    return functional.interpolate(x, (2, 3), mode="bilinear", antialias=True)


IN_FUNCTION = r"operator_rows\.py, line \d+: "
VOLUME = (3, 4, 4, 6)
REFUSED = {
    "3-D convolution": (Row(Volume, VOLUME), "module 'body'"),
    "3-D max pooling": (Row(partial(nn.MaxPool3d, 2), VOLUME), ""),
    "adaptive 3-D pooling": (Row(partial(nn.AdaptiveAvgPool3d, 2), VOLUME), ""),
    "embedding bag": (Row(partial(nn.EmbeddingBag, 7, 4), (5,), limit=7), ""),
    "median": (Row(of(lambda x: x.median(1).values), (3,)), IN_FUNCTION),
    "product over an axis": (Row(of(lambda x: x.prod(1)), (3,)), IN_FUNCTION),
    "antialiased interpolation": (
        Row(
            of(shrunk),
            (3, 4, 5),
        ),
        IN_FUNCTION,
    ),
    "distances of all pairs": (
        Row(of(lambda x: torch.cdist(x, x.sin())), (3, 4)),
        IN_FUNCTION,
    ),
    "inverses and decompositions": (
        Row(of(lambda x: torch.linalg.inv(x + torch.eye(3))), (3, 3)),
        IN_FUNCTION,
    ),
    "sparse gradients": (Row(partial(nn.Embedding, 7, 3, sparse=True), (4,), limit=7), ""),
    "grid sampling": (
        Row(
            of(lambda x: functional.grid_sample(x, x.permute(0, 2, 3, 1), align_corners=False)),
            (2, 4, 4),
        ),
        IN_FUNCTION,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_with_its_place_and_the_nearest_way(name: str) -> None:
    row, where = REFUSED[name]
    (refusal,) = [r for r in REFUSALS if r.name == name]
    advice = re.escape(f"{name} ({refusal.reason}) is not covered; nearest: {refusal.nearest}.")
    case = Case.of(row, record=True)
    with pytest.raises(ExportError, match=rf"operator aten::\w+.*{where}.* form: {advice}$"):
        to_onnx(case.signature)


def test_every_refusal_is_tested() -> None:
    assert list(REFUSED) == [refusal.name for refusal in REFUSALS]


def test_an_operator_that_no_table_knows_is_refused_by_name() -> None:
    case = Case.of(Row(of(torch.special.i1), (3,)), record=True)
    message = (
        r"operator aten::bessel_i1, which has no ONNX form: use another one .*--list-operators"
    )
    with pytest.raises(ExportError, match=message):
        to_onnx(case.signature)


def test_docs_contain_the_table(tmp_path: Path) -> None:
    done = edgetailor("export", "--list-operators", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    written = (ROOT / "docs" / "operators.md").read_text()
    assert written == done.stdout, "edgetailor export --list-operators > docs/operators.md"
