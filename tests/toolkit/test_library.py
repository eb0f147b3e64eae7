"""The library as README shows it, and as a person meets it at a prompt."""

import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import edgetailor
from bundles import CLASSES, SAMPLE_SHAPE, TRAINING, tiny_model, write_data
from commands import ROOT, Done, run_code
from edgetailor import split
from exporters.export import export
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

NETS = """
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 4), nn.ReLU(), nn.Conv2d(4, 8, 3, 2), nn.Flatten(), nn.Linear(72, 4)
    )
"""


def test_the_public_names_are_listed_without_loading_them() -> None:
    assert dir(edgetailor) == sorted(edgetailor.__all__)
    code = "import sys, edgetailor; print(dir(edgetailor)); assert 'torch' not in sys.modules"
    assert run_code(code) == Done(0, f"{sorted(edgetailor.__all__)}\n", "")
    for name in edgetailor.__all__:
        attribute = edgetailor.HOMES[name].partition(":")[2] or name
        assert getattr(edgetailor, name).__name__ == attribute


def test_the_round_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 1
    (tmp_path / "mymodels.py").write_text(NETS)
    x = np.random.default_rng(0).standard_normal((8, 3, 32, 32), dtype=np.float32)
    np.savez(tmp_path / "local.npz", x=x, y=np.arange(8) % 4)
    first = "import copy\nbefore = copy.deepcopy(model.state_dict())\n"
    marked = snippets[0].replace("submodel =", f"{first}submodel =", 1)
    code = marked + "print([n for n, v in model.state_dict().items() if (v == before[n]).all()])\n"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == "[]\n"  # every tensor of the model was trained


def test_what_an_export_returns_is_short_to_print(tmp_path: Path) -> None:
    model, source = tiny_model()
    submodel = split(model, "full", SAMPLE_SHAPE, TRAINING)
    out = str(tmp_path / "bundle")
    exported = export(
        submodel.program, submodel.cut(source), out, base=source.fingerprint(), check=False
    )
    assert repr(exported) == f"ExportedBundle(out={Path(out)!r}, verdict=None)"
    assert exported.graphs.keys() == {"train", "predict", "evaluate"}
    assert (tmp_path / "bundle" / "manifest.json").is_file()


def test_an_export_verifies_what_no_earlier_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGETAILOR_CACHE", str(tmp_path / "cache"))  # no graph is in it
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    state = edgetailor.GlobalModel(model.state_dict())
    submodel = split(model, "full", (2, 2))
    kept = [
        edgetailor.export(submodel, state, tmp_path / str(number), **options).verified_earlier
        for number, options in enumerate([{}, {}, {"verify": True}])
    ]
    assert kept == [False, True, False]


FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1
[simulation]
data = "toolkit.simulation.digits:digits"
participation = 0.05
[[devices]]
name = "phone"
submodel = "width:0.25"
count = 20
"""


def test_stages_are_reported_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGETAILOR_CACHE", str(tmp_path / "cache"))  # no graph is in it
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    source, said = from_model(model), list[str]()
    submodel = split(model, "low-rank:0.25,keep=0", SAMPLE_SHAPE, TRAINING)
    edgetailor.export(submodel, source, tmp_path / "b", verify=False, progress=said.append)
    assert said[0] == "factorizing the weights"
    assert "lowering predict" in said

    said.clear()
    data = write_data(tmp_path / "data.npz")
    train_bundle(tmp_path / "b", str(data), tmp_path / "update", threads=1)
    updates = [edgetailor.read_update(tmp_path / "update")] * 2
    edgetailor.aggregate(source, updates, progress=said.append)
    assert said == [
        "adding update 1: low-rank:0.25,keep=0",
        "adding update 2: low-rank:0.25,keep=0",
        "computing the new model",
    ]

    said.clear()
    (tmp_path / "fleet.toml").write_text(FLEET)
    edgetailor.simulate(tmp_path / "fleet.toml", tmp_path / "out", progress=said.append)
    assert said == [
        "loading the model toolkit.models:digits_cnn",
        "splitting width:0.25",
        "reading the samples of toolkit.simulation.digits:digits",
        "training 20 clients",
    ]

    said.clear()
    edgetailor.plan(
        model, SAMPLE_SHAPE, "android-low", specs=["full"], training=TRAINING, progress=said.append
    )
    assert said[-2:] == ["estimating full", "exporting full, seconds to a minute"]
