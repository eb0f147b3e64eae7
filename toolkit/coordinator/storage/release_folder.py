"""The releases of a federation, in the folder `releases` of its state folder.

releases.json      all releases, one record each
NUMBER/KIND/       the inference bundle for the devices of a kind
NUMBER/KIND+training/  the bundle with which they may fine-tune it

`edgetailor release` writes this folder, and the running coordinator reads it. A new release is
first written as a folder. It exists from the moment when releases.json names it. So every change is
one atomic write.
"""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Count, FileEntry, Struct, encode
from profiles.errors import InputError
from profiles.json_decoding import MalformedError, decode_json

RELEASES = "releases"
INDEX = "releases.json"
TRAINING = "+training"
"""The end of the names of folders with bundles for fine-tuning. No kind has a + in its name."""
KEPT = 2
"""How many releases of a kind keep their bundles: the newest, and the one to go back to."""

MOST_RELEASES = 100
"""The most listed releases: in an endless federation, the list must not grow forever."""

Files = dict[str, FileEntry]


class Release(Struct, frozen=True, kw_only=True):
    """One release.

    Attributes:
        number: Its number, from 1.
        round: The round whose model it has.
        created: When it was made, in seconds since 1970.
        changed: When it was last changed.
        kinds: The files of the bundle of each kind.
        devices: The devices that get the release; None if all devices of its kinds get it.
        then_all: Whether all devices get the release after all of `devices` have taken it.
        withdrawn: Whether devices go back to the previous release.
        removed: The kinds whose bundle was removed, because later releases need the room.
        precision: The precision of the weights.
        fine_tune: The most steps that devices may train the release on their own samples; 0 means
            no training.
        training: The files of the bundle for fine-tuning, by kind.
    """

    number: Count
    round: Count
    created: Count
    changed: Count
    kinds: dict[str, Files]
    devices: tuple[str, ...] | None = None
    then_all: bool = False
    withdrawn: bool = False
    removed: tuple[str, ...] = ()
    precision: str = "float32"
    fine_tune: Count = 0
    training: dict[str, Files] = field(default_factory=dict)

    @property
    def offered_kinds(self) -> list[str]:
        """The kinds whose devices can get the release; none if it was withdrawn."""
        return [k for k in self.kinds if not self.withdrawn and k not in self.removed]

    def is_for(self, device: str, kind: str) -> bool:
        """Whether the device called `device`, of this kind, can get the release."""
        return kind in self.offered_kinds and (self.devices is None or device in self.devices)


def newest_of(releases: Iterable[Release]) -> Release | None:
    """The newest release that devices can get."""
    return max((r for r in releases if r.offered_kinds), key=lambda r: r.number, default=None)


def offered_to(releases: Iterable[Release], device: str, kind: str) -> int:
    """The number of the newest release for a device; 0 if there is none."""
    return max((r.number for r in releases if r.is_for(device, kind)), default=0)


class _Index(Struct, frozen=True, kw_only=True):
    version: int = 1
    releases: tuple[Release, ...] = ()


class ReleaseFolder:
    """The releases of the federation in the state folder `state`."""

    def __init__(self, state: Path) -> None:
        self.path = state / RELEASES
        self.index = self.path / INDEX

    def stamp(self) -> tuple[int, int] | None:
        """A value that differs after every change; None if there is no release."""
        try:
            about = self.index.stat()
        except FileNotFoundError:
            return None
        return about.st_mtime_ns, about.st_ino

    def read(self) -> tuple[Release, ...]:
        """All releases, the oldest first. Raises InputError if releases.json is damaged."""
        try:
            return decode_json(self.index.read_bytes(), _Index).releases
        except FileNotFoundError:
            return ()
        except MalformedError as error:
            raise InputError(
                "{path} is damaged ({reason}). Restore it from a backup. Without this file the "
                "coordinator offers no releases; devices keep those that they have.",
                code="state.damaged-releases",
                path=str(self.index),
                reason=str(error),
            ) from None

    @contextmanager
    def locked(self, wait: bool = True) -> Iterator[None]:
        """Let no other process change releases in the block.

        If another process changes them, wait until it ends; without `wait`, raise BlockingIOError.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(handle)

    def write(self, releases: Sequence[Release]) -> None:
        """Write the newest releases, at most MOST_RELEASES. Remove bundles that no device can get.

        Call it when locked.
        """
        kept = bundles_kept(releases)
        releases = [
            replace(r, removed=tuple(k for k in r.kinds if (r.number, k) not in kept))
            for r in releases[-MOST_RELEASES:]
        ]
        write_file(self.index, encode(_Index(releases=tuple(releases))), mode=0o600)
        self._remove_others(kept)

    def bundle(self, number: int, kind: str) -> Path:
        """The folder of the bundle of release `number` for a kind."""
        return self.path / str(number) / kind

    def training(self, number: int, kind: str) -> Path:
        """The folder of the bundle for the fine-tuning of release `number`, if there is one."""
        return self.path / str(number) / f"{kind}{TRAINING}"

    def _remove_others(self, named: Collection[tuple[int, str]]) -> None:
        kept = {self.bundle(number, kind) for number, kind in named}
        kept |= {self.training(number, kind) for number, kind in named}
        # The releases are written already, so what cannot be removed, like a stray file, stays.
        numbered = (path for path in self.path.iterdir() if path.name.isdigit() and path.is_dir())
        for folder in numbered:
            for bundle in folder.iterdir():
                if bundle not in kept:
                    shutil.rmtree(bundle, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()


def bundles_kept(releases: Sequence[Release]) -> set[tuple[int, str]]:
    """The bundles that are kept, as number and kind: the last KEPT of each kind."""
    kept = set()
    for kind in {kind for release in releases for kind in release.kinds}:
        numbers = [r.number for r in releases if kind in r.offered_kinds]
        kept |= {(number, kind) for number in numbers[-KEPT:]}
    return kept
