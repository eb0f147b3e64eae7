"""Records, traces, lowers and runs every row of the coverage table, against float64 autograd."""

import re
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from commands import ROOT, edgetailor
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs import tracing
from exporters.programs.operator_support import SUPPORTED, UNSUPPORTED, may_lack_form
from exporters.recording.capture import record_current_mode
from exporters.tflite.tflite_writer import to_tflite
from layer_cases import Case, Row, check_on_onnxruntime, check_predictions
from operator_rows import COMBINED, GROUPS, ROWS, recorded
from parameters import some_long
from refusals import refused
from row_kinds import of
from uncovered_rows import REFUSED, check_refused


@pytest.mark.parametrize("group", GROUPS)
def test_gradients_on_onnxruntime(group: str, seed: int) -> None:
    check_on_onnxruntime(recorded(group, seed), seed)


# Batch norms keep statistics: test_whole_models.py predicts with them.
PREDICTED = [group for group in ROWS if group != "batch norm"]
SOME = ("normalisation", "reduction")


@pytest.mark.parametrize(
    "group", some_long(PREDICTED, *(group for group in PREDICTED if group not in SOME))
)
def test_predictions_on_onnxruntime(group: str, seed: int) -> None:
    """Without gradients, PyTorch chooses other operators, for example for nn.RMSNorm."""
    cases = recorded(group, seed).items()
    check_predictions({n: c for n, c in cases if not list(c.layer.buffers())}, seed)


@pytest.mark.long
@pytest.mark.parametrize("group", ROWS)
def test_gradients_of_all_rows(group: str, seed: int) -> None:
    check_on_onnxruntime(recorded(group, seed, every=True), seed)


def test_the_test_rows_match_the_table() -> None:
    elsewhere = {"dropout", "recurrence"}  # test_seeded_random.py, test_recurrence.py
    assert list(ROWS) == [group.name for group in SUPPORTED if group.name not in elsewhere]
    assert all(set(ROWS[group]) > set(names) for group, names in COMBINED.items())
    assert all(ROWS.values())


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_operators_are_refused_with_their_place_and_an_alternative(name: str) -> None:
    check_refused(name, to_onnx)


def test_every_unsupported_group_has_a_test_row() -> None:
    assert list(REFUSED) == [group.name for group in UNSUPPORTED]


def test_an_operator_outside_of_all_tables_is_refused_by_name() -> None:
    case = Case.of(Row(of(lambda x: x - x.nanmedian(1, True)[0]), (3,)), record=True)
    with refused("export.unsupported-operator", signature="gradients") as caught:
        to_onnx(case.signature)
    place = r" aten::nanmedian \(\S*test_operator_support\.py, line \d+: .*\)"
    assert re.search(place, str(caught.value))
    assert "--list-operators" in str(caught.value)


def test_an_overload_without_a_kernel_has_no_form() -> None:
    """A model that copies into its own tensor in training has this operator."""
    assert may_lack_form("aten::copy_")
    assert not may_lack_form("aten::relu")


def test_a_graph_that_the_onnx_checker_rejects_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise onnx.checker.ValidationError("Incompatible dimensions\nand more")

    monkeypatch.setattr(onnx.checker, "check_model", fails)
    case = Case.of(Row(of(torch.sin), (3,)), record=True)
    with refused("export.no-onnx-form", signature="gradients") as caught:
        to_onnx(case.signature)
    assert "Incompatible dimensions" in str(caught.value)
    assert "and more" not in str(caught.value)


def unpooled(x: Tensor) -> Tensor:
    """Put the maximum of each window back at its index; the gradient of sin depends on it."""
    largest, indices = functional.max_pool2d(x, 2, ceil_mode=True, return_indices=True)
    return functional.max_unpool2d(largest, indices, 2, output_size=(5, 7)).sin()


def test_indices_of_max_pooling_refer_to_the_unpadded_image_in_ceil_mode(seed: int) -> None:
    case = Case.of(Row(of(unpooled), (2, 5, 7)), record=True)
    check_on_onnxruntime({"unpooled": case}, seed)
    with refused("export.unsupported-operator", "the indices of max pooling"):
        to_tflite([case.signature])


def test_ctrl_c_survives_an_error_in_torchs_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("Trying to pop empty mode stack")

    case = Case.of(Row(of(torch.sin), (3,)), record=True)
    for part in (onnx.checker, "check_model"), (torch.export, "export"), (tracing, "make_fx"):
        monkeypatch.setattr(*part, interrupted)
        with pytest.raises(KeyboardInterrupt):
            to_onnx(case.signature)
    with pytest.raises(KeyboardInterrupt):
        record_current_mode(torch.nn.Tanh(), (3,), "float32")


def test_the_documentation_contains_the_table(tmp_path: Path) -> None:
    done = edgetailor("export", "--list-operators", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    written = (ROOT / "docs/reference/operators.md").read_text()
    assert written == done.stdout, (
        "edgetailor export --list-operators > docs/reference/operators.md"
    )
