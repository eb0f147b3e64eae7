"""A coordinator whose state folder was damaged: what can be had again is, the rest is refused."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from bundles import everything
from refusals import refused
from toolkit.coordinator.database.schema import SCHEMA_VERSION
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.server import Server
from vector_fleet import (
    VectorModel,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    send_all,
    send_trained,
    task,
    trained,
)

Damage = Callable[[bytes], bytes]
DATABASE = "state.sqlite3"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation that was stopped in round 2, which has the update of one device."""
    folder = tmp_path_factory.mktemp("stopped")
    with running(configured(folder)) as server:
        links = enrol(server, folder)
        send_all(links, 1, folder)
        send_trained(links["desktop-1"], 2, folder / "two")
    return folder


@pytest.fixture
def config(stopped: Path, tmp_path: Path) -> CoordinatorConfig:
    """Of a copy of that."""
    shutil.copytree(stopped, tmp_path / "c")
    return configured(tmp_path / "c")


def noise(data: bytes) -> bytes:
    return random.Random(0).randbytes(len(data))


def named(config: CoordinatorConfig, query: str) -> list[Path]:
    """The files whose hashes `query` gives."""
    with sqlite3.connect(config.state / DATABASE) as database:
        files = [config.state / "files" / row[0] for row in database.execute(query)]
    database.close()
    return files


@pytest.mark.parametrize(
    ("name", "damage", "code"),
    [
        (DATABASE, None, "state.no-database"),
        (DATABASE, lambda data: b"", "state.no-database"),
        (DATABASE, lambda data: data[: len(data) // 2], "state.damaged"),
        (DATABASE, noise, "state.damaged"),
        (DATABASE, lambda data: data[:6000] + noise(data)[6000:], "state.damaged"),
        ("tokens/board.token", lambda data: b"", "state.damaged-token"),
        ("tokens/board.token", lambda data: b"\xff\xfe", "state.damaged-token"),
        ("operator.token", lambda data: b"two words", "state.damaged-token"),
    ],
)
def test_what_is_refused_is_not_touched(
    config: CoordinatorConfig, name: str, damage: Damage | None, code: str
) -> None:
    path = config.state / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    before = everything(config.state)
    named = path if code == "state.damaged-token" else config.state
    with refused(code, path=str(named)) as error:
        Server(config, VectorModel(), Path("fleet.toml"))
    assert "\n" not in str(error.value)
    assert str(named) in str(error.value)
    assert everything(config.state) == before


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
def test_a_state_folder_of_another_version(config: CoordinatorConfig, version: int) -> None:
    with sqlite3.connect(config.state / DATABASE) as database:
        database.execute(f"PRAGMA user_version={version}")
    database.close()
    before = everything(config.state)
    with refused("state.other-version", version=version, supported=SCHEMA_VERSION):
        Server(config, VectorModel(), Path("fleet.toml"))
    assert everything(config.state) == before


def test_a_state_folder_that_is_a_file(tmp_path: Path) -> None:
    config = configured(tmp_path)
    config.state.write_text("mine")
    with refused("state.not-a-folder", path=str(config.state)):
        Server(config, VectorModel(), Path("fleet.toml"))


@pytest.mark.parametrize("damage", [noise, lambda data: data[:9], lambda data: b""])
def test_a_damaged_update_is_asked_for_again(
    config: CoordinatorConfig, tmp_path: Path, damage: Damage
) -> None:
    (path,) = named(config, "SELECT sha256 FROM updates WHERE round = 2")
    path.write_bytes(damage(path.read_bytes()))
    said: list[str] = []
    with running(config, VectorModel(), said.append) as server:
        assert_soon(lambda: len(said) == 2)
        assert said[1] == "The update of desktop-1 is damaged: the device sends it again."
        links = [joined(server, config.state.parent / str(n)) for n in range(3)]
        for number, link in enumerate(links):
            send_trained(link, 2, tmp_path / str(number))
        assert task(links[0]).round == 3
        assert server.coordinator.status().history[-1].updates == 3


def test_damaged_bundles_are_made_again(config: CoordinatorConfig, tmp_path: Path) -> None:
    for path in named(config, "SELECT sha256 FROM bundles WHERE name = 'train.onnx'"):
        path.write_bytes(b"?")
    with running(config) as server:
        links = [joined(server, config.state.parent / str(n)) for n in (1, 2)]
        for number, link in enumerate(links):
            work, _, update = trained(link, tmp_path / str(number))  # checks what it downloads
            send(link, work.round, update)
        assert task(links[0]).round == 3
        assert server.coordinator.status().history[-1].updates == 3


def test_a_damaged_global_model_comes_from_its_copy_or_is_refused(
    config: CoordinatorConfig, tmp_path: Path
) -> None:
    (path,) = named(config, "SELECT model FROM history ORDER BY round DESC LIMIT 1")
    path.write_bytes(b"?")
    copy = config.state / "global.safetensors"
    copy.rename(tmp_path / "copy")
    with refused("state.damaged-model", path=str(path), round=1):
        Server(config, VectorModel(), Path("fleet.toml"))
    shutil.copy(tmp_path / "copy", copy)
    said: list[str] = []
    with running(config, VectorModel(), said.append):
        assert_soon(lambda: said == ["Continuing with round 2 of 3."])
