"""The releases that a device has: a small file that points to them, and their bundles.

release.json       the current release, the one before, and what was refused
releases/HASH/     the bundle whose manifest has this SHA-256

A switch is one atomic write of release.json. Bundles are complete before it, and folders that it no
longer names are removed after it. So a device that is killed at any moment has a whole model.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from device_agent.client.transfers import PART
from device_agent.formats.atomic_files import fingerprint_file, write_file
from device_agent.formats.manifest import MANIFEST, Count, FileEntry, Struct, encode
from device_agent.formats.protocol.transfers import FileOffer
from profiles.json_decoding import MalformedError, decode_json

POINTER = "release.json"
RELEASES = "releases"
MOST_REFUSED = 20
"""How many refused releases are remembered."""


class InstalledRelease(Struct, frozen=True, kw_only=True):
    """A release on this device. `bundle` is the SHA-256 of its manifest."""

    number: Count
    round: Count
    bundle: str


class ReleasePointer(Struct, frozen=True, kw_only=True):
    """The content of release.json.

    Attributes:
        current: The release with which the device predicts; None if there is none.
        previous: The release before it.
        refused: The last releases that were not taken.
        issued: When the newest offer that was followed was signed, in seconds since 1970.
        unsent: The report that the coordinator does not have yet, as JSON; empty if it has all.
    """

    version: int = 1
    current: InstalledRelease | None = None
    previous: InstalledRelease | None = None
    refused: tuple[InstalledRelease, ...] = ()
    issued: Count = 0
    unsent: str = ""

    @property
    def runs(self) -> int:
        """The number of the current release; 0 if there is none."""
        return 0 if self.current is None else self.current.number


class DeviceReleases:
    """The releases in the state folder `state` of a device."""

    def __init__(self, state: Path) -> None:
        self.folder, self._pointer = state / RELEASES, state / POINTER

    def read(self) -> ReleasePointer:
        """What release.json says. If it is missing or damaged, there is no release."""
        try:
            return decode_json(self._pointer.read_bytes(), ReleasePointer)
        except (FileNotFoundError, NotADirectoryError, MalformedError):
            return ReleasePointer()

    def current(self) -> Path | None:
        """The folder of the current release's bundle; None if there is no release."""
        current = self.read().current
        return None if current is None else self.bundle(current.bundle)

    def bundle(self, sha256: str) -> Path:
        """The folder of the bundle whose manifest has this SHA-256."""
        return self.folder / sha256

    def write(self, pointer: ReleasePointer) -> None:
        """Write release.json, then remove the bundles that it does not name."""
        write_file(self._pointer, encode(pointer))
        self.remove_others(pointer)

    def remove_others(self, pointer: ReleasePointer, fetched: str = "") -> None:
        """Remove the bundles that `pointer` does not name, except the bundle `fetched`."""
        releases = (pointer.current, pointer.previous)
        named = {fetched} | {release.bundle for release in releases if release is not None}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name not in named:
                    shutil.rmtree(path)

    def missing(self, offers: Iterable[FileOffer]) -> list[FileOffer]:
        """Those of the offered files that this device does not have, or has damaged."""
        offers = list(offers)
        folder = self.bundle(manifest_of(offers))
        return [offer for offer in offers if not _has(folder / offer.name, offer)]

    def bytes_to_fetch(self, offers: Iterable[FileOffer]) -> int:
        """How many bytes of the offered files are not on the disk yet."""
        offers = list(offers)
        folder = self.bundle(manifest_of(offers))
        parts = {offer.name: folder / f"{PART}{offer.name}" for offer in offers}
        return sum(
            offer.size - (parts[offer.name].stat().st_size if parts[offer.name].exists() else 0)
            for offer in self.missing(offers)
        )

    def forget(self) -> None:
        """Remove all releases. The pointer goes first: it never names a bundle that is missing."""
        self._pointer.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def manifest_of(offers: Iterable[FileOffer]) -> str:
    """The hash of the manifest among the offered files; empty if there is none."""
    return next((offer.sha256 for offer in offers if offer.name == MANIFEST), "")


def _has(path: Path, offer: FileOffer) -> bool:
    expected = FileEntry(size=offer.size, sha256=offer.sha256)
    return path.exists() and fingerprint_file(path) == expected
