"""The mean update of a group in place of its updates, for every family."""

import numpy as np
import pytest

from device_agent.formats.manifest import FORMAT_VERSION, Manifest
from device_agent.formats.protocol.secure_sums import SecureTerms
from device_agent.privacy.summed_updates import group_mean, update_vector
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.closing.secure_closing import group_record, mean_tensors
from toolkit.families.forms import FORMS
from toolkit.submodels.hyperparameters import TrainingConfig
from updates import drawn_updates

DEVICES = 7
TERMS = SecureTerms(fewest=3, most_change=64.0, most_samples=500)
SPECS = (
    *("full", "width:0.5", "depth:0.5", "slice:0.42", "cp:2.0", "pfedme", "low-rank:0.5,keep=0"),
    "slice:0.6+low-rank:0.5",
)


def federation() -> Federation:
    return Federation("models_for_tests:staged_cnn", (2, 8, 8), TrainingConfig(), seed=1)


def test_every_family_is_tried() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(FORMS)


@pytest.mark.parametrize("spec", SPECS)
def test_the_sum_gives_the_model_of_single_updates(spec: str, seed: int) -> None:
    one, other = federation(), federation()
    updates = drawn_updates(one, [spec] * DEVICES, seed)
    submodel = one.submodel(spec)
    received = {name: value.numpy() for name, value in submodel.cut(one.model).items()}
    manifest = Manifest(
        version=FORMAT_VERSION,
        submodel=spec,
        runtime="onnx",
        base="",
        sample_shape=(2, 8, 8),
        classes=2,
        signatures={},
        tensors=submodel.program.tensors,
        schedule=(),
        files={},
    )
    total = np.sum(
        [
            update_vector(record, arrays, received, TERMS, DEVICES, seed + number)
            for number, (record, arrays) in enumerate(updates)
        ],
        axis=0,
        dtype=np.uint32,
    )
    mean = group_mean(total, updates[0][0].tensors, TERMS, DEVICES, DEVICES)
    assert mean.samples == sum(record.samples for record, _ in updates)
    one.fold(updates)
    other.fold([(group_record(mean, manifest, ""), mean_tensors(mean, manifest, received))])
    for name, tensor in one.model.tensors.items():
        found = other.model.tensors[name]
        if tensor.is_floating_point():
            assert float((tensor - found).abs().max()) < 1e-5, name
