"""Offers of releases, a coordinator that serves their files, and a device that follows them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.transfers import PART
from device_agent.federation.release_folder import DeviceReleases
from device_agent.federation.releases.releases import Releases
from device_agent.formats.atomic_files import fingerprint, fingerprint_file
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.releases import ReleaseOffer, ReleaseReport
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.inference.fine_tuning import FineTuned
from device_agent.inference.release_trial import TrialResult
from profiles.errors import BundleError
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey

KEY = CoordinatorKey()
Files = dict[str, bytes]


def content(number: int) -> Files:
    """The files of a bundle. It cannot predict; the trial is replaced."""
    return {MANIFEST: b"manifest %d" % number, "predict.onnx": b"graph %d" % number * 50}


Content = Callable[[int], Files]


class Shelf:
    """A coordinator that serves the files of releases 1 to 9, and keeps the reports."""

    def __init__(self, content: Content = content) -> None:
        self.reports: list[ReleaseReport] = []
        self.fetched: list[str] = []
        self.answers = True
        self._files = {
            fingerprint(data).sha256: data for n in range(1, 10) for data in content(n).values()
        }

    def download(self, offer: FileOffer, to: Path, patience_s: float) -> None:
        self.fetched.append(offer.name)
        part = to.with_name(f"{PART}{to.name}")
        with part.open("wb") as file:
            file.write(self._files[offer.sha256])
            os.fsync(file.fileno())
        os.replace(part, to)

    def report_release(self, report: ReleaseReport) -> bool:
        self.reports += [report] if self.answers else []
        return self.answers


def offer(
    number: int,
    *,
    back: bool = False,
    issued: int | None = None,
    content: Content = content,
    fine_tune: int = 0,
) -> ReleaseOffer:
    entries = {name: fingerprint(data) for name, data in content(number).items() if number}
    files = [FileOffer(name=n, size=e.size, sha256=e.sha256) for n, e in entries.items()]
    unsigned = ReleaseOffer(
        number=number,
        round=number,
        files=files,
        back=back,
        issued=100 + number if issued is None else issued,
        fine_tune=fine_tune,
        training=files if fine_tune else [],
    )
    return KEY.releases(unsigned)


def take(*arguments: object) -> TrialResult:
    return TrialResult()


def refuse(*arguments: object) -> TrialResult:
    return TrialResult("accuracy 10.0% on 40 own samples; present model: 90.0%")


def device(
    state: Path,
    shelf: Shelf | None = None,
    trial: Callable[..., TrialResult] = take,
    tune: Callable[..., FineTuned] | None = None,
    only_sums: bool = False,
) -> Releases:
    client = cast(CoordinatorClient, shelf or Shelf())
    received, folder = state / "bundle", DeviceReleases(state)
    key = KEY.public
    return Releases(
        folder, received, client, lambda check: check(key), trial, tune, lambda: only_sums
    )


def whole_release(state: Path) -> int:
    """The release on the device, whose files must be whole; 0 if there is none."""
    folder = DeviceReleases(state).current()
    if folder is None:
        return 0
    number = int((folder / MANIFEST).read_bytes().split()[1])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == content(number)
    assert folder.name == fingerprint_file(folder / MANIFEST).sha256
    return number


def bundles(state: Path) -> int:
    folder = DeviceReleases(state).folder
    return len(list(folder.iterdir())) if folder.exists() else 0


def broken(*arguments: object) -> TrialResult:
    raise BundleError("{path} is no graph.", code="bundle.unloadable-graph", path="x/predict.onnx")
