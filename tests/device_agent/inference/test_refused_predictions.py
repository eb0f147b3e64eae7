"""Samples, files and models that a device refuses to predict with."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import bundles
from device_agent.data import array_files
from device_agent.formats.bundle import read_manifest
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.preprocessing import Images, Series
from device_agent.inference.predictor import Predictor
from device_agent.training.personal_model import personal_entries, write_personal
from edgetailor import deploy
from profiles.errors import EdgeTailorError
from refusals import refused

TOLERANCE = 1e-5
SUFFIXES = (".npy", ".npz", ".png", ".csv")


def test_what_does_not_fit_is_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    bundle = bundles.tiny_bundle(tmp_path_factory, "full")
    predictor = Predictor(bundle)
    x, _ = bundles.samples(3, seed)
    with refused("data.wrong-type", x_type="float64"):
        predictor.predict(x.astype(np.float64))
    with refused("data.wrong-shape", x_shape=[1, 6, 6]):
        predictor.predict(x[0])
    with refused("data.too-few-samples"):
        predictor.predict(x[:0])
    x[1, 0, 2, 2] = np.inf
    with refused("data.not-finite", sample=1):
        predictor.predict(x)
    with refused("memory.does-not-fit"):
        Predictor(bundle, max_memory=1 << 20)
    with refused("state.no-personal-model", submodel="full"):
        Predictor(bundle, personal=tmp_path / "own.safetensors")
    with refused("state.unreadable-personal-model"):
        Predictor(bundles.tiny_bundle(tmp_path_factory, "cp"), personal=tmp_path / "none")
    with refused("data.missing-file"):
        list(predictor.predict_files(tmp_path / "none.npy"))
    Image.fromarray(np.zeros((6, 6), np.uint8)).save(tmp_path / "picture.png")
    with refused("data.not-prepared"):
        list(predictor.predict_files(tmp_path / "picture.png"))
    (tmp_path / "damaged.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with refused("data.unreadable-file"):
        list(predictor.predict_files(tmp_path / "damaged.npy"))
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    with refused("data.missing-array", array="x"):
        list(predictor.predict_files(tmp_path / "y.npz"))


@pytest.mark.parametrize("change", ["missing", "shape", "type"])
def test_a_damaged_personal_model_is_refused(
    change: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    bundle = bundles.tiny_bundle(tmp_path_factory, "cp")
    about = read_manifest((bundle / MANIFEST).read_bytes(), bundle)
    personal = {e.name: np.zeros(e.shape, e.dtype) for e in personal_entries(about)}
    name = min(personal)
    if change == "missing":
        del personal[name]
    else:
        personal[name] = (
            personal[name][None] if change == "shape" else personal[name].astype(np.int64)
        )
    write_personal(tmp_path / "own", personal, about)
    with refused("state.unreadable-personal-model"):
        Predictor(bundle, personal=tmp_path / "own")


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "classes": lambda about: about.update(classes=5),
    "sigmoid": lambda about: about.update(output="sigmoid"),
    "ctc": lambda about: about.update(output="ctc"),
    "no axis": lambda about: about["signatures"]["predict"]["outputs"][0].update(shape=[None]),
    "sample shape": lambda about: about.update(sample_shape=[1, 6, 7]),
    "sample type": lambda about: about.update(sample_dtype="int64"),
}


def test_an_inference_bundle_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    model, _ = bundles.tiny_model()
    good = deploy(model, "full", bundles.SAMPLE_SHAPE, tmp_path / "good").out
    for name, change in WRONG.items():
        shutil.copytree(good, tmp_path / name)
        bundles.rewrite(tmp_path / name, change)
        with refused("bundle.wrong-prediction"):
            Predictor(tmp_path / name)

    def wider(about: dict[str, Any]) -> None:
        """The manifest agrees with itself, but not with the graph."""
        about["signatures"]["predict"]["outputs"][0]["shape"] = [None, 5]
        about["classes"] = 5

    bundles.rewrite(good, wider)
    with refused("bundle.wrong-result", expected=[1, 5]):
        Predictor(good).predict(np.zeros((1, *bundles.SAMPLE_SHAPE), np.float32))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(content=st.binary(max_size=200), kept=st.integers(0, 300), suffix=st.sampled_from(SUFFIXES))
def test_damaged_files_are_refused_by_a_known_error(
    predictors: dict[str, Predictor], tmp_path: Path, content: bytes, kept: int, suffix: str
) -> None:
    """Files that begin well and then go wrong."""
    file = tmp_path / f"data{suffix}"
    file.write_bytes((tmp_path / f"good{suffix}").read_bytes()[:kept] + content)
    for predictor in predictors.values():
        try:
            assert all(len(p.values) == 3 for p in predictor.predict_files(file))
        except EdgeTailorError as error:
            if not error.code.startswith("data."):
                raise


@pytest.fixture
def predictors(tmp_path: Path) -> dict[str, Predictor]:
    """Models for pictures and for windows, and a good file of each kind."""
    bundles.picture_bundle(tmp_path / "pictures", Images(classes=("a", "b", "c")), (1, 2, 3))
    bundles.picture_bundle(tmp_path / "windows", Series(columns=("a", "b"), label="kind"), (3, 2))
    x = np.zeros((2, 3, 2), np.float32)
    np.save(tmp_path / "good.npy", x)
    np.savez(tmp_path / "good.npz", x=x)
    Image.new("L", (3, 2)).save(tmp_path / "good.png")
    (tmp_path / "good.csv").write_text("a,b\n" + "1,2\n" * 6)
    return {name: Predictor(tmp_path / name, threads=1) for name in ("pictures", "windows")}


def test_names_of_files_can_be_printed(predictors: dict[str, Predictor], tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff\x1b\n.png")
    shutil.copy(tmp_path / "good.png", tmp_path / name)
    [prediction] = predictors["pictures"].predict_files(tmp_path / name)
    assert prediction.file == "a???.png"


def test_a_compressed_array_is_unpacked_on_disk_if_there_is_room(
    predictors: dict[str, Predictor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A small file may hold an array that is larger than memory."""
    x = np.random.default_rng(seed).normal(size=(5, 3, 2)).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", x=x)
    monkeypatch.setattr(array_files, "IN_MEMORY_BYTES", 0)
    predictor = predictors["windows"]
    found = [p.values for p in predictor.predict_files(tmp_path / "x.npz")]
    np.testing.assert_allclose(found, predictor.predict(x), atol=TOLERANCE)
    monkeypatch.setattr(array_files, "room", lambda _: 0)
    with refused("storage.too-little-space"):
        list(predictor.predict_files(tmp_path / "x.npz"))
