"""What is kept of rounds and updates, and going back to an earlier round's model."""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from bundles import everything
from device_agent.federation import fleet_status
from device_agent.formats.manifest import encode
from device_agent.formats.protocol.fleet import RoundResult
from made_profiles import full
from refusals import refused
from toolkit.coordinator.rounds.falling_quality import falling
from toolkit.coordinator.storage.backup import backup
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.retention import FULL_RECORDS, Keep
from toolkit.coordinator.storage.saved_rounds import export_model, roll_back, saved_rounds
from updates import record_of
from vector_fleet import (
    VectorModel,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    send_trained,
    trained,
)

ACCURACIES = [0.1, 0.9, 0.5, 0.6, 0.7]
ADD_DEVICE = (
    "INSERT INTO devices (id, kind, name, secret, public_key, machine) "
    "VALUES (?, 'board', ?, '', '', '{}')"
)


def test_only_its_owner_reads_a_new_state_folder(tmp_path: Path) -> None:
    Store(tmp_path / "state").close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def result(round_: int, accuracy: float | None, loss: float = 1.0) -> RoundResult:
    return RoundResult(round=round_, accuracy=accuracy, loss=loss, updates=2)


def model_of(round_: int) -> bytes:
    return f"model {round_}".encode()


def filled(folder: Path, keep: Keep, accuracies: list[float | None] | None = None) -> Path:
    store = Store(folder, keep)
    for round_, accuracy in enumerate(accuracies or ACCURACIES):
        store.add_result(result(round_, accuracy, loss=10 - round_), model_of(round_))
    store.remove_unnamed()
    store.close()
    return folder


@pytest.mark.parametrize(
    ("keep", "kept"), [("all", [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (1, [1, 4]), ("best", [1, 4])]
)
def test_the_models_that_are_kept(tmp_path: Path, keep: Keep, kept: list[int]) -> None:
    saved = saved_rounds(filled(tmp_path, keep))
    assert [entry.round for entry in saved if entry.kept] == kept
    assert [entry.round for entry in saved if entry.best] == [1]
    files = {path.name for path in (tmp_path / "files").iterdir()}
    assert files == {hashlib.sha256(model_of(round_)).hexdigest() for round_ in kept}
    assert [entry.model for entry in saved] == [
        hashlib.sha256(model_of(round_)).hexdigest() for round_ in range(5)
    ]


def test_the_best_round_of_a_regression_has_the_lowest_loss(tmp_path: Path) -> None:
    filled(tmp_path, 1, [None, None, None])
    assert [saved.round for saved in saved_rounds(tmp_path) if saved.best] == [2]


def test_a_model_is_exported_while_the_folder_is_in_use(tmp_path: Path) -> None:
    state = filled(tmp_path / "state", 2)
    store = Store(state, 2)
    export_model(state, 3, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == model_of(3)
    with refused("file.exists"):
        export_model(state, 1, tmp_path / "out.safetensors")
    with refused("round.not-kept", round=0, kept=[1, 3, 4]):
        export_model(state, 0, tmp_path / "0.safetensors")
    with refused("round.unknown", round=9):
        export_model(state, 9, tmp_path / "9.safetensors")
    store.blobs.path(hashlib.sha256(model_of(1)).hexdigest()).write_bytes(b"?")
    with refused("round.damaged-model", round=1):
        export_model(state, 1, tmp_path / "1.safetensors")
    store.close()
    with refused("state.no-federation", path=str(tmp_path)):
        saved_rounds(tmp_path)


def test_a_rollback_from_a_damaged_model(tmp_path: Path) -> None:
    state = filled(tmp_path, "all")
    (state / "files" / hashlib.sha256(model_of(4)).hexdigest()).unlink()
    with refused("state.damaged-model", round=4):
        Store(state)
    assert roll_back(state, 1) == 5
    store = Store(state)
    assert store.model() == model_of(1)
    assert (state / "global.safetensors").read_bytes() == model_of(1)
    store.add_result(result(5, 0.8), b"model 5")
    assert store.model() == b"model 5"
    store.close()
    assert [saved.started_from for saved in saved_rounds(state)] == [None, 0, 1, 2, 3, 1]


def test_a_rollback_of_a_federation(tmp_path: Path) -> None:
    config, model = configured(tmp_path), VectorModel()
    with running(config, model) as server:
        links = enrol(server, tmp_path)
        for round_ in (1, 2):
            for name, link in links.items():
                send_trained(link, round_, tmp_path / f"{name}-{round_}")
        first = links["desktop-1"]
        old = trained(first, tmp_path / "third")[2]
        send(first, 3, old)
        before = everything(config.state)
        with refused("state.in-use", path=str(config.state)):
            roll_back(config.state, 1)
        assert everything(config.state) == before
    assert roll_back(config.state, 1) == 3
    assert json.loads((config.state / "history.json").read_text())["history"][-1]["round"] == 2
    told: list[str] = []
    with running(config, VectorModel(), told.append) as server:
        head = fleet_status.lines(server.coordinator.status())[0]
        assert head.endswith("global accuracy 50.0% (back to round 1)")
        assert_soon(lambda: "Continuing with round 3 of 3 from the model of round 1." in told)
        links = {str(n): joined(server, tmp_path / str(n)) for n in range(3)}
        trained(links["1"], tmp_path / "wait")  # round 3 is open again
        with refused("round.other-bundle"):
            send(links["0"], 3, old)
        for name, link in links.items():
            send_trained(link, 3, tmp_path / f"again-{name}")
        assert_soon(lambda: len(server.coordinator.status().history) == 4)
        losses = [result.loss for result in server.coordinator.status().history]
    assert losses == [0, 1, 2, 2]  # the mean of the weights: round 3 trained the model of round 1


def test_records_of_updates_are_bounded(tmp_path: Path) -> None:
    """Full records of the last rounds; of older updates at most 150 bytes each."""
    devices, rounds = [f"board-{n}" for n in range(20)], 40
    store = Store(tmp_path, 1)
    with store._database.transaction() as db:
        db.executemany(ADD_DEVICE, [(name, name) for name in devices])
    store.add_result(result(0, 0.5), b"model")
    record = msgspec.structs.replace(record_of("full", 7, ()), profile=full())
    data = encode(record)
    sizes = []
    for round_ in range(1, rounds + 1):
        for device in devices:
            store.add_update(round_, device, record)
        store.add_result(result(round_, 0.5), b"model")
        sizes.append((tmp_path / "state.sqlite3").stat().st_size)
    assert len(data) > 1000
    assert (sizes[-1] - sizes[9]) / (len(devices) * (rounds - 10)) < 150
    assert len(store.updates(rounds)) == len(store.updates(rounds - FULL_RECORDS + 1)) == 20
    assert store.updates(rounds - FULL_RECORDS) == []
    assert store.records.rounds_trained() == dict.fromkeys(devices, rounds)
    assert len(store.records.profiles("board-3")) == FULL_RECORDS
    with store._database.transaction() as db:
        row = db.execute("SELECT * FROM past_updates WHERE round = 1 AND device = 'board-3'")
        assert row.fetchone() == (
            *(1, "board-3", 7, record.steps),
            *(record.loss_first, record.loss_last),
        )
    store.close()
    Store(tmp_path).close()  # its digest is right


@pytest.mark.parametrize(
    ("accuracies", "warned"),
    [
        ([0.9, 0.8, 0.7, 0.6], True),
        ([0.1, 0.9, 0.8, 0.7, 0.6], True),
        ([0.9, 0.8, 0.7], False),
        ([0.9, 0.8, 0.8, 0.6], False),
        ([0.9, 0.8, 0.7, 0.6, 0.7], False),
    ],
)
def test_three_falls_in_a_row(accuracies: list[float], warned: bool) -> None:
    results = [result(round_, accuracy) for round_, accuracy in enumerate(accuracies)]
    assert (falling(results) is not None) == warned
    losses = [result(round_, None, 1 - accuracy) for round_, accuracy in enumerate(accuracies)]
    assert (falling(losses) is not None) == warned


@pytest.mark.parametrize(
    ("after", "warned"),
    [
        ([0.86, 0.85, 0.86, 0.84, 0.85], True),  # a slow fall, with rises
        ([0.86, 0.85, 0.88, 0.84, 0.85], False),  # one model is near
        ([0.86, 0.85, 0.86, 0.84], False),
        ([0.86] * 16 + [0.84, 0.85], True),
        ([0.86] * 20, False),  # the best model is too old
    ],
)
def test_a_slow_fall(after: list[float], warned: bool) -> None:
    """From 0.9 after round 1: 3 points of accuracy, or a loss that is 10% higher, are clear."""
    accuracies = [0.5, 0.9, *after]
    results = [result(round_, accuracy) for round_, accuracy in enumerate(accuracies)]
    losses = [result(round_, None, 1 + (0.9 - a) / 0.3) for round_, a in enumerate(accuracies)]
    for warning in (falling(results), falling(losses)):
        assert (warning is not None) == warned
        if warning is not None:
            assert "has not come near that of round 1 for 5 rounds" in warning
            assert f"after round {len(accuracies) - 1}" in warning


def flip(state: Path, round_: int) -> None:
    """Damage the model of `round_` and leave its size."""
    path = state / "files" / hashlib.sha256(model_of(round_)).hexdigest()
    path.write_bytes(path.read_bytes().swapcase())


def kept_at_start(state: Path, read_all: bool = False) -> list[int]:
    Store(state, read_all=read_all).close()
    return [saved.round for saved in saved_rounds(state) if saved.kept]


def test_a_start_reads_the_newest_and_the_best_model(tmp_path: Path) -> None:
    state = filled(tmp_path / "state", "all")
    flip(state, 2)
    assert kept_at_start(state) == [0, 1, 2, 3, 4]
    for use in (
        lambda: export_model(state, 2, tmp_path / "out.safetensors"),
        lambda: roll_back(state, 2),
    ):
        with refused("round.damaged-model", round=2):
            use()
    with refused("backup.damaged-file"):
        backup(state, tmp_path / "copy")
    assert kept_at_start(state, read_all=True) == [0, 1, 3, 4]
    flip(state, 1)  # the best
    flip(state, 0)
    assert kept_at_start(state) == [3, 4]


def test_a_start_reads_all_models_if_one_is_missing(tmp_path: Path) -> None:
    state = filled(tmp_path, "all")
    flip(state, 2)
    (state / "files" / hashlib.sha256(model_of(0)).hexdigest()).write_bytes(b"short")
    assert kept_at_start(state) == [1, 3, 4]


def test_a_start_after_a_rollback_reads_the_newest_model(tmp_path: Path) -> None:
    state = filled(tmp_path, "all")
    roll_back(state, 2)
    flip(state, 4)
    assert kept_at_start(state) == [0, 1, 2, 3]
