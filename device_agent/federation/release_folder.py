"""The releases that a device has: their bundles, and a small file that names the bundles.

release.json       the current release, the previous release, and the refused releases
releases/HASH/     the bundle whose manifest has this SHA-256

The device switches to another release by one atomic write of release.json. The bundles are complete
before the switch. After the switch, the agent removes the folders that release.json no longer
names. So a device has a complete model even if it is killed at any moment.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from device_agent.client.transfers import PART
from device_agent.federation.offered_files import is_whole, manifest_of
from device_agent.formats.atomic_files import fingerprint_file, write_file
from device_agent.formats.manifest import MANIFEST, Count, Struct, encode
from device_agent.formats.protocol.transfers import FileOffer
from profiles.json_decoding import MalformedError, decode_json

POINTER = "release.json"
RELEASES = "releases"
FINE_TUNING = "fine-tuning"
"""The folder of a fine-tuning that is not finished."""
ATTEMPTS = "release-attempts.json"
"""Counts how often the agent was killed while it tried or fine-tuned a release."""
MOST_REFUSED = 20
"""How many refused releases are remembered."""


class InstalledRelease(Struct, frozen=True, kw_only=True):
    """A release on this device.

    Attributes:
        number: The number of the release.
        round: The round whose model the release has.
        bundle: SHA-256 of the manifest of the release's bundle.
        fine_tuned: SHA-256 of the manifest of the fine-tuned bundle. Empty if the release without
            fine-tuning is better; None if the release was not fine-tuned yet.
    """

    number: Count
    round: Count
    bundle: str
    fine_tuned: str | None = None

    def is_release(self, other: "InstalledRelease | None") -> bool:
        """Whether both objects are the same release. Fine-tuning makes no difference."""
        mine = (self.number, self.round, self.bundle)
        return other is not None and mine == (other.number, other.round, other.bundle)


class ReleasePointer(Struct, frozen=True, kw_only=True):
    """The content of release.json.

    Attributes:
        current: The release with which the device predicts; None if there is none.
        previous: The release before the current release.
        refused: The last releases that this device refused.
        issued: The time at which the coordinator signed the newest offer that this device followed,
            in seconds since 1970.
        unsent: The report that was not sent to the coordinator yet, as JSON. Empty if there is no
            such report.
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
        self.scratch, self.attempts = state / FINE_TUNING, state / ATTEMPTS

    def read(self) -> ReleasePointer:
        """Read release.json. If the file cannot be read, the result has no release."""
        try:
            return decode_json(self._pointer.read_bytes(), ReleasePointer)
        except (OSError, MalformedError):
            return ReleasePointer()

    def current(self) -> Path | None:
        """The bundle folder of the current release, or of its fine-tuned form if this is better.

        Returns None if there is no release.
        """
        current = self.read().current
        if current is None:
            return None
        fine_tuned = self.bundle(current.fine_tuned or current.bundle)
        return fine_tuned if (fine_tuned / MANIFEST).exists() else self.bundle(current.bundle)

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
        named = {fetched}
        for release in releases:
            if release is not None:
                named |= {release.bundle, release.fine_tuned or release.bundle}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name not in named:  # what cannot be removed, like a stray file, stays
                    shutil.rmtree(path, ignore_errors=True)

    def adopt(self, bundle: Path) -> str:
        """Move a complete bundle here. Returns the SHA-256 of its manifest."""
        sha256 = fingerprint_file(bundle / MANIFEST).sha256
        shutil.rmtree(self.bundle(sha256), ignore_errors=True)
        os.replace(bundle, self.bundle(sha256))
        return sha256

    def missing(self, offers: Iterable[FileOffer]) -> list[FileOffer]:
        """The offered files that are missing or damaged on this device."""
        offers = list(offers)
        folder = self.bundle(manifest_of(offers))
        return [offer for offer in offers if not is_whole(folder / offer.name, offer)]

    def bytes_to_fetch(self, offers: Iterable[FileOffer]) -> int:
        """The number of bytes of the offered files that are not on the disk yet."""
        offers = list(offers)
        folder = self.bundle(manifest_of(offers))
        parts = {offer.name: folder / f"{PART}{offer.name}" for offer in offers}
        return sum(
            offer.size - (parts[offer.name].stat().st_size if parts[offer.name].exists() else 0)
            for offer in self.missing(offers)
        )

    def forget(self) -> None:
        """Remove release.json, then all bundles: release.json must never name a missing bundle."""
        self._pointer.unlink(missing_ok=True)
        self.attempts.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
