"""Public datasets: small files of the real formats, read a second time byte by byte."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataset_files import CIFAR, write_cifar, write_leaf, write_mnist, write_tiny_imagenet
from refusals import refused
from toolkit.coordinator.federation_file.simulation_table import Format
from toolkit.simulation.datasets import read_dataset
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulate import prepare, simulate
from toolkit.simulation.simulation_config import load_simulation

STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
WRITERS, SHAPE = 6, (1, 28, 28)


@pytest.mark.parametrize("format_", CIFAR)
def test_cifar_is_read_as_its_bytes_say(tmp_path: Path, format_: Format, seed: int) -> None:
    write_cifar(tmp_path, format_, np.random.default_rng(seed))
    mean, std = STATISTICS[format_]
    *train, test = CIFAR[format_]
    for samples, names in zip(
        read_dataset(format_, tmp_path, (3, 32, 32)), (train, [test]), strict=True
    ):
        labels, values = [], []
        skipped = int(format_ == "cifar100")
        for name in names:
            for record in struct.iter_unpack(f"{skipped}xB3072B", (tmp_path / name).read_bytes()):
                labels.append(record[0])
                channels = [record[1 + 1024 * c : 1025 + 1024 * c] for c in range(3)]
                values.append(
                    [[(v / 255 - mean[c]) / std[c] for v in channels[c]] for c in range(3)]
                )
        assert samples.y.tolist() == labels
        expected = np.array(values).reshape(-1, 3, 32, 32)
        np.testing.assert_allclose(samples.x, expected, rtol=1e-5, atol=1e-6)
        assert samples.x.dtype == np.float32
        assert samples.writers is None


def test_leaf_is_read_writer_by_writer(tmp_path: Path, seed: int) -> None:
    written = write_leaf(tmp_path, np.random.default_rng(seed))
    train, test = read_dataset("leaf", tmp_path, SHAPE)
    assert train.writers is not None
    assert len(np.unique(train.writers)) == WRITERS
    found = {
        tuple(train.y[train.writers == one]): train.x[train.writers == one]
        for one in range(WRITERS)
    }
    assert len(train.y) == sum(len(user["y"]) for user in written.values())
    for user in written.values():
        rows = np.array(user["x"], np.float32).reshape(-1, *SHAPE)
        assert any(
            list(labels) == user["y"] and np.array_equal(values, rows)
            for labels, values in found.items()
        )
    assert test.x.shape[1:] == SHAPE


@pytest.mark.parametrize("shape", [SHAPE, (784,)])
def test_mnist_is_read_packed_and_unpacked(
    tmp_path: Path, shape: tuple[int, ...], seed: int
) -> None:
    written = write_mnist(tmp_path, np.random.default_rng(seed))
    for samples, part in zip(read_dataset("mnist", tmp_path, shape), written, strict=True):
        x, y = written[part]
        np.testing.assert_allclose(samples.x, x.reshape(-1, *shape) / 255, rtol=1e-6)
        assert samples.x.dtype == np.float32
        assert samples.y.tolist() == y.tolist()


def test_tiny_imagenet_is_read_by_class_and_annotation(tmp_path: Path, seed: int) -> None:
    written = write_tiny_imagenet(tmp_path, np.random.default_rng(seed), classes=4)
    classes = (tmp_path / "wnids.txt").read_text().split()
    mean, std = (np.array(one).reshape(3, 1, 1) for one in STATISTICS["tiny-imagenet"])
    for samples, part in zip(
        read_dataset("tiny-imagenet", tmp_path, (3, 64, 64)), written.values(), strict=True
    ):
        assert [classes[label] for label in samples.y] == [name for name, _ in part.values()]
        pixels = np.array([value.transpose(2, 0, 1) for _, value in part.values()])
        np.testing.assert_allclose(samples.x, (pixels / 255 - mean) / std, rtol=1e-4, atol=1e-5)


def fleet(folder: Path, format_: Format, model: str, shape: tuple[int, ...], more: str) -> Path:
    (folder / "fleet.toml").write_text(
        f"""
        model = "{model}"
        input_shape = {list(shape)}
        rounds = 1
        [training]
        batch_size = 2
        steps = 1
        [simulation]
        data = "data"
        format = "{format_}"
        {more}
        [[devices]]
        name = "client"
        submodel = "width:0.25"
        count = 3
        """
    )
    return folder / "fleet.toml"


@pytest.mark.parametrize("format_", ["mnist", "leaf"])
def test_the_own_test_samples_judge(tmp_path: Path, format_: Format, seed: int) -> None:
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(seed)
    if format_ == "leaf":
        write_leaf(tmp_path / "data", draw)
        file = fleet(tmp_path, "leaf", "toolkit.models:femnist_cnn", SHAPE, 'partition = "writers"')
    else:
        write_mnist(tmp_path / "data", draw)
        file = fleet(tmp_path, format_, "toolkit.models:mnist_dnn", SHAPE, "")
    simulation = prepare(load_simulation(file), RunFolder(tmp_path / "other"))
    config = simulation.config
    train, test = read_dataset(format_, tmp_path / "data", config.input_shape)
    assert np.array_equal(simulation.held_out[0], test.x)
    assert np.array_equal(simulation.held_out[1], test.y)
    assert sorted(np.concatenate(simulation.parts)) == list(range(len(train.y)))
    if train.writers is not None:
        held = [set(train.writers[part]) for part in simulation.parts]
        assert sorted(map(len, held)) == [WRITERS // 3] * 3
        assert len(set.union(*held)) == WRITERS


def cut_label(folder: Path) -> None:
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])


def unknown_class(folder: Path) -> None:
    with (folder / "val" / "val_annotations.txt").open("a") as file:
        file.write("val_0.JPEG\tn99999999\t0\t0\t1\t1\n")


WRITE: dict[Format, Callable[[Path, np.random.Generator], object]] = {
    "cifar10": lambda folder, draw: write_cifar(folder, "cifar10", draw),
    "mnist": write_mnist,
    "tiny-imagenet": lambda folder, draw: write_tiny_imagenet(folder, draw, classes=2),
}
SHAPES = {"mnist": SHAPE, "tiny-imagenet": (3, 64, 64), "cifar10": (3, 32, 32)}
DAMAGES: list[tuple[Format, Callable[[Path], object]]] = [
    ("cifar10", lambda folder: (folder / "data_batch_2.bin").write_bytes(bytes(3072))),
    ("cifar10", lambda folder: (folder / "data_batch_1.bin").write_bytes(b"")),
    ("cifar10", lambda folder: (folder / "test_batch.bin").unlink()),
    ("mnist", lambda folder: (folder / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")),
    ("mnist", cut_label),
    ("tiny-imagenet", lambda folder: (folder / "wnids.txt").unlink()),
    ("tiny-imagenet", unknown_class),
]


@pytest.mark.parametrize(("format_", "damage"), DAMAGES)
def test_damaged_files_are_refused(
    tmp_path: Path, format_: Format, damage: Callable[[Path], object]
) -> None:
    WRITE[format_](tmp_path, np.random.default_rng(0))
    damage(tmp_path)
    with refused("data.dataset-file"):
        read_dataset(format_, tmp_path, SHAPES[format_])


def test_tiny_imagenet_needs_a_model_of_pictures(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, np.random.default_rng(0), classes=2)
    with refused("data.wrong-shape"):
        read_dataset("tiny-imagenet", tmp_path, (64, 64))


USER = {"x": [[0.5] * 784] * 2, "y": [1, 2]}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff",
        json.dumps({"users": []}).encode(),
        json.dumps({"user_data": {}}).encode(),
        json.dumps({"user_data": {"a": {"x": ["a line of a play"], "y": ["b"]}}}).encode(),
        json.dumps({"user_data": {"a": {**USER, "y": [1]}}}).encode(),
        json.dumps({"user_data": {"a": {**USER, "x": [[0.5] * 783] * 2}}}).encode(),
        json.dumps({"user_data": {"a": {**USER, "y": [1, 2**70]}}}).encode(),
    ],
    ids=["cut", "no text", "no data", "no users", "texts", "few labels", "short rows", "huge"],
)
def test_damaged_leaf_is_refused(tmp_path: Path, content: bytes) -> None:
    write_leaf(tmp_path, np.random.default_rng(0))
    for path in (tmp_path / "train").iterdir():
        path.write_bytes(content)
    with refused("data.dataset-file"):
        read_dataset("leaf", tmp_path, SHAPE)


def test_writers_need_a_dataset_that_names_them(tmp_path: Path) -> None:
    file = fleet(
        tmp_path, "cifar10", "toolkit.models:resnet20", (3, 32, 32), 'partition = "writers"'
    )
    with refused("config.bad-value", 'format = "leaf"'):
        load_simulation(file)


def test_too_few_writers_are_refused(tmp_path: Path) -> None:
    write_leaf(tmp_path / "data", np.random.default_rng(0))
    file = fleet(tmp_path, "leaf", "toolkit.models:femnist_cnn", SHAPE, 'partition = "writers"')
    file.write_text(file.read_text().replace("count = 3", "count = 7"))
    with refused("data.too-few-writers", writers=WRITERS, clients=7):
        simulate(file, tmp_path / "out")


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_mnist(tmp_path / "data", np.random.default_rng(0))
    path = tmp_path / "data" / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x0a")
    file = fleet(tmp_path, "mnist", "toolkit.models:mnist_dnn", SHAPE, "")
    with refused("data.label-out-of-range", label=10, highest=9):
        simulate(file, tmp_path / "out")
