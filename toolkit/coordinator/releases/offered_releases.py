"""The signed offers of releases to the devices of each kind."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.transfers import FileOffer
from profiles.errors import InputError
from toolkit.coordinator.database.device_registry import Device
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.storage.recoverable import has_hash
from toolkit.coordinator.storage.release_folder import (
    Files,
    Release,
    ReleaseFolder,
    bundles_kept,
    newest_of,
)

logger = logging.getLogger(__name__)
FolderOf = Callable[[int, str], Path]
NONE = Release(number=0, round=0, created=0, changed=0, kinds={})
"""Stands for no release. Devices go back to this if the first release is withdrawn."""


@dataclass(frozen=True)
class _Offered:
    """The releases as last read, and the offers of each kind, the newest release first."""

    releases: tuple[Release, ...] = ()
    offers: dict[str, list[tuple[Release, ReleaseOffer]]] = field(default_factory=dict)


class OfferedReleases:
    """Offers the releases in `folder`. Offers are signed when the folder changes, not at each poll.

    `evaluation` says what devices should count when they try a release.
    `refresh` may be called in one thread while others ask for offers.
    """

    def __init__(self, folder: ReleaseFolder, evaluation: EvaluationRequest | None) -> None:
        self._folder, self.evaluation = folder, evaluation
        self._stamp: tuple[int, int] | None = None
        self._signer = ""
        self._present = _Offered()
        self._told = ""

    def refresh(self, key: CoordinatorKey) -> None:
        """If the releases or `key` have changed, read the releases and sign their offers.

        If the releases cannot be read, the earlier offers stay, and a warning is logged.
        """
        try:
            stamp = self._folder.stamp()
            if stamp == self._stamp and (stamp is None or key.public == self._signer):
                return
            releases = self._folder.read()
        except (InputError, OSError) as error:
            self.tell(error)
            return
        self._stamp, self._signer, self._told = stamp, key.public, ""
        self._present = _Offered(releases, self._offers(releases, key))

    def tell(self, error: Exception) -> None:
        """Log once that the releases cannot be read or changed. The rounds go on without them."""
        if str(error) != self._told:
            logger.warning("Releases stay as they are: %s", error)
        self._told = str(error)

    def _offers(
        self, releases: Sequence[Release], key: CoordinatorKey
    ) -> dict[str, list[tuple[Release, ReleaseOffer]]]:
        issued = max((release.changed for release in releases), default=0)
        offers: dict[str, list[tuple[Release, ReleaseOffer]]] = {}
        for kind in {kind for release in releases for kind in release.kinds}:
            of_kind = [release for release in releases if kind in release.kinds]
            withdrawn = [release.number for release in of_kind if release.withdrawn]
            kept = bundles_kept(releases)
            offered = [release for release in of_kind if (release.number, kind) in kept]
            usable = [release for release in offered if self._is_whole(release, kind)]
            # Devices must not go back from a release only because its files are missing here.
            lost = [release.number for release in offered if release not in usable]
            for release in [*reversed(usable), *([NONE] if withdrawn else [])]:
                offer = ReleaseOffer(
                    number=release.number,
                    round=release.round,
                    files=_file_offers(release.kinds.get(kind, {})),
                    back=max(withdrawn, default=0) > max(release.number, *lost, 0),
                    evaluation=self.evaluation,
                    issued=issued,
                    fine_tune=release.fine_tune if kind in release.training else 0,
                    training=_file_offers(release.training.get(kind, {})),
                )
                offers.setdefault(kind, []).append((release, key.releases(offer)))
        return offers

    def _is_whole(self, release: Release, kind: str) -> bool:
        folder, training = (f(release.number, kind) for f in _folders(self._folder))
        files = {folder / name: entry for name, entry in release.kinds[kind].items()}
        files |= {training / name: e for name, e in release.training.get(kind, {}).items()}
        for path, entry in files.items():
            if not has_hash(path, entry.sha256):
                logger.warning(
                    "%s is missing or damaged: release %d is not offered to devices of kind %s.",
                    path,
                    release.number,
                    kind,
                )
                return False
        return True

    def offer(self, device: Device) -> ReleaseOffer | None:
        """The offer to `device`: the newest release that it gets; None without releases."""
        for release, offer in self._present.offers.get(device.kind, ()):
            if release is NONE or release.is_for(device.id, device.kind):
                return offer
        return None

    def file(self, device: Device, sha256: str) -> tuple[Path, int] | None:
        """Path and size of a file in the release for the kind of `device`, or None."""
        for release, offer in self._present.offers.get(device.kind, ()):
            parts = zip(_folders(self._folder), (offer.files, offer.training), strict=True)
            for folder_of, files in parts:
                for file in files:
                    if file.sha256 == sha256:
                        return folder_of(release.number, device.kind) / file.name, file.size
        return None

    @property
    def newest(self) -> Release | None:
        """The newest release that devices can get."""
        return newest_of(self._present.releases)


def _folders(folder: ReleaseFolder) -> tuple[FolderOf, FolderOf]:
    """The folders of a release's bundle and of the bundle for its fine-tuning."""
    return folder.bundle, folder.training


def _file_offers(files: Files) -> list[FileOffer]:
    return [FileOffer(name=n, size=e.size, sha256=e.sha256) for n, e in files.items()]
