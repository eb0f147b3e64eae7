"""The table of constructs in the documentation: each row is a model, treated as it says."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from exporters.recording.capture import capture
from exporters.recording.trainable_forms import in_trainable_form
from one_step import check_one_step
from parameters import quarter_quick
from profiles.errors import EdgeTailorError
from toolkit.inspection import inspect_each

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import construct_table
from construct_table import SHAPES, TOKENS, Row

ROWS = construct_table.rows()
REFUSED = {name: row for name, row in ROWS.items() if row.refused}
EXPORTED = {name: row for name, row in ROWS.items() if not row.refused}
COMPARED = [(name, f) for name, row in EXPORTED.items() if row.oracle for f in row.formats]


def model_of(row: Row, folder: Path) -> nn.Module:
    """The model of `row`, written to a file in `folder`, because errors name lines."""
    path = folder / "construct.py"
    path.write_text(row.source(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("construct", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["construct"] = module
    spec.loader.exec_module(module)
    return in_trainable_form(module.Net())  # as `load_model` does


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", quarter_quick(EXPORTED))
def test_what_the_table_exports_is_recorded(name: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    row = ROWS[name]
    captured = capture(model_of(row, tmp_path), SHAPES[row.input])
    assert captured.output_shape == (3,)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "format"), COMPARED)
def test_one_step_equals_pytorchs(name: str, format: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    row = ROWS[name]
    model = model_of(row, tmp_path)
    check_one_step(model, SHAPES[row.input], TOKENS.get(row.input), format, tmp_path)


@pytest.mark.parametrize("name", quarter_quick(REFUSED))
def test_a_refusal_names_the_line_and_another_row(name: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    row = REFUSED[name]
    error: object = None
    try:
        [result] = inspect_each(model_of(row, tmp_path), SHAPES[row.input], ["full"], 4)
        error = getattr(result, "cause", None)
    except EdgeTailorError as raised:
        error = raised
    assert isinstance(error, EdgeTailorError), "it is not refused"
    assert error.code == row.refused, error
    assert row.words in str(error)
    assert ("construct.py, line" in str(error)) is row.line, error
    assert row.instead in EXPORTED
