"""The federation's secrets on disk: none is accepted cut, and none begins again unnoticed."""

import json
import shutil
from pathlib import Path

import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.device_state import DeviceState
from device_agent.federation.membership import join
from device_agent.formats.signed_work import check_key
from log_messages import logged
from profiles.errors import TrustError
from refusals import refused
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import CONFIG, VectorModel, configured, full_token, running

ONE = CONFIG[: CONFIG.rindex("[[devices]]")]
KEY, OPERATOR, TOKEN = "coordinator.key", "operator.token", "tokens/desktop.token"


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation that one device has joined, and the device's folder."""
    folder = tmp_path_factory.mktemp("used")
    config = configured(folder / "c", ONE)
    with running(config) as server:
        join(server.url, full_token(config, "desktop"), "desk", folder / "a")
    return folder


@pytest.fixture(params=["now", "before hashes were kept"])
def config(used: Path, tmp_path: Path, request: pytest.FixtureRequest) -> CoordinatorConfig:
    """A copy of it, also as an earlier version left it."""
    shutil.copytree(used, tmp_path, dirs_exist_ok=True)
    copied = configured(tmp_path / "c", ONE)
    if request.param != "now":
        store = Store(copied.state)
        with store._database.transaction() as db:
            db.execute("DELETE FROM meta WHERE key IN ('key', 'operator')")
        store.close()
    return copied


def start(config: CoordinatorConfig, new_key: bool = False) -> Server:
    return Server(config, VectorModel(), Path("fleet.toml"), new_key=new_key)


def content(config: CoordinatorConfig) -> dict[str, bytes]:
    places = (KEY, OPERATOR, TOKEN, "state.sqlite3", "federation.json")
    return {
        name: (config.state / name).read_bytes()
        for name in places
        if (config.state / name).exists()
    }


@pytest.mark.parametrize(
    ("name", "left", "code"),
    [
        (TOKEN, 0, "state.damaged-token"),
        (TOKEN, 1, "state.damaged-token"),
        (TOKEN, 42, "state.damaged-token"),
        (OPERATOR, 0, "state.damaged-token"),
        (OPERATOR, 1, "state.damaged-token"),
        (OPERATOR, 42, "state.damaged-token"),
        (KEY, 0, "state.damaged-coordinator-key"),
        (KEY, 60, "state.damaged-coordinator-key"),
        (KEY, None, "state.missing-coordinator-key"),
    ],
)
def test_what_is_cut_is_refused_by_its_name(
    config: CoordinatorConfig, name: str, left: int | None, code: str
) -> None:
    path = config.state / name
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    before = content(config)
    with refused(code, "backup", path=str(path)):
        start(config)
    assert content(config) == before


@pytest.mark.parametrize(
    ("name", "new_key"), [(KEY, False), (KEY, True), (OPERATOR, False), (TOKEN, False)]
)
def test_a_folder_in_place_of_a_secret_is_refused_by_its_name(
    config: CoordinatorConfig, name: str, new_key: bool
) -> None:
    path = config.state / name
    path.unlink()
    path.mkdir()
    with refused("state.unreadable", path=str(path), reason="Is a directory"):
        start(config, new_key)


def test_a_fingerprint_without_a_token_is_damage(config: CoordinatorConfig) -> None:
    path = config.state / TOKEN
    path.write_text(f".{path.read_text().partition('.')[2]}")
    before = content(config)
    with refused("state.damaged-token", path=str(path)):
        start(config)
    assert content(config) == before


@pytest.mark.parametrize("left", [43, 44, 60])
def test_a_cut_fingerprint_is_written_again(config: CoordinatorConfig, left: int) -> None:
    """The token is whole then, and the fingerprint is that of the key."""
    path = config.state / TOKEN
    before = path.read_text()
    path.write_text(before[:left])
    with logged("toolkit") as said:
        start(config).close()
    assert path.read_text() == before
    assert any(f"{path} did not end in the fingerprint" in line for line in said)


@pytest.mark.parametrize("name", [OPERATOR, TOKEN])
def test_a_removed_token_is_a_new_one_and_the_log_says_so(
    config: CoordinatorConfig, name: str
) -> None:
    path = config.state / name
    before = path.read_text()
    path.unlink()
    with logged("toolkit") as said:
        start(config).close()
    assert path.read_text() != before
    assert [line for line in said if "has a new token" in line and str(path) in line]
    path.write_text(before)  # from a backup: it is not the federation's any more
    with refused("state.damaged-token", path=str(path)):
        start(config)


def test_a_lost_key_is_replaced_only_on_demand(config: CoordinatorConfig, tmp_path: Path) -> None:
    with running(config) as server:
        old = server.coordinator.key.public
    (config.state / KEY).unlink()
    with running(config, new_key=True) as server:
        new = server.coordinator.key
        assert new.public != old
        given = full_token(config, "desktop")
        with pytest.raises(TrustError):
            check_key(old, given.rpartition(".")[2], server.url)
        check_key(new.public, given.rpartition(".")[2], server.url)
        device = tmp_path / "a" / "device.json"
        # In a test each start has a port of its own.
        device.write_text(json.dumps(json.loads(device.read_text()) | {"url": server.url}))
        # A token with another fingerprint changes nothing.
        kept = device.read_bytes()
        text = given.replace(new.fingerprint, "A" * len(new.fingerprint))
        with pytest.raises(TrustError):
            join(server.url, text, "desk", tmp_path / "a")
        assert device.read_bytes() == kept
        assert join(server.url, given, "desk", tmp_path / "a").device == "desktop-1"
        identity = DeviceState(tmp_path / "a").identity()
        assert identity is not None
        assert identity.key == new.public
        assert len(server.coordinator.status().devices) == 1
    with running(config) as server:
        assert server.coordinator.key.public == new.public
    with refused("state.whole-coordinator-key", path=str(config.state / KEY)):
        start(config, new_key=True)


def test_the_key_of_another_federation(config: CoordinatorConfig, tmp_path: Path) -> None:
    start(config).close()  # from here on the federation knows its key
    other = configured(tmp_path / "other", ONE)
    start(other).close()
    for name, code in ((KEY, "state.other-coordinator-key"), (TOKEN, "state.damaged-token")):
        kept = (config.state / name).read_bytes()
        (config.state / name).write_bytes((other.state / name).read_bytes())
        before = content(config)
        with refused(code, path=str(config.state / name)):
            start(config)
        assert content(config) == before
        (config.state / name).write_bytes(kept)
    start(config).close()


def test_a_new_federation_takes_the_tokens_that_its_operator_has_put_there(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    (config.state / "tokens").mkdir(parents=True)
    (config.state / TOKEN).write_text("chosen\n")
    (config.state / OPERATOR).write_text("mine\n")
    for _ in range(2):
        with running(config) as server:
            fingerprint = server.coordinator.key.fingerprint
            assert full_token(config, "desktop") == f"chosen.{fingerprint}"
            assert CoordinatorClient(server.url, "mine").status().devices == []


def test_a_device_without_its_key_is_told_that_it_is_a_new_one(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        first = join(server.url, full_token(config, "desktop"), "desk", tmp_path / "a")
        (tmp_path / "a" / "device.key").unlink()
        with logged("device_agent") as said:
            again = join(
                server.url, full_token(config, "desktop"), "desk", tmp_path / "a", replace=True
            )
    assert (first.device, again.device) == ("desktop-1", "desktop-2")
    assert [line for line in said if "device.key is missing: this machine joins as a new" in line]
