"""Changes a federation's releases: adds one, offers it to all devices, or withdraws it.

Each function may run while `serve` runs on the folder. Each change is one atomic write.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from device_agent.formats.atomic_files import fingerprint_file
from profiles.errors import InputError
from toolkit.coordinator.database.release_reports import stored_reports
from toolkit.coordinator.storage.new_folder import new_folder
from toolkit.coordinator.storage.release_folder import (
    TRAINING,
    Files,
    Release,
    ReleaseFolder,
    newest_of,
)
from toolkit.coordinator.storage.saved_rounds import reading

Write = Callable[[Path], None]
"""Writes a bundle for each kind to a folder, into a subfolder with the kind's name."""


def add_release(
    state: Path,
    round_: int,
    kinds: Sequence[str],
    write: Write,
    share: float | None = None,
    then_all: bool = False,
    precision: str = "float32",
    fine_tune: int = 0,
) -> Release:
    """Make a new release for the devices of `kinds`.

    Args:
        state: The federation's state folder.
        round_: The round whose model the release has.
        kinds: The kinds of devices that get the release.
        write: Writes the bundles.
        share: The share of the devices of each kind that get the release, rounded up; None for all.
        then_all: Whether the coordinator offers the release to all devices after this share has
            taken it.
        precision: The precision of the weights.
        fine_tune: How many steps devices may train the release; if above 0, `write` also writes the
            training bundles.

    Raises:
        InputError: The newest release is still offered to a share of the devices only, or no device
            can be in the share.
    """
    check_new(state, kinds, share)
    folder = ReleaseFolder(state)
    with folder.locked():
        releases = folder.read()
        _check_not_staged(releases)
        number = _next_number(state, releases)
        devices = None if share is None else share_of(members(state, kinds), share, number)
        with new_folder(folder.path / str(number), "") as temporary:
            write(temporary)
            files = {kind: _files(temporary / kind) for kind in kinds}
            folders = {kind: temporary / f"{kind}{TRAINING}" for kind in kinds}
            training = {kind: _files(path) for kind, path in folders.items() if path.exists()}
        now = _next_time(releases)
        release = Release(
            number=number,
            round=round_,
            created=now,
            changed=now,
            kinds=files,
            devices=devices,
            then_all=then_all,
            precision=precision,
            fine_tune=fine_tune,
            training=training,
        )
        folder.write([*releases, release])
    return release


def release_to_all(state: Path) -> Release:
    """Offer the newest release to all devices of its kinds. Raises InputError if there is none."""
    return _change_newest(state, devices=None, then_all=False)


def finish_rollout(state: Path, number: int) -> bool:
    """Offer release `number` to all devices, if it is still the newest.

    Returns whether it was the newest.

    Raises BlockingIOError if another process changes releases now.
    """
    folder = ReleaseFolder(state)
    with folder.locked(wait=False):
        newest = newest_of(folder.read())
        if newest is None or newest.number != number:
            return False
        _replace_newest(folder, devices=None, then_all=False)
    return True


def withdraw_newest(state: Path) -> Release:
    """Let devices go back to the release before the newest. Raises InputError if there is none."""
    return _change_newest(state, withdrawn=True, then_all=False)


def _change_newest(state: Path, **changes: object) -> Release:
    folder = ReleaseFolder(state)
    if folder.stamp() is None:
        raise _no_release(state)
    with folder.locked():
        if newest_of(folder.read()) is None:
            raise InputError(
                "{state}: every release is withdrawn, or its bundles are not kept any more. Make "
                "a new one: `edgetailor release FEDERATION ROUND`.",
                code="release.none-left",
                state=str(state),
            )
        return _replace_newest(folder, **changes)


def _no_release(state: Path) -> InputError:
    return InputError(
        "{state}: there is no release. Make one: `edgetailor release FEDERATION ROUND`.",
        code="release.none",
        state=str(state),
    )


def _replace_newest(folder: ReleaseFolder, **changes: object) -> Release:
    """Change the newest release in the locked `folder`."""
    releases = folder.read()
    newest = newest_of(releases)
    assert newest is not None
    changed = msgspec.structs.replace(newest, changed=_next_time(releases), **changes)
    folder.write([changed if release is newest else release for release in releases])
    return changed


def members(state: Path, kinds: Iterable[str]) -> dict[str, list[str]]:
    """The devices of each of `kinds` that are members."""
    with reading(state) as db:
        rows = db.execute("SELECT kind, id FROM devices WHERE NOT has_left").fetchall()
    return {kind: [device for known, device in rows if known == kind] for kind in kinds}


def share_of(devices: Mapping[str, Sequence[str]], share: float, number: int) -> tuple[str, ...]:
    """The devices in the `share` of release `number`, at least one of each kind with devices.

    Each release draws its own devices. Repeated draws for one release give the same devices.
    """

    def drawn(device: str) -> bytes:
        return hashlib.sha256(f"{number} {device}".encode()).digest()

    chosen = [
        device
        for of_kind in devices.values()
        for device in sorted(of_kind, key=drawn)[: math.ceil(round(share * len(of_kind), 6))]
    ]
    if not chosen:
        raise InputError(
            "No device of the kinds {kinds} is a member, so no share of them can get the release. "
            "Leave out --share.",
            code="release.no-devices",
            kinds=", ".join(devices),
        )
    return tuple(chosen)


def check_new(state: Path, kinds: Iterable[str], share: float | None) -> None:
    """Raise InputError if `add_release` would refuse a new release. Changes nothing."""
    _check_not_staged(ReleaseFolder(state).read())
    if share is not None:
        share_of(members(state, kinds), share, 0)


def _check_not_staged(releases: Sequence[Release]) -> None:
    newest = newest_of(releases)
    if newest is not None and newest.devices is not None:
        raise InputError(
            "Release {number} is offered to only a share of the devices. First offer it to all "
            "(--all) or withdraw it (--back).",
            code="release.still-staged",
            number=newest.number,
        )


def _next_time(releases: Sequence[Release]) -> int:
    """The time of a change, later than all earlier changes: devices refuse older offers."""
    return max([int(time.time()), *(release.changed + 1 for release in releases)])


def _next_number(state: Path, releases: Sequence[Release]) -> int:
    """A number above all earlier numbers: devices ignore lower numbers.

    If releases.json was lost, the reports of the devices have the earlier numbers.
    """
    with reading(state) as db:
        reported = [report.number for report in stored_reports(db).values()]
    return max([0, *reported, *(release.number for release in releases)]) + 1


def _files(bundle: Path) -> Files:
    return {path.name: fingerprint_file(path) for path in sorted(bundle.iterdir())}
