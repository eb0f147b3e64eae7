"""What a round took: measured along with the training, and kept by the coordinator."""

from pathlib import Path

import msgspec
import pytest

from bundles import tiny_bundle, write_data
from device_agent.formats.update import read_update
from made_profiles import MACHINE, full
from profiles.documents.bundle_profile import Machine, Profile
from toolkit.coordinator.storage.coordinator_store import Store
from trainings import train_bundle
from updates import record_of


@pytest.fixture
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory, "cp")


def test_a_round_profiles_its_training_batches(bundle: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.npz", count=21)  # batches of 4, 4, 4, 4 and 5, twice
    train_bundle(bundle, str(data), tmp_path / "update", threads=1, profiled=True)
    record, _ = read_update(tmp_path / "update")
    profile = record.profile
    assert profile is not None
    assert (profile.method.source, profile.method.warm_up_runs, profile.method.threads) == (
        "training", 1, 1,
    )  # fmt: skip
    [phase] = profile.phases
    assert (phase.role, phase.name) == ("train", "personal_step + factor_step")
    assert phase.steady.runs == profile.method.runs == record.steps - 1
    assert profile.peak_bytes is not None


def test_alone_a_record_holds_no_times(bundle: Path, tmp_path: Path) -> None:
    """So that it is the same whenever it is made."""
    data = write_data(tmp_path / "data.npz")
    train_bundle(bundle, str(data), tmp_path / "update", threads=1)
    assert read_update(tmp_path / "update")[0].profile is None


def add(store: Store, device: str, round_: int, profile: Profile | None) -> None:
    record = msgspec.structs.replace(record_of("full", 1, ()), profile=profile)
    store.add_update(round_, device, record)


def on(machine: Machine, factor: float) -> Profile:
    return msgspec.structs.replace(full(factor), machine=machine)


def test_profiles_of_a_machine_that_a_device_left_are_kept_apart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    updated = msgspec.structs.replace(MACHINE, system="Linux 6.18.1")
    fifth = msgspec.structs.replace(MACHINE, model="Raspberry Pi 5 Model B Rev 1.0")
    add(store, "board-1", 1, on(MACHINE, 1))
    add(store, "board-2", 1, on(fifth, 3))
    add(store, "board-1", 2, None)
    add(store, "board-1", 3, on(updated, 2))
    assert store.records.profiles("board-1") == [on(MACHINE, 1), on(updated, 2)]
    add(store, "board-1", 4, on(fifth, 0.5))
    assert store.records.profiles("board-1") == [on(fifth, 0.5)]
    assert store.records.profiles("board-2") == [on(fifth, 3)]
    assert store.records.profiles("board-3") == []
    store.close()
