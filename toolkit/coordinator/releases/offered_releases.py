"""The signed offers of releases to the devices of each kind."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.transfers import FileOffer
from profiles.errors import InputError
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.storage.device_registry import Device
from toolkit.coordinator.storage.recoverable import has_hash
from toolkit.coordinator.storage.release_folder import (
    Release,
    ReleaseFolder,
    bundles_kept,
    newest_of,
)

logger = logging.getLogger(__name__)
NONE = Release(number=0, round=0, created=0, changed=0, kinds={})
"""What devices go back to from the first release."""


@dataclass(frozen=True)
class _Offered:
    """The releases of the present: each kind's offers, the newest release first."""

    releases: tuple[Release, ...] = ()
    offers: dict[str, list[tuple[Release, ReleaseOffer]]] = field(default_factory=dict)


class OfferedReleases:
    """Offers the releases in `folder`. Offers are signed when it changes, not for each poll.

    `evaluation` is what devices are asked to count in their trials.
    `refresh` may be called in one thread while others ask for offers.
    """

    def __init__(self, folder: ReleaseFolder, evaluation: EvaluationRequest | None) -> None:
        self._folder, self._evaluation = folder, evaluation
        self._stamp: tuple[int, int] | None = None
        self._present = _Offered()

    def refresh(self, key: CoordinatorKey) -> None:
        """Read the releases and sign their offers with `key`, if they have changed.

        If releases.json is damaged, the earlier offers stay, and a warning is logged.
        """
        stamp = self._folder.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            releases = self._folder.read()
        except InputError as error:
            logger.warning("%s", error)
            return
        self._present = _Offered(releases, self._offers(releases, key))

    def _offers(
        self, releases: Sequence[Release], key: CoordinatorKey
    ) -> dict[str, list[tuple[Release, ReleaseOffer]]]:
        issued = max((release.changed for release in releases), default=0)
        offers: dict[str, list[tuple[Release, ReleaseOffer]]] = {}
        for kind in {kind for release in releases for kind in release.kinds}:
            of_kind = [release for release in releases if kind in release.kinds]
            withdrawn = [release.number for release in of_kind if release.withdrawn]
            kept = bundles_kept(releases)
            usable = [r for r in of_kind if (r.number, kind) in kept and self._is_whole(r, kind)]
            for release in [*reversed(usable), *([NONE] if withdrawn else [])]:
                files = [
                    FileOffer(name=name, size=entry.size, sha256=entry.sha256)
                    for name, entry in release.kinds.get(kind, {}).items()
                ]
                offer = ReleaseOffer(
                    number=release.number,
                    round=release.round,
                    files=files,
                    back=any(number > release.number for number in withdrawn),
                    evaluation=self._evaluation,
                    issued=issued,
                )
                offers.setdefault(kind, []).append((release, key.releases(offer)))
        return offers

    def _is_whole(self, release: Release, kind: str) -> bool:
        folder = self._folder.bundle(release.number, kind)
        for name, entry in release.kinds[kind].items():
            if not has_hash(folder / name, entry.sha256):
                logger.warning(
                    "%s is missing or damaged: release %d is not offered to devices of kind %s.",
                    folder / name,
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
        """Path and size of a file of a release for devices of the kind of `device`, or None."""
        for release, offer in self._present.offers.get(device.kind, ()):
            for file in offer.files:
                if file.sha256 == sha256:
                    folder = self._folder.bundle(release.number, device.kind)
                    return folder / file.name, file.size
        return None

    @property
    def newest(self) -> Release | None:
        """The newest release that devices can get."""
        return newest_of(self._present.releases)
