"""How the demo splits the digits; its settings and its folder."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import InputError
from refusals import refused
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.demo import demo_settings
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_processes import config_text
from toolkit.demo.digits_data import split_samples, write_data
from toolkit.demo.run_demo import run_demo
from toolkit.simulation.digits import digits
from toolkit.simulation.partition import LEAST, dirichlet_split

LABELS = st.lists(st.integers(0, 9), min_size=30, max_size=200).map(np.array)


@given(
    labels=LABELS, devices=st.integers(1, 12), alpha=st.floats(0.1, 10), seed=st.integers(0, 2**40)
)
def test_every_sample_is_held_out_or_on_exactly_one_device(
    labels: np.ndarray, devices: int, alpha: float, seed: int
) -> None:
    held_out, parts = split_samples(labels, devices, 0.2, alpha, seed)
    assert len(parts) == devices
    assert min(map(len, parts)) >= LEAST
    assert len(held_out) == round(0.2 * len(labels))
    assert sorted(np.concatenate([held_out, *parts])) == list(range(len(labels)))


@given(labels=LABELS, seed=st.integers(0, 2**40))
def test_a_seed_gives_the_same_split_again(labels: np.ndarray, seed: int) -> None:
    one, other = (split_samples(labels, 4, 0.2, 0.5, seed) for _ in range(2))
    assert np.array_equal(one[0], other[0])
    assert all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def test_another_seed_gives_another_split() -> None:
    _, y = digits()
    one, other = (split_samples(y, 8, 0.2, 0.5, seed)[1] for seed in (0, 1))
    assert [len(part) for part in one] != [len(part) for part in other]


def test_a_small_alpha_gives_each_device_few_classes() -> None:
    _, y = digits()
    shares = [
        np.mean([np.bincount(y[part]).max() / len(part) for part in parts])
        for parts in (split_samples(y, 8, 0.2, alpha, 0)[1] for alpha in (0.5, 100.0))
    ]
    assert shares[0] > 2 * shares[1]


def test_too_few_samples_are_refused() -> None:
    with refused("data.too-few-for-clients", samples=3, clients=2):
        dirichlet_split(np.zeros(3, int), 2, 0.5, np.random.default_rng(0))


def test_the_digits_are_as_devices_want_them(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.create(force=False)
    held_out, samples = write_data(folder, ["phone-1", "board-1"], seed=3)
    x, y = digits()
    split = split_samples(y, 2, demo_settings.HELD_OUT, demo_settings.ALPHA, 3)
    rows = [split[0], *split[1]]
    files = [folder.held_out, folder.data_of("phone-1"), folder.data_of("board-1")]
    assert [held_out, *samples] == list(map(len, rows))
    for path, own in zip(files, rows, strict=True):
        with np.load(path) as file:
            assert (file["x"].dtype, file["y"].dtype) == (np.float32, np.int64)
            assert np.array_equal(file["x"], x[own])
            assert np.array_equal(file["y"], y[own])
    assert (x.shape, x.min(), x.max()) == ((1797, 1, 8, 8), 0, 1)


def test_all_full_changes_the_submodels_only() -> None:
    mixed, full = (
        demo_settings.members(demo_settings.fleet(False)),
        demo_settings.members(demo_settings.fleet(True)),
    )
    assert [member.name for member in mixed] == [member.name for member in full]
    assert {member.kind.submodel for member in full} == {"full"}
    families = {member.kind.submodel.partition(":")[0] for member in mixed}
    assert families == {"full", "low-rank", "slice", "cp"}


def test_the_coordinator_reads_the_configuration(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.create(force=False)
    folder.config.write_text(config_text(folder, demo_settings.FLEET, rounds=3, seed=7))
    config = load_config(folder.config)
    assert (config.rounds, config.seed, config.port) == (3, 7, 0)
    assert (config.training, config.devices) == (demo_settings.TRAINING, demo_settings.FLEET)
    assert (config.held_out, config.state) == (folder.held_out, folder.coordinator)


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        run_demo(tmp_path, rounds=1, seed=0, all_full=True, force=False)
    assert not list(tmp_path.iterdir())


def test_force_leaves_a_folder_alone_that_no_demo_made(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with refused("file.not-replaceable", file=str(tmp_path)):
        run_demo(tmp_path, rounds=1, seed=0, all_full=True, force=True)
    assert (tmp_path / "thesis.txt").exists()


def test_force_replaces_the_folder_of_a_demo(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.create(force=False)
    (folder.data / "old.npz").touch()
    folder.create(force=True)
    assert not list(folder.data.iterdir())


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with refused("option.invalid-value", option="seed", value=-1):
        run_demo(tmp_path / "demo", rounds=1, seed=-1, all_full=True, force=False)
    assert not (tmp_path / "demo").exists()
