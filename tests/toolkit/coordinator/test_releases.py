"""Releases from the coordinator to devices: offered, fetched, switched to and withdrawn."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.release_folder import DeviceReleases
from device_agent.federation.run_options import RunOptions
from device_agent.formats.manifest import MANIFEST
from device_agent.inference.release_trial import TrialResult
from toolkit.coordinator.federation_config import CoordinatorConfig
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.release_changes import (
    add_release,
    release_to_all,
    withdraw_newest,
)
from vector_fleet import (
    CONFIG,
    assert_soon,
    configured,
    full_token,
    running,
    train_vector,
)

ONE_ROUND = CONFIG.replace("rounds = 3", "rounds = 1").replace("count = 2", "count = 4")
DESKTOPS = ONE_ROUND[: ONE_ROUND.rindex("[[devices]]")]
STAYING = DESKTOPS.replace("[training]", '[release]\nafter_rounds = "0.05s"\n\n[training]')


def content(text: str) -> dict[str, bytes]:
    """The files of a bundle that says `text`. It cannot predict."""
    return {MANIFEST: json.dumps({"text": text}).encode(), "predict.onnx": text.encode() * 1000}


def release(config: CoordinatorConfig, text: str, **options: Any) -> int:
    def write(folder: Path) -> None:
        (folder / "desktop").mkdir()
        for name, data in content(text).items():
            (folder / "desktop" / name).write_bytes(data)

    return add_release(config.state, 1, ["desktop"], write, **options).number


def run(state: Path, data: Path, stop: threading.Event | None = None) -> int:
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
    folder = DeviceReleases(state).current()
    return None if folder is None else (folder / "predict.onnx").read_text()[: len("release 1")]


@contextmanager
def fleet(server: Server, folder: Path, number: int) -> Iterator[list[Path]]:
    """Devices that take part, in threads; their state folders."""
    states, stop = [folder / f"device {n}" for n in range(number)], threading.Event()
    failures: list[BaseException] = []

    def take_part(state: Path) -> None:
        try:
            run(state, server.config.held_out, stop)
        except StoppedError:
            pass
        except BaseException as error:
            failures.append(error)

    for state in states:
        join(server.url, full_token(server.config, "desktop"), state.name, state)
    threads = [threading.Thread(target=take_part, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    try:
        yield states
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not failures


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
        withdraw_newest(config.state)
        assert_soon(all_hold(states, "release 1"))
        withdraw_newest(config.state)
        assert_soon(all_hold(states, None))
        assert not [path for state in states for path in (state / "releases").iterdir()]


def test_an_agent_that_ends_after_the_last_round_takes_a_release(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", DESKTOPS.replace("count = 4", "count = 1"))
    with running(config) as server:
        join(server.url, full_token(config, "desktop"), "one", tmp_path / "one")
        assert run(tmp_path / "one", config.held_out) == 1
        release(config, "release 1")
        server.coordinator.released.refresh(server.coordinator.key)
        assert run(tmp_path / "one", config.held_out) == 0
    assert held(tmp_path / "one") == "release 1"
