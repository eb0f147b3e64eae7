"""Models by reference, whose modules change while a program runs."""

from pathlib import Path

import pytest

from exporters.recording.capture import capture
from refusals import refused
from toolkit.submodels.model_loading import load_model

LINE = "from torch import nn\n\ndef {name}():\n    return nn.Linear(1, {size})\n"


FREEZING = """
from torch import nn

class Frozen(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].weight.requires_grad_(False)
        return self

def net():
    return Frozen(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
"""


def test_what_train_freezes_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in networks that keep the statistics and scales of batch norms."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "freezing_models.py").write_text(FREEZING)
    captured = capture(load_model("freezing_models:net"), (3,))
    assert "1.weight" not in captured.parameters
    assert "1.bias" in captured.parameters


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
