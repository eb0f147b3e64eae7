"""Rounds on pictures: the coordinator's held-out ones, and a device's, whose samples are theirs."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from device_agent.data.pictures import read_picture
from device_agent.formats.bundle import open_bundle
from device_agent.formats.preprocessing import Images
from phones import NativeAgent
from refusals import refused
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from trainings import train_bundle
from vector_fleet import running

TOML = """
model = "sample_models:pictures"
input_shape = [3, 12, 10]
rounds = 1
held_out = "pictures"
port = 0
[data]
kind = "images"
classes = ["cat", "dog", "owl"]
fit = "stretch"
[training]
batch_size = 2
[[devices]]
name = "phone"
submodel = "full"
"""
IMAGES = Images(classes=("cat", "dog", "owl"), fit="stretch")


def test_a_round_on_pictures(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    files = []
    for number in range(7):
        folder = tmp_path / "pictures" / IMAGES.classes[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        size = tuple(draw.integers(4, 40, size=2))
        file = folder / f"{number}.png"
        Image.fromarray(draw.integers(256, size=(*size, 3), dtype=np.uint8)).save(file)
        files.append((number % 3, file))
    (tmp_path / "fleet.toml").write_text(TOML)
    config = load_config(tmp_path / "fleet.toml")
    model = federation(config)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for name, content in model.bundle("full").items():
        (bundle / name).write_bytes(content)
    with running(config, model) as server:
        agent = NativeAgent(server, "phone", tmp_path / "native", tmp_path / "pictures")
        agent.start()
        agent.finish()
        history = server.coordinator.store.history.results()
    assert open_bundle(bundle).manifest.preprocessing == IMAGES
    ordered = sorted(files)
    x = np.stack([read_picture(file, IMAGES, (3, 12, 10)) for _, file in ordered])
    np.savez(tmp_path / "arrays.npz", x=x, y=np.array([label for label, _ in ordered]))
    train_bundle(bundle, str(tmp_path / "arrays.npz"), tmp_path / "out", threads=1, seed=1)
    expected = load_file(tmp_path / "out" / "update.safetensors")
    came = load_file(agent.sent[1] / "update.safetensors")
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(came[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert [result.updates for result in history] == [0, 1]


@pytest.mark.parametrize("classes", ['["cat", "dog"]', '["a", "b", "c", "d"]'])
def test_other_classes_than_the_models(tmp_path: Path, classes: str) -> None:
    text = TOML.replace('["cat", "dog", "owl"]', classes)
    (tmp_path / "fleet.toml").write_text(text)
    with refused("config.data-misfit", "classes, but the model has 3"):
        federation(load_config(tmp_path / "fleet.toml"))
