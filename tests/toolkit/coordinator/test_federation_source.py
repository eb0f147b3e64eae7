"""Commands take a federation's file or its state folder."""

import json
from pathlib import Path

import pytest

from commands import edgetailor, refused
from deployed_digits import FILE, federation
from refusals import refused as refuses
from toolkit.coordinator.federation_source import FILE as FILE_KEY
from toolkit.coordinator.federation_source import load_federation, state_folder
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import VectorModel, configured, running


def test_the_coordinator_notes_its_file(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config, VectorModel()):
        pass
    assert load_federation(config.state) == config
    (tmp_path / "fleet.toml").unlink()
    with refuses("state.unknown-file", path=str(config.state)):
        load_federation(config.state)
    store = Store(config.state)
    assert Path(store.value(FILE_KEY) or "").name == "fleet.toml"
    store.close()


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation that was moved: its file is beside another state folder."""
    made = federation(tmp_path_factory)
    edgetailor("backup", made / FILE, tmp_path / "copy", cwd=tmp_path)
    edgetailor("restore", "copy", "moved", cwd=tmp_path)
    store = Store(tmp_path / "moved")
    store.set_value(FILE_KEY, str(made / FILE))
    store.close()
    return made


def test_either_is_enough(folder: Path, tmp_path: Path) -> None:
    assert state_folder(folder / FILE) == folder / "state"
    assert state_folder(folder / "state") == folder / "state"
    moved = load_federation(tmp_path / "moved")
    assert moved.state == tmp_path / "moved"  # not the folder that the file names
    assert moved == load_federation(folder / FILE).model_copy(update={"state": moved.state})
    listed = [edgetailor("rounds", source, "--json", cwd=tmp_path).stdout
              for source in (folder / FILE, folder / "state", "moved")]  # fmt: skip
    assert listed[0] == listed[1]
    assert len(json.loads(listed[2])["rounds"]) == 3
    evaluated = [json.loads(edgetailor("evaluate", source, "--json", cwd=tmp_path).stdout)
                 for source in (folder / FILE, "moved")]  # fmt: skip
    assert evaluated[0] == evaluated[1]
    released = edgetailor("release", "moved", "--json", cwd=tmp_path)
    assert json.loads(released.stdout)["releases"] == []


def test_a_state_folder_without_its_file(folder: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "moved")
    store.set_value(FILE_KEY, str(tmp_path / "gone.toml"))
    store.close()
    said = refused(tmp_path, "evaluate", "moved")
    assert said.endswith("it is no longer at {}. Give that file instead of the folder.".format(
        tmp_path / "gone.toml"))  # fmt: skip
    assert "has no state.sqlite3" in refused(tmp_path, "evaluate", ".")
