"""Releases of a federation of vectors, and devices that follow them; their bundles are texts."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.release_folder import DeviceReleases
from device_agent.federation.run_options import RunOptions
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import MANIFEST
from device_agent.inference.release_trial import TrialResult
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.releases.release_changes import add_release
from toolkit.coordinator.server import Server
from vector_fleet import CONFIG, full_token, train_vector

ONE_ROUND = CONFIG.replace("rounds = 3", "rounds = 1").replace("count = 2", "count = 4")
DESKTOPS = ONE_ROUND[: ONE_ROUND.rindex("[[devices]]")]
COUNTS = {"samples": 10, "counted": 10, "correct": 5, "loss_sum": 7.0}


def content(text: str) -> dict[str, bytes]:
    """The files of a bundle that says `text`. It cannot predict."""
    return {MANIFEST: json.dumps({"text": text}).encode(), "predict.onnx": text.encode() * 1000}


def writing(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "desktop").mkdir()
        for name, data in content(text).items():
            (folder / "desktop" / name).write_bytes(data)

    return write


def release(config: CoordinatorConfig, text: str, **options: Any) -> int:
    return add_release(config.state, 1, ["desktop"], writing(text), **options).number


def report(**changes: Any) -> dict[str, Any]:
    bundle = fingerprint(content("release 1")[MANIFEST]).sha256
    return {"number": 1, "bundle": bundle, "taken": True, "runs": 1, **changes}


def run(state: Path, data: Path | None, stop: threading.Event | None = None) -> int:
    def rest(seconds: float) -> None:
        if stop is not None and stop.wait(min(seconds, 0.02)):
            raise StoppedError

    options = RunOptions(data=str(data), state=state)
    return round_loop.run(
        options,
        train=train_vector,
        try_release=lambda *arguments: TrialResult(),
        patience_s=20,
        sleep=rest,
    )


class StoppedError(BaseException):
    """Ends an agent in a test."""


def held(state: Path) -> str | None:
    """What the current release on a device says; None if there is none."""
    # A device that is running may remove a release between the two steps.
    with suppress(FileNotFoundError):
        folder = DeviceReleases(state).current()
        if folder is not None:
            return (folder / "predict.onnx").read_text()[: len("release 1")]
    return None


def fleet(server: Server, folder: Path, number: int) -> AbstractContextManager[list[Path]]:
    """Devices that take part, in threads; their state folders."""
    return in_threads(
        server, folder, number, lambda _, state, stop: run(state, server.config.held_out, stop)
    )


@contextmanager
def in_threads(
    server: Server,
    folder: Path,
    number: int,
    take_part: Callable[[int, Path, threading.Event], object],
) -> Iterator[list[Path]]:
    """Devices that have joined, and that `take_part` in threads until the end; their folders."""
    states, stop = [folder / f"device {n}" for n in range(number)], threading.Event()
    failures: list[BaseException] = []

    def watched(device: int) -> None:
        try:
            take_part(device, states[device], stop)
        except StoppedError:
            pass
        except BaseException as error:
            failures.append(error)

    for state in states:
        join(server.url, full_token(server.config, "desktop"), state.name, state)
    threads = [threading.Thread(target=watched, args=(device,)) for device in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield states
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not failures
