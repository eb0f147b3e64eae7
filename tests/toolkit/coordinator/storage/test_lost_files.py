"""Files of the state folder that are lost or damaged, in every combination."""

import errno
import hashlib
import itertools
import random
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from bundles import everything
from device_agent.federation.membership import join
from device_agent.formats.manifest import FileEntry
from profiles.errors import EdgeTailorError
from refusals import refused
from toolkit.coordinator.closing import full_disk
from toolkit.coordinator.closing.round_worker import RoundWorker
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.sample_files import read_samples
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.blobs import Blobs
from toolkit.coordinator.storage.database_check import check_database
from vector_fleet import (
    VectorModel,
    configured,
    enrol,
    joined,
    messages_to,
    running,
    send_all,
    send_trained,
    task,
    token,
)

DATABASE = "state.sqlite3"
MARKER = "federation.json"
MODEL = "global.safetensors"
HARM = ("whole", "missing", "flipped")
CODES = {"state.damaged", "state.no-database", "state.damaged-model"}
"""Codes of the refusals that a lost or damaged file may lead to."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of a federation as a kill leaves it: after round 1, and in round 2 with an update."""
    folder = tmp_path_factory.mktemp("killed")
    with running(configured(folder / "live")) as server:
        links = enrol(server, folder / "devices")
        send_all(links, 1, folder)
        task(links["desktop-1"])
        shutil.copytree(folder / "live", folder / "earlier")
        send_trained(links["desktop-1"], 2, folder / "two")
        shutil.copytree(folder / "live", folder / "late")
    return folder


def rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Everything that a database holds, read without the program."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")
    found = {
        name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr)
        for (name,) in names.fetchall()
    }
    connection.close()
    return found


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    used = [at for at, byte in enumerate(data) if byte]  # most of a database's bytes are free
    data[draw.choice(used)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def harm(path: Path, how: str, draw: random.Random) -> None:
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        flip(path, draw)


def begun(config: CoordinatorConfig) -> Server:
    """What `serve` does until it waits for requests: the folder is read and the model published."""
    server = Server(config, VectorModel(), Path("fleet.toml"))
    held_out = read_samples(config.held_out, config.input_shape)
    try:
        RoundWorker(server.coordinator, VectorModel(), held_out, lambda: None).resume()
    finally:
        server.close()
    return server


def harms(database: str) -> list[tuple[str, ...]]:
    """Every combination for the marker, the blob of the model, its copy and the other blobs."""
    others = ("whole", "missing") if database == "whole" else ("whole",)
    return list(itertools.product(HARM, HARM, HARM, others))


@pytest.mark.parametrize("database", [*HARM, "empty"])
def test_every_combination_of_lost_and_damaged_files(
    killed: Path, tmp_path: Path, seed: int, database: str
) -> None:
    draw = random.Random(seed)
    state = tmp_path / "c" / "state"
    model = load_file(killed / "late" / "state" / MODEL)["w"]
    sha256 = hashlib.sha256((killed / "late" / "state" / MODEL).read_bytes()).hexdigest()
    counts = {"served": 0, "refused": 0}
    for marker, blob, copy, others in harms(database):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(killed / "late", tmp_path / "c")
        config = configured(tmp_path / "c")
        before_rows = rows(state / DATABASE)
        harm(state / DATABASE, database, draw)
        harm(state / MARKER, marker, draw)
        harm(state / "files" / sha256, blob, draw)
        harm(state / MODEL, copy, draw)
        if others == "missing":
            for path in (state / "files").iterdir():
                if path.name != sha256:
                    path.unlink()
        before = everything(state)
        what = f"marker {marker}, blob {blob}, copy {copy}, others {others}"
        try:
            begun(config)
        except EdgeTailorError as error:
            counts["refused"] += 1
            # A flipped bit may lie in the number of the schema's version.
            known = CODES | {"state.other-version"} if database == "flipped" else CODES
            ended = (error.code in known, error.exit_code)
        else:
            ended = None
        if ended is not None:
            assert ended == (True, 2), what
            assert everything(state) == before, what
            # Refused only where the database or both copies of the model are gone.
            assert database != "whole" or "whole" not in (blob, copy), what
            continue
        counts["served"] += 1
        now = rows(state / DATABASE)
        if others == "missing":  # only the files of earlier rounds' models may be noted as gone
            before_rows["history"] = [
                (*row[:-6], int(row[0] == 1), *row[-5:]) for row in before_rows["history"]
            ]
        assert {key: now[key] for key in ("devices", "history", "updates")} == {
            key: before_rows[key] for key in ("devices", "history", "updates")
        }, what
        assert (load_file(state / MODEL)["w"] == model).all(), what
        # Nothing that may have been a newer model is gone.
        if copy == "flipped":
            assert before[MODEL] in everything(state).values(), what
    assert sum(counts.values()) == len(harms(database))
    if database in ("missing", "empty"):
        assert counts["served"] == 0
    if database == "whole":
        assert counts["served"] == 30


def test_no_flipped_bit_of_the_database_is_read_as_content(
    killed: Path, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    good = killed / "late" / "state" / DATABASE
    expected = rows(good)
    path = tmp_path / DATABASE
    noticed = 0
    for _ in range(200):
        shutil.copy(good, path)
        flip(path, draw)
        try:
            check_database(path)
        except EdgeTailorError:
            noticed += 1
        else:
            assert rows(path) == expected
    assert noticed > 50


@pytest.mark.parametrize("column", ["type", "name", "tbl_name", "sql"])
def test_no_flipped_bit_renames_a_table(killed: Path, tmp_path: Path, column: str) -> None:
    path = tmp_path / DATABASE
    shutil.copy(killed / "late" / "state" / DATABASE, path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    where = "WHERE type = 'table' AND name = 'rollbacks'"
    connection.execute(f"UPDATE sqlite_master SET {column} = replace({column}, 'b', 'B') {where}")
    connection.commit()
    connection.close()
    with refused("state.damaged", path=str(tmp_path)):
        check_database(path)


def test_a_database_of_an_earlier_time_is_refused(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "late", tmp_path / "c")
    config = configured(tmp_path / "c")
    kept = tmp_path / "old.sqlite3"
    shutil.copy(config.state / DATABASE, kept)
    with running(config) as server:  # a device leaves: its secret must stay void
        joined(server, killed / "devices" / "2").leave()
    shutil.copy(kept, config.state / DATABASE)
    before = everything(config.state)
    with refused("state.older-database", path=str(config.state), round=1, expected_round=1):
        begun(config)
    assert everything(config.state) == before


def test_a_database_of_an_earlier_round_never_replaces_a_later_model(
    killed: Path, tmp_path: Path
) -> None:
    """Even without the marker, which would refuse it."""
    shutil.copytree(killed / "late", tmp_path / "c")
    config = configured(tmp_path / "c")
    first = tmp_path / "first"
    shutil.copytree(config.state, first)
    with running(config) as server:
        for number in (1, 2):
            state = killed / "devices" / str(number)
            link = joined(server, state)
            send_trained(link, 2, tmp_path / str(number))
        task(link)
    later = (config.state / MODEL).read_bytes()
    shutil.copy(first / DATABASE, config.state / DATABASE)
    with refused("state.older-database", round=1, expected_round=2):
        begun(config)
    (config.state / MARKER).unlink()
    begun(config)
    assert (config.state / MODEL).read_bytes() == (first / MODEL).read_bytes()
    assert later in everything(config.state).values()


def test_a_database_of_another_federation_is_refused(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "late", tmp_path / "c")
    config = configured(tmp_path / "c")
    with running(configured(tmp_path / "other")) as other:
        join(other.url, token(other.config, "board"), "desk", tmp_path / "desk")
    shutil.copy(tmp_path / "other" / "state" / DATABASE, config.state / DATABASE)
    before = everything(config.state)
    with refused("state.other-database", path=str(config.state)):
        begun(config)
    assert everything(config.state) == before


def test_a_refusal_names_the_newest_model_that_is_left(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "late", tmp_path / "c")
    config = configured(tmp_path / "c")
    (config.state / DATABASE).unlink()
    model = config.state / "files" / hashlib.sha256((config.state / MODEL).read_bytes()).hexdigest()
    with refused("state.no-database", f"a copy of {model},"):
        begun(config)
    model.unlink()
    with refused("state.no-database", f"a copy of {config.state / MODEL},"):
        begun(config)
    (config.state / MODEL).unlink()
    for path in (config.state / "files").iterdir():  # the models of earlier rounds among them
        path.unlink()
    with refused("state.no-database", "No model is left in the folder."):
        begun(config)


def test_a_transaction_that_was_cut_off_without_its_journal(killed: Path, tmp_path: Path) -> None:
    """Half of the pages are written; the journal that would undo them is lost."""
    good = killed / "late" / "state" / DATABASE
    path = tmp_path / DATABASE
    shutil.copy(killed / "earlier" / "state" / DATABASE, path)
    old, new = path.read_bytes(), good.read_bytes()
    size = 4096
    changed = [at for at in range(0, len(new), size) if old[at : at + size] != new[at : at + size]]
    assert len(changed) > 2
    for count in range(1, len(changed)):
        half = bytearray(old.ljust(len(new), b"\0"))
        for at in changed[:count]:
            half[at : at + size] = new[at : at + size]
        path.write_bytes(half)
        try:
            check_database(path)
        except EdgeTailorError:
            continue
        assert rows(path) in (rows(good), rows(killed / "earlier" / "state" / DATABASE))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_full_disk_at_the_end_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """The rounds wait for room; a stop meanwhile says what to do."""
    config, tried, ended = configured(tmp_path), threading.Semaphore(0), threading.Event()
    server = Server(config, VectorModel(), Path("fleet.toml"))
    monkeypatch.setattr(full_disk, "ROOM_S", 0.01)
    put = Blobs.put

    def full(blobs: Blobs, data: bytes) -> FileEntry:
        tried.release()
        raise OSError(errno.ENOSPC, "No space left on device", str(blobs.folder / "1"))

    monkeypatch.setattr(Blobs, "put", full)
    held_out = read_samples(config.held_out, config.input_shape)
    worker = RoundWorker(server.coordinator, VectorModel(), held_out, ended.set)
    told: list[str] = []
    with messages_to(told.append):
        worker.start()
        for _ in range(3):
            assert tried.acquire(timeout=10)
        if stopped:
            worker.stop()
            assert ended.is_set()
            assert worker.failure is not None
            with refused("storage.disk-full", path=str(config.state)):
                raise worker.failure
        else:
            monkeypatch.setattr(Blobs, "put", put)
            while not (config.state / MODEL).exists():
                assert not ended.wait(0.01)
            worker.stop()
            assert [result.round for result in server.coordinator.store.history.results()] == [0]
    server.close()
    assert [line for line in told if "is full" in line] == [
        f"The disk with {config.state} is full: the rounds wait until there is room. No update is "
        "lost."
    ]
