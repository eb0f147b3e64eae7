"""Models by reference, whose modules change while a program runs."""

from pathlib import Path

import pytest

from refusals import refused
from toolkit.submodels.model_loading import load_model

LINE = "from torch import nn\n\ndef {name}():\n    return nn.Linear(1, {size})\n"


def test_a_module_is_read_again_for_a_new_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "changing_models.py"
    file.write_text(LINE.format(name="small", size=2))
    assert load_model("changing_models:small").out_features == 2
    with refused("model.unknown-callable"):
        load_model("changing_models:large")
    file.write_text(file.read_text() + LINE.format(name="large", size=1000))
    assert load_model("changing_models:large").out_features == 1000
    file.write_text("1 +")
    with refused("model.cannot-import"):
        load_model("changing_models:huge")
