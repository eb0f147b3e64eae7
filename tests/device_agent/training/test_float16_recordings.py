"""Recordings in float16: half the bytes, rounded numbers, the rest of the training as before.

The oracle for the numbers is Python's `struct`, whose format "e" is IEEE 754's binary16.
"""

import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundles import BundleOf, everything, rewrite
from device_agent.formats.bundle import open_bundle
from device_agent.formats.manifest import Record
from device_agent.runtime.onnx_runtime import OnnxSession
from device_agent.training.activation_cache import Recording, to_float16
from device_agent.training.training_folder import training_folder
from refusals import refused
from trainings import train_bundle


def as_float16(bundle: Path, to: Path) -> Path:
    """A copy of `bundle` that records in float16."""
    shutil.copytree(bundle, to)
    rewrite(to, lambda manifest: [s.update(dtype="float16") for s in records(manifest)])
    return to


def records(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [step for step in manifest["schedule"] if step["do"] == "record"]


def nearest(number: float) -> float:
    """`number` in binary16, by Python."""
    return float(struct.unpack("<e", struct.pack("<e", number))[0])


def test_numbers_are_rounded_to_the_nearest_ties_to_even(seed: int) -> None:
    draw = np.random.default_rng(seed)
    halves = draw.integers(0x7BFF, size=1000, dtype=np.uint16)
    ahead = (halves + 1).view(np.float16).astype(np.float64)
    ties = (halves.view(np.float16).astype(np.float64) + ahead) / 2
    around = [np.nextafter(np.float32(ties), np.float32(side)) for side in (0, 1e9)]
    wide = draw.standard_normal(1000) * 10.0 ** draw.integers(-9, 4, 1000)
    numbers = np.float32(np.concatenate([ties, *around, wide, -ties, [0, -0.0, 65519]]))
    expected = [nearest(number) for number in numbers.tolist()]
    np.testing.assert_array_equal(to_float16(numbers).astype(np.float64), expected)


@pytest.mark.parametrize("number", [65520.0, -1e5, 3e38])
def test_a_finite_number_never_becomes_infinite(tmp_path: Path, number: float) -> None:
    recording = Recording(tmp_path / "r.npy", 2, (3,), dtype="float16")
    with refused("update.beyond-float16", number=abs(float(np.float32(number)))):
        recording.append(np.float32([[1, 2, 3], [1, number, math.inf]]))
    recording.close()


def test_infinity_and_nan_stay_what_they_are() -> None:
    numbers = np.float32([math.inf, -math.inf, math.nan, 65504])
    np.testing.assert_array_equal(to_float16(numbers).astype(np.float32), numbers)


def test_a_recording_takes_half_the_space(tmp_path: Path, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((6, 5, 7), dtype=np.float32)
    recording = Recording(tmp_path / "r.npy", 6, (5, 7), dtype="float16")
    recording.append(values[:2])
    recording.append(values[2:])
    recording.close()
    on_disk = np.load(tmp_path / "r.npy")
    assert on_disk.dtype == np.float16
    assert (tmp_path / "r.npy").stat().st_size == 128 + 2 * values.size
    rows = recording.read(np.array([5, 0]))
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, np.vectorize(nearest)(values[[5, 0]]).astype(np.float32))


def test_the_space_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_agent.training.activation_cache.room", lambda folder: 599)
    with refused("storage.too-little-space", needed_bytes=600):
        Recording(tmp_path / "r.npy", 10, (30,), dtype="float16", memory_bytes=599)
    kept = Recording(tmp_path / "r.npy", 10, (30,), dtype="float16", memory_bytes=600)
    kept.append(np.full((10, 30), 1 / 3, np.float32))
    assert not kept.kept
    np.testing.assert_array_equal(kept.read(np.array([9])), np.full((1, 30), nearest(1 / 3)))


def test_a_training_on_rounded_activations(
    bundle_of: BundleOf, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = as_float16(bundle_of("slice"), tmp_path / "half")
    rounded = train_bundle(half, data, tmp_path / "found", threads=1).record
    # The same with float32 recordings of stages whose results are rounded.
    original = OnnxSession.run

    def run(session: OnnxSession, *given: Any) -> dict[str, np.ndarray]:
        results = original(session, *given)
        if results.keys() == {"output"}:
            results["output"] = np.vectorize(nearest)(results["output"]).astype(np.float32)
        return results

    monkeypatch.setattr(OnnxSession, "run", run)
    expected = train_bundle(bundle_of("slice"), data, tmp_path / "expected", threads=1).record
    assert rounded.loss_last == expected.loss_last
    assert rounded.file == expected.file
    monkeypatch.undo()
    exact = train_bundle(bundle_of("slice"), data, tmp_path / "exact", threads=1).record
    assert rounded.file != exact.file


def test_activations_beyond_the_range_end_the_training(bundle_of: BundleOf, tmp_path: Path) -> None:
    half = as_float16(bundle_of("slice"), tmp_path / "half")
    x = np.ones((9, 1, 6, 6), np.float32)
    x[7] = 1e7
    with refused("update.beyond-float16") as error:
        train_bundle(half, (x, np.zeros(9, np.int64)), tmp_path / "out", threads=1)
    assert float(error.value.values["number"]) > 65520
    assert not (tmp_path / "out").exists()
    assert not training_folder(tmp_path / "out").exists()


def test_another_type_is_refused(bundle_of: BundleOf, tmp_path: Path) -> None:
    other = as_float16(bundle_of("slice"), tmp_path / "other")
    rewrite(other, lambda manifest: records(manifest)[0].update(dtype="bfloat16"))
    with refused("bundle.malformed-manifest"):
        open_bundle(other)


def test_a_bundle_without_the_option_is_as_before(bundle_of: BundleOf) -> None:
    bundle = open_bundle(bundle_of("slice"))
    assert b"float16" not in (bundle.folder / "manifest.json").read_bytes()
    assert all(s.dtype == "float32" for s in bundle.manifest.schedule if isinstance(s, Record))


def test_everything_is_the_same_after_an_interruption(
    bundle_of: BundleOf, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a recording, between two and in the training; `test_resume.py` also kills the process."""
    half = as_float16(bundle_of("slice"), tmp_path / "half")
    monkeypatch.setattr("device_agent.training.schedule_interpreter.CHECKPOINT_S", 0.0)
    train_bundle(half, data, tmp_path / "whole", threads=1)
    for stop in (2, 6, 9, 15):
        left = iter(range(stop))
        out = tmp_path / str(stop)

        def on_batch(left: Any = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_bundle(half, data, out, threads=1, on_batch=on_batch)
        train_bundle(half, data, out, threads=1)
        assert everything(out) == everything(tmp_path / "whole"), f"stopped at batch {stop}"
