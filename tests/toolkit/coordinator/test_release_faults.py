"""Releases survive damaged or lost files, kills, full disks and stray files, and are backed up."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from device_agent.federation.membership import join
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.releases import ReleaseOffer, ReleaseReport
from killing import Job, die_at
from parameters import some_long
from refusals import refused
from toolkit.coordinator.releases.offered_releases import OfferedReleases
from toolkit.coordinator.releases.release_changes import (
    add_release,
    release_to_all,
    withdraw_newest,
)
from toolkit.coordinator.releases.release_schedule import release_to_all_if_taken
from toolkit.coordinator.storage import release_folder
from toolkit.coordinator.storage.backup import backup, restore
from toolkit.coordinator.storage.release_folder import ReleaseFolder
from vector_fleet import (
    assert_soon,
    configured,
    full_token,
    joined,
    running,
)
from vector_releases import (
    DESKTOPS,
    content,
    release,
    report,
    writing,
)


def test_a_damaged_bundle_is_not_offered(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS)
    said: list[str] = []
    with running(config, say=said.append) as server:
        join(server.url, full_token(config, "desktop"), "one", tmp_path / "one")
        link = joined(server, tmp_path / "one")
        release(config, "release 1")
        assert_soon(lambda: link.work().release is not None)
        (config.state / "releases" / "1" / "desktop" / "predict.onnx").write_bytes(b"damaged")
        release_to_all(config.state)
        assert_soon(lambda: link.work().release is None)
        (config.state / "releases" / "releases.json").write_bytes(b"{")
        assert_soon(lambda: "releases.json is damaged" in said[-1])
    assert sum("missing or damaged" in line for line in said) == 1
    with refused("state.damaged-releases"), running(config):
        pass


def test_a_backup_holds_the_releases(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS)

    def write(folder: Path) -> None:
        writing("release 2")(folder)
        shutil.copytree(folder / "desktop", folder / "desktop+training")

    with running(config):
        release(config, "release 1")
        add_release(config.state, 1, ["desktop"], write, fine_tune=5)
        backup(config.state, tmp_path / "copy")
    shutil.rmtree(config.state)
    restore(tmp_path / "copy", config.state)
    folder = ReleaseFolder(config.state)
    assert [r.number for r in folder.read()] == [1, 2]
    for number in (1, 2):
        path = folder.bundle(number, "desktop")
        assert {p.name: p.read_bytes() for p in path.iterdir()} == content(f"release {number}")
    training = folder.training(2, "desktop")
    assert {p.name: p.read_bytes() for p in training.iterdir()} == content("release 2")
    (training / "predict.onnx").unlink()
    with refused("backup.damaged-release", number=2):
        backup(config.state, tmp_path / "another")
    shutil.copytree(path, training, dirs_exist_ok=True)
    (path / "predict.onnx").unlink()
    with refused("backup.damaged-release", number=2):
        backup(config.state, tmp_path / "another")


def change(state: Path, write: Callable[[Path], None], job: Job | None) -> int:
    """Make a second release, offer it to all and withdraw it, in a process that `job` kills."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if job is not None:
                die_at(job)
            if len(ReleaseFolder(state).read()) == 1:
                add_release(state, 2, ["desktop"], write, share=0.5)
            release_to_all(state)
            withdraw_newest(state)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# A kill behind a write is one before the next but for what is not flushed between them.
@pytest.mark.parametrize("before", some_long([True, False], False))
def test_killed_at_every_write_of_a_release(tmp_path: Path, before: bool) -> None:
    config = configured(tmp_path / "c", DESKTOPS)
    with running(config) as server:
        join(server.url, full_token(config, "desktop"), "one", tmp_path / "one")
    release(config, "release 1")
    write, code = 0, -signal.SIGKILL
    states = {(1, False, False), (2, True, False), (2, False, False), (2, False, True)}
    while code == -signal.SIGKILL:
        write += 1
        state = tmp_path / str(write)
        shutil.copytree(config.state, state)
        job = Job("", "", "", stop=write, before=before)
        code = change(state, writing("release 2"), job)
        assert code in (0, -signal.SIGKILL)
        folder = ReleaseFolder(state)
        releases = folder.read()
        newest = releases[-1]
        assert (newest.number, newest.devices is not None, newest.withdrawn) in states
        for release_ in releases:
            if not release_.withdrawn:
                for name, entry in release_.kinds["desktop"].items():
                    path = folder.bundle(release_.number, "desktop") / name
                    assert fingerprint_file(path) == entry
        assert change(state, writing("release 2"), None) == 0
    assert write > 10


def cannot_read(index: Path) -> None:
    index.unlink()
    index.mkdir()  # what permissions also do, but not to root


@pytest.mark.parametrize("fault", [lambda index: index.write_text("{"), cannot_read])
def test_rounds_go_on_while_the_releases_cannot_be_read(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    config, messages = configured(tmp_path / "c", DESKTOPS), list[str]()
    with running(config, say=messages.append) as server:
        coordinator, folder = server.coordinator, ReleaseFolder(config.state)
        device = join(server.url, full_token(config, "desktop"), "a", tmp_path / "a").device
        release(config, "release 1", share=0.5, then_all=True)
        whole = folder.index.read_bytes()
        assert_soon(lambda: coordinator.released.newest is not None)
        fault(folder.index)
        body = msgspec.convert(report(), ReleaseReport)
        coordinator.store.release_reports.note(device, body)
        for _ in range(3):
            coordinator.changed.set()
            coordinator.released.refresh(coordinator.key)
            release_to_all_if_taken(coordinator.store, coordinator.released)
        assert sum("Releases stay as they are" in message for message in messages) == 1
        assert server.round_worker._thread.is_alive()
        if folder.index.is_dir():
            folder.index.rmdir()
        folder.index.write_bytes(whole)
        assert_soon(lambda: folder.read()[0].devices is None)


def test_a_full_disk_does_not_end_the_rounds_when_a_release_goes_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path / "c", DESKTOPS)
    with running(config) as server:
        device = join(server.url, full_token(config, "desktop"), "a", tmp_path / "a").device
        release(config, "release 1", share=0.5, then_all=True)
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(release_folder, "write_file", Mock(side_effect=full))
            body = msgspec.convert(report(), ReleaseReport)
            server.coordinator.store.release_reports.note(device, body)
            assert_soon(lambda: release_folder.write_file.called)
        assert_soon(lambda: ReleaseFolder(config.state).read()[0].devices is None)


def test_a_number_is_never_used_twice(tmp_path: Path) -> None:
    """Devices ignore releases below the one they have, if they are not told to go back."""
    config = configured(tmp_path / "c", DESKTOPS)
    with running(config) as server:
        device = join(server.url, full_token(config, "desktop"), "a", tmp_path / "a").device
        for _ in range(3):
            release(config, "release 1")
        taken = msgspec.convert(report(number=3, runs=3), ReleaseReport)
        server.coordinator.store.release_reports.note(device, taken)
        shutil.rmtree(config.state / "releases")
        assert release(config, "release 4") == 4


def test_nobody_goes_back_because_the_coordinator_lost_the_files(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS)
    with running(config) as server:
        join(server.url, full_token(config, "desktop"), "a", tmp_path / "a")
        link, coordinator = joined(server, tmp_path / "a"), server.coordinator
        release(config, "release 1")
        release(config, "release 2")
        withdraw_newest(config.state)
        release(config, "release 3")

        def lose(number: int) -> ReleaseOffer | None:
            (config.state / "releases" / str(number) / "desktop" / MANIFEST).unlink()
            coordinator.released = OfferedReleases(
                ReleaseFolder(config.state), config.evaluation.request
            )
            coordinator.released.refresh(coordinator.key)
            return link.work().release

        offers = [lose(3), lose(1)]
        assert [(o.number, o.back) for o in offers if o is not None] == [(1, False), (0, False)]
        withdraw_newest(config.state)
        coordinator.released.refresh(coordinator.key)
        offer = link.work().release
        assert offer is not None
        assert (offer.number, offer.back) == (0, True)


def test_a_stray_file_does_not_make_a_release_fail(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS)
    with running(config):
        folder = ReleaseFolder(config.state).path
        folder.mkdir(exist_ok=True)
        (folder / "7").write_text("stray")
        assert release(config, "release 1") == 1
        (folder / "1" / "stray").write_text("stray")
        assert release(config, "release 2") == 2
        assert [r.number for r in ReleaseFolder(config.state).read()] == [1, 2]
