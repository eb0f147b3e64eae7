"""Releases from the coordinator to devices: offered, fetched, switched to and withdrawn."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from commands import edgetailor
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.fleet_status import lines, own_lines
from device_agent.federation.membership import join
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.protocol.transfers import FileOffer
from refusals import refused
from toolkit.cli.release_command import about_share
from toolkit.coordinator.database.release_reports import ReleaseReports
from toolkit.coordinator.releases.release_changes import (
    add_release,
    release_to_all,
    withdraw_newest,
)
from toolkit.coordinator.releases.release_schedule import release_to_all_if_taken
from toolkit.coordinator.releases.release_status import release_status
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.backup import backup
from toolkit.coordinator.storage.release_folder import ReleaseFolder
from vector_fleet import (
    CONFIG,
    assert_soon,
    configured,
    enrol,
    full_token,
    joined,
    running,
)
from vector_releases import COUNTS, DESKTOPS, content, fleet, held, release, report, run

STAYING = DESKTOPS.replace("[training]", '[release]\nafter_rounds = "0.05s"\n\n[training]')


def all_hold(states: list[Path], text: str | None) -> Callable[[], bool]:
    return lambda: all(held(state) == text for state in states)


def test_a_release_reaches_devices_that_stay_and_is_withdrawn(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", STAYING)
    with running(config) as server, fleet(server, tmp_path, 4) as states:
        assert_soon(lambda: server.coordinator.rounds.phase == "finished")
        assert release(config, "release 1") == 1
        assert_soon(all_hold(states, "release 1"))
        assert release(config, "release 2", share=0.3) == 2
        assert_soon(lambda: [held(state) for state in states].count("release 2") == 2)
        release_to_all(config.state)
        assert_soon(all_hold(states, "release 2"))
        number = "release 2, the model after round 1"
        assert own_lines(states[0])[-1] == f"this device predicts with {number}"
        coordinator = server.coordinator
        assert_soon(lambda: [d.release for d in coordinator.status().devices] == [2] * 4)
        head, *rows = lines(coordinator.status())
        assert head.endswith(", release 2")
        assert all("finished, release 2" in row for row in rows)
        withdraw_newest(config.state)
        assert_soon(all_hold(states, "release 1"))
        withdraw_newest(config.state)
        assert_soon(all_hold(states, None))
        folders = [state / "releases" for state in states]
        assert_soon(lambda: not [path for folder in folders for path in folder.iterdir()])


def test_an_agent_that_ends_after_the_last_round_takes_a_release(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS.replace("count = 4", "count = 1"))
    with running(config) as server:
        join(server.url, full_token(config, "desktop"), "one", tmp_path / "one")
        assert run(tmp_path / "one", config.held_out) == 1
        release(config, "release 1")
        server.coordinator.released.refresh(server.coordinator.key)
        assert run(tmp_path / "one", config.held_out) == 0
    assert held(tmp_path / "one") == "release 1"


Member = tuple[Server, CoordinatorClient]


@contextmanager
def offered(folder: Path) -> Iterator[Member]:
    """A coordinator with a release, and a device that has joined."""
    config = configured(folder / "c", DESKTOPS)
    with running(config) as server:
        join(server.url, full_token(config, "desktop"), "one", folder / "one")
        release(config, "release 1")
        link = joined(server, folder / "one")
        assert_soon(lambda: link.work().release is not None)
        yield server, link


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    with offered(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """For refusals, which change nothing."""
    with offered(tmp_path_factory.mktemp("member")) as made:
        yield made


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (report(number=2), "release.not-offered"),
        (report(bundle="0" * 64), "release.not-offered"),
        (report(number=-1), "client.bad-request"),
        (report(number=10**18), "client.bad-request"),
        (report(runs=2), "release.contradicting-report"),
        (report(runs=-1), "client.bad-request"),
        (report(weights=1), "client.bad-request"),
        (report(before=COUNTS | {"correct": 11}), "update.unusable-evaluation"),
        (report(after=COUNTS | {"correct": -1}), "client.bad-request"),
        (report(after=COUNTS | {"samples": 10**12}), "update.unusable-evaluation"),
        (report(after=COUNTS | {"loss_sum": -1.0}), "update.unusable-evaluation"),
        (report(after=COUNTS | {"samples": 0}), "update.unusable-evaluation"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused(
    shared_member: Member, body: dict[str, Any], code: str
) -> None:
    server, link = shared_member
    with refused(code):
        link._order("POST", "/releases/1", json.dumps(body).encode())
    assert server.coordinator.store.release_reports.of("desktop-1") is None


def test_a_report_is_kept_over_a_restart_and_shown(member: Member) -> None:
    server, link = member
    given = report(taken=False, runs=0, code="x" * 500, reason=f"bad\n{'word ' * 500}")
    given["after"] = COUNTS | {"correct": 5, "classes": [[5, 0], [5, 5]]}
    link._order("POST", "/releases/1", json.dumps(given).encode())
    store = server.coordinator.store
    for reports in (store.release_reports, ReleaseReports(store._database)):
        kept = reports.of("desktop-1")
        assert kept is not None
        assert (len(kept.code), kept.taken) == (64, False)
        assert len(kept.reason) <= 500
        assert "\n" not in kept.reason
        assert kept.after is not None
        assert (kept.after.correct, kept.after.classes) == (5, None)
    (status,) = server.coordinator.status().devices
    assert (status.release, status.note) == (0, f"release 1 was not taken: {kept.reason}")
    (row,) = release_status(server.config.state)[1]
    assert (row.device, row.offered, row.answer, row.runs) == ("desktop-1", 1, "not taken", 0)
    link.leave()
    assert ReleaseReports(store._database).of("desktop-1") is None


@dataclass(frozen=True)
class EarlierWork:
    """What an agent of version 0.2 reads."""

    state: Literal["train", "wait", "finished"]
    round: int
    files: list[FileOffer] = field(default_factory=list)
    joined: int = 0
    expected: int = 0
    submodel: str = ""
    issued: int = 0
    signature: str = ""
    ask_again_s: float = 0


def test_an_earlier_agent_reads_the_work(member: Member) -> None:
    _, link = member
    work = link._ask("GET", "/work", EarlierWork)
    assert (work.state, work.round) == ("wait", 0)


def test_only_the_kinds_of_a_release_are_offered_it(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        links = enrol(server, tmp_path)
        release(config, "release 1")
        assert_soon(lambda: server.coordinator.released.newest is not None)
        device = server.coordinator.store.registry.device
        assert server.coordinator.released.offer(device("desktop-1")) is not None
        assert server.coordinator.released.offer(device("board-1")) is None
        sha256 = fingerprint(content("release 1")["predict.onnx"]).sha256
        with refused("round.no-such-file"):
            server.coordinator.file(device("board-1"), sha256)
        links["desktop-1"].download(
            FileOffer(name="x", size=9000, sha256=sha256), tmp_path / "fetched"
        )
        assert (tmp_path / "fetched").read_bytes() == content("release 1")["predict.onnx"]


def test_the_bundles_of_two_releases_stay(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS)
    with running(config):
        folder = ReleaseFolder(config.state)
        for number in (1, 2, 3):
            assert release(config, f"release {number}") == number
        assert sorted(path.name for path in folder.path.iterdir() if path.is_dir()) == ["2", "3"]
        withdraw_newest(config.state)
        assert release(config, "release 4") == 4
        assert sorted(path.name for path in folder.path.iterdir() if path.is_dir()) == ["2", "4"]
        assert [r.withdrawn for r in folder.read()] == [False, False, True, False]


def test_a_kind_with_one_device_is_named_when_its_share_is_all_of_it(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", CONFIG + '[[devices]]\nname = "none"\nsubmodel = "full"\n')
    with running(config) as server:
        enrol(server, tmp_path)

    def write(folder: Path) -> None:
        for kind in kinds:
            (folder / kind).mkdir()
            (folder / kind / "manifest.json").write_bytes(b"{}")

    kinds = ["desktop", "board", "none"]
    assert list(about_share(config.state, add_release(config.state, 1, kinds, write, 0.1))) == [
        "All devices of kind board (1) are in the share.",
        "No device of kind none is a member, so none is in the share.",
    ]
    assert list(about_share(config.state, release_to_all(config.state))) == []


def test_going_back_says_to_what(tmp_path: Path) -> None:
    config = configured(tmp_path, DESKTOPS)
    with running(config):
        pass
    for number in (1, 2, 3):
        release(config, f"release {number}", precision="int8" if number == 2 else "float32")

    def said(*arguments: str) -> str:
        done = edgetailor("release", "fleet.toml", *arguments, cwd=tmp_path)
        return done.stderr + done.stdout

    assert said("--back") == "Release 3 is withdrawn: devices return to release 2.\n"
    assert said("--back") == (
        "Release 2 is withdrawn: devices return to the newest model of a round. No earlier release "
        "is kept.\n"
    )
    backup(config.state, tmp_path / "backup")  # it needs no bundle that was removed
    for option in ("--back", "--all"):
        assert "every release is withdrawn, or its bundles" in said(option)
    rows = [line.split()[3:] for line in said().splitlines()[1:4]]
    assert rows == [
        ["float32", "all", "bundles", "removed"],
        ["int8", "all", "withdrawn"],
        ["float32", "all", "withdrawn"],
    ]
    with running(config) as server:
        join(server.url, full_token(config, "desktop"), "one", tmp_path / "one")
        link = joined(server, tmp_path / "one")
        assert_soon(lambda: link.work().release is not None)
        offer = link.work().release
        assert offer is not None
        assert (offer.number, offer.back) == (0, True)


def test_a_release_goes_to_all_once_its_whole_share_has_taken_it(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS)
    with running(config) as server:
        coordinator = server.coordinator
        links = {}
        for name in "abcd":
            device = join(server.url, full_token(config, "desktop"), name, tmp_path / name).device
            links[device] = joined(server, tmp_path / name)
        release(config, "release 1", share=0.75, then_all=True)
        (first,) = ReleaseFolder(config.state).read()
        assert first.devices is not None
        assert len(first.devices) == 3
        coordinator.released.refresh(coordinator.key)

        def answer(device: str, **changes: Any) -> bool:
            body = json.dumps(report(**changes)).encode()
            links[device]._order("POST", "/releases/1", body)
            release_to_all_if_taken(coordinator.store, coordinator.released)
            return ReleaseFolder(config.state).read()[0].devices is None

        one, two, three = first.devices
        assert not answer(one)
        assert not answer(two, taken=False, runs=0, code="release.worse", reason="worse")
        links[three].leave()
        release_to_all_if_taken(coordinator.store, coordinator.released)
        assert ReleaseFolder(config.state).read()[0].devices == first.devices
        answer(two)  # the worker may be the one that offers the release to all
        assert_soon(lambda: ReleaseFolder(config.state).read()[0].devices is None)
