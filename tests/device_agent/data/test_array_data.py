"""Training on arrays: checked as files are, and with the same result."""

from pathlib import Path

import numpy as np
import pytest

from bundles import CLASSES, SAMPLE_SHAPE, BundleOf, everything, samples
from device_agent.data.local_data import load_data
from device_agent.formats.label_rule import LabelRule
from device_agent.training.standalone_training import train
from log_messages import logged
from refusals import refused

X, Y = samples(21, seed=0)


def test_arrays_train_as_a_file_does(bundle_of: BundleOf, tmp_path: Path) -> None:
    np.savez(tmp_path / "local.npz", x=X, y=Y)
    sources = {"file": tmp_path / "local.npz", "pair": (X, Y), "mapping": {"x": X, "y": Y}}
    for name, source in sources.items():
        with logged() as said:
            record = train(bundle_of("full"), source, tmp_path / name, threads=1)  # type: ignore[arg-type]
        assert record.samples == 21
        assert [line.rpartition(":")[0] for line in said] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert everything(tmp_path / "pair") == everything(tmp_path / "file")
    assert everything(tmp_path / "mapping") == everything(tmp_path / "file")


def test_the_arrays_of_an_opened_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "local.npz", x=X, y=Y)
    with np.load(tmp_path / "local.npz") as file:
        local = load_data(file, SAMPLE_SHAPE, LabelRule(CLASSES))
    assert np.array_equal(local.x, X)
    assert np.array_equal(local.y, Y)


def test_the_fingerprint_is_that_of_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "local.npz", x=X, y=Y)
    own = load_data((X, Y), SAMPLE_SHAPE, LabelRule(CLASSES)).fingerprint
    assert own == load_data(tmp_path / "local.npz", SAMPLE_SHAPE, LabelRule(CLASSES)).fingerprint
    other = X.copy()
    other.flat[3] += 1
    assert own != load_data((other, Y), SAMPLE_SHAPE, LabelRule(CLASSES)).fingerprint
    # The values count, not their order in memory.
    assert own == load_data((np.asfortranarray(X), Y), SAMPLE_SHAPE, LabelRule(CLASSES)).fingerprint


def test_int32_is_converted() -> None:
    x = np.array([[1, 2], [3, 4]], np.int32)
    local = load_data((x, np.array([0, 1])), (2,), LabelRule(2), "int64", 5)
    assert (local.x.dtype, local.x.tolist()) == (np.int64, x.tolist())


INFINITE = np.where(np.arange(X.size).reshape(X.shape) == 5, np.float32(np.inf), X)


@pytest.mark.parametrize(
    ("source", "code", "values"),
    [
        ([X, Y], "data.wrong-kind", {"kind": "list"}),
        ((X, Y, Y), "data.wrong-kind", {"kind": "tuple"}),
        (None, "data.wrong-kind", {"kind": "NoneType"}),
        ({"x": X}, "data.missing-array", {"array": "y"}),
        ({"y": Y}, "data.missing-array", {"array": "x"}),
        ((X.tolist(), Y), "data.not-an-array", {"array": "x", "kind": "list"}),
        ((X, np.ma.masked_array(Y)), "data.not-an-array", {"array": "y", "kind": "MaskedArray"}),
        ((X.astype(float), Y), "data.wrong-type", {"x_type": "float64", "y_type": "int64"}),
        ((X.astype(object), Y), "data.wrong-type", {"x_type": "object"}),
        ((X[:, 0], Y), "data.wrong-shape", {}),
        ((X[:3], Y), "data.wrong-shape", {}),
        ((X[:1], Y[:1]), "data.too-few-samples", {}),
        ((X, Y + CLASSES), "data.label-out-of-range", {}),
        ((INFINITE, Y), "data.not-finite", {}),
    ],
)  # fmt: skip
def test_refused(source: object, code: str, values: dict[str, object]) -> None:
    with refused(code, **values) as caught:
        load_data(source, SAMPLE_SHAPE, LabelRule(CLASSES))  # type: ignore[arg-type]
    assert str(caught.value).startswith("data")


def test_what_is_refused_writes_nothing(bundle_of: BundleOf, tmp_path: Path) -> None:
    with refused("data.wrong-type", x_type="float64"):
        train(bundle_of("full"), (X.astype(float), Y), tmp_path / "update")
    assert everything(tmp_path) == {}
