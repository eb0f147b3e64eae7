"""The bundles of a federation's rounds have the graphs of exported bundles."""

from pathlib import Path

import numpy as np

from edgetailor import split
from exporters.export import export
from models_for_tests import INPUT_SHAPE
from toolkit.aggregation.federation import Federation
from toolkit.submodels.hyperparameters import TrainingConfig


def test_all_forms_of_graphs_in_every_round(tmp_path: Path) -> None:
    training = TrainingConfig(batch_size=4)
    federation = Federation("models_for_tests:wide_layers", INPUT_SHAPE, training)
    for spec in ("full", "slice:second"):
        submodel = split(federation.module, spec, INPUT_SHAPE, training)
        out = tmp_path / spec
        base = federation.model
        export(submodel.program, submodel.cut(base), out, base=base.fingerprint(), check=False)
        exported = {path.name: path.read_bytes() for path in out.iterdir()}
        assert exported.keys() >= {f"train.{form}.onnx" for form in ("nchwc16", "winograd")}
        assert federation.bundle(spec) == exported
    # Other weights change no graph of a whole model.
    before = federation.bundle("full", 1)
    federation.adopt({n: t + 1 for n, t in base.tensors.items() if t.is_floating_point()})
    after = federation.bundle("full", 2)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[n], after[n]) for n in before if n.endswith(".onnx"))
    assert before["weights.safetensors"] != after["weights.safetensors"]
