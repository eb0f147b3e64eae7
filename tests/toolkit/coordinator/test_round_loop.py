"""The agent's rounds with a real coordinator: pauses, failures and the log."""

import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from commands import command, environment, run
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import (
    owner_limits,
    owner_pauses,
    round_loop,
    round_steps,
    training_attempts,
)
from device_agent.federation.device_state import DeviceState
from device_agent.federation.fleet_status import lines
from device_agent.federation.membership import join, leave
from device_agent.federation.owner_limits import OwnerLimits
from device_agent.federation.run_options import RunOptions
from device_agent.federation.spent_privacy import add_spent, check_still_private
from device_agent.federation.training_attempts import KILLED, Attempts
from device_agent.formats.protocol.fleet import DeviceStatus
from device_agent.formats.protocol.rounds import SubmodelFailure
from device_agent.privacy.sample_accountant import SampleSteps
from log_messages import logged
from profiles.errors import DoesNotFitError, LimitError
from refusals import refused
from toolkit.coordinator.server import Server
from vector_fleet import (
    CONFIG,
    Trained,
    assert_soon,
    configured,
    joined,
    running,
    send_trained,
    token,
    train_vector,
)

LOCAL = "{}/coordinator/held_out.npz"
"""Samples that any device here may train on."""
TWO = CONFIG[: CONFIG.rindex("[[devices]]")].replace("rounds = 3", "rounds = 2")
ONE = CONFIG[: CONFIG.rindex("[[devices]]")].replace("count = 2", 'fallback = "slice:0.2"')


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(configured(tmp_path / "coordinator", ONE)) as started:
        join(started.url, token(started.config, "desktop"), "desk", tmp_path / "state")
        yield started


def desk(server: Server) -> DeviceStatus:
    return server.coordinator.status().devices[0]


def options(folder: Path, state: str = "state", limits: OwnerLimits | None = None) -> RunOptions:
    data = LOCAL.format(folder)
    return RunOptions(data=data, state=folder / state, limits=limits or OwnerLimits())


def quick(seconds: float) -> None:
    time.sleep(0.01)


def test_a_pause_in_the_middle_of_training(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    power, batches = [True], list[int]()

    def train(
        folder: Path,
        data: str,
        out: Path,
        *,
        on_batch: Callable[[], None],
        personal: Mapping[str, np.ndarray],
        keep: Callable[[Mapping[str, np.ndarray]], object],
        **options: object,
    ) -> Trained:
        for number in range(4):
            power[0] = number != 2 or bool(len(batches) > 4)
            on_batch()
            batches.append(number)
        return train_vector(folder, data, out, personal=personal, keep=keep)

    monkeypatch.setattr(owner_limits.sensors, "charging", lambda root: power[0])
    monkeypatch.setattr(owner_pauses, "CHECK_S", 0)
    limits = OwnerLimits(only_when_charging=True)
    agent = threading.Thread(
        target=round_loop.run,
        args=(options(tmp_path, limits=limits),),
        kwargs={"sleep": quick, "train": train},
    )
    agent.start()
    assert_soon(lambda: desk(server).state == "paused")
    assert (batches, desk(server).note) == ([0, 1], "running on battery")
    assert said[-1] == "Paused: running on battery."
    assert lines(server.coordinator.status())[1:] == [
        "  desktop-1 (desk) full             paused", "    running on battery",
    ]  # fmt: skip
    power[0] = True
    assert_soon(lambda: desk(server).rounds_trained >= 1)
    agent.join(20)
    assert batches == [0, 1, 2, 3] * 3
    assert said.count("Continuing after a pause of 0 s.") == 1
    assert (desk(server).rounds_trained, desk(server).note) == (3, None)


def test_waiting_for_other_devices_is_logged_on_both_sides(tmp_path: Path) -> None:
    told: list[str] = []
    with running(configured(tmp_path / "coordinator"), say=told.append) as server:

        def enrol(kind: str, name: str) -> None:
            join(server.url, token(server.config, kind), name, tmp_path / name)

        enrol("board", "shed")
        leave(tmp_path / "shed")
        enrol("desktop", "desk")
        with agent(tmp_path, "--state", "desk") as process:
            assert process.stderr is not None
            assert next(process.stderr).endswith("] Waiting: 1 of 3 devices has joined.\n")
            time.sleep(1)  # more than one poll: each number is said once
            enrol("board", "shed")
            status = run("edgetailor-agent", "status", "--state", "desk", cwd=tmp_path)
            assert status.stdout.startswith(
                "round 0 of 3, enrolling (2 of 3 devices have joined), global accuracy 50.0%\n"
            )
            assert next(process.stderr).endswith("] Waiting: 2 of 3 devices have joined.\n")
            server.coordinator.act("pause", "desktop-1", "holidays", "operator")
            said = next(process.stderr)
            assert said.endswith("] Waiting: paused by the operator: holidays\n")
            server.coordinator.act("resume", "desktop-1", "they are over", "operator")
            enrol("desktop", "bench")
            assert "Fetching " in next(process.stderr)
    assert [line for line in told if not line.startswith("Round")] == [
        "board-1 (shed) has joined: 1 of 3 places taken.",
        "board-1 (shed) has left: 0 of 3 places taken.",
        "desktop-1 (desk) has joined: 1 of 3 places taken.",
        "board-2 (shed) has joined: 2 of 3 places taken.",
        "desktop-1 (desk) is paused by the operator: holidays",
        "desktop-1 (desk) is no longer paused",
        "desktop-2 (bench) has joined: 3 of 3 places taken.",
    ]


def test_a_device_that_misses_a_deadline_drops_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, shown = list[str](), list[str]()
    config = configured(tmp_path / "coordinator", TWO)
    late = [0.0]
    with running(config, say=told.append) as server:
        server.coordinator.clock = lambda: time.monotonic() + late[0]

        def deadline() -> None:
            late[0] += config.deadline_s

        def rest(seconds: float) -> None:
            quick(seconds)
            rounds = server.coordinator.rounds
            if rounds.round == 2 and rounds.updates:
                deadline()

        for name in ("slow", "fast"):
            join(server.url, token(config, "desktop"), name, tmp_path / name)
        fast = joined(server, tmp_path / "fast")

        def train(
            folder: Path, data: str, out: Path, *, on_batch: Callable[[], None], **options: object
        ) -> Trained:
            on_batch()
            if not shown:
                send_trained(fast, 1, tmp_path / "one")
                deadline()
                assert_soon(lambda: server.coordinator.status().round == 2)
                shown.extend(lines(server.coordinator.status()))
                on_batch()
                raise AssertionError("the round is over, and training goes on")
            return train_vector(folder, data, out, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(round_steps, "ROUND_CHECK_S", 0)
        with logged() as said:
            sent = round_loop.run(options(tmp_path, "slow"), train=train, sleep=rest)
        assert sent == 1
        assert desk(server).note is None
    assert shown[1:3] == [
        "  desktop-1 (slow) full             training round 1",
        "    round 1 closed before its update came",
    ]
    assert [line for line in said if not line.startswith(("Fetching", "Sending"))] == [
        "Round 1: training",
        "Round 1 closed before this device had finished: its training is dropped.",
        "Round 2: training", "Round 2: the update was accepted.",
        "The last round is over; 1 update sent since this agent started.",
    ]  # fmt: skip
    assert [line for line in told if "closed before" in line] == [
        "Round 1 closed before the update of desktop-1 (slow) came.",
        "Round 2 closed before the update of desktop-2 (fast) came.",
    ]
    assert not (tmp_path / "slow" / ".update.training").exists()


def test_a_smaller_submodel_after_three_failures(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    waits: list[float] = []

    def train(folder: Path, data: str, out: Path, **options: object) -> Trained:
        assert options["form_checks"] == folder.parent / "forms.json"
        if b'"submodel":"full"' in (folder / "manifest.json").read_bytes().replace(b" ", b""):
            raise LimitError("full does not fit.")
        return train_vector(folder, data, out, **options)  # type: ignore[arg-type]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(0.01)

    sent = round_loop.run(options(tmp_path), train=train, sleep=sleep)
    assert sent == 3
    failed = "Training full failed {}: full does not fit."
    start = said.index("Round 1: training")
    assert [line for line in said[start:] if not line.startswith(("Fetching", "Sending"))] == [
        "Round 1: training", failed.format("once"), "Trying again in 10 s.",
        "Round 1: training", failed.format("2 times in a row"), "Trying again in 20 s.",
        "Round 1: training", failed.format("3 times in a row"),
        "Told the coordinator. From round 1 on this device trains slice:0.2.",
        "Round 1: training", "Round 1: the update was accepted.",
        "Round 2: training", "Round 2: the update was accepted.",
        "Round 3: training", "Round 3: the update was accepted.",
        "The last round is over; 3 updates sent since this agent started.",
    ]  # fmt: skip
    first, second = (wait for wait in waits if wait > 5)
    assert 8 <= first <= 12 < 16 <= second <= 24
    assert desk(server).note == "full failed 3 times: full does not fit."
    assert desk(server).submodel == "slice:0.2"
    assert not (tmp_path / "state" / "attempts.json").exists()


def test_a_reported_failure_is_shown_in_80_columns(tmp_path: Path) -> None:
    told: list[str] = []
    alone = ONE.replace('fallback = "slice:0.2"', "")
    with running(configured(tmp_path / "coordinator", alone), say=told.append) as server:
        known = join(server.url, token(server.config, "desktop"), "x" * 60, tmp_path / "a")
        link = CoordinatorClient(server.url, known.secret)
        reason = (
            "full does not fit: running train takes 160.1MB on top of the 41.2MB of the idle "
            "agent, and --max-memory allows 180.0MB. Allow at least 201.3MB, or take a submodel "
            "whose peak memory is 138.8MB at most."
        )
        for said in (reason, reason, "word " * 1000):
            link.report(SubmodelFailure(submodel="full", failures=3, reason=said))
        shown = run("edgetailor-agent", "status", "--state", "a", cwd=tmp_path).stdout.splitlines()
        cut = desk(server).note
    failures = [line for line in told if reason in line]
    assert failures == [f"desktop-1 ({'x' * 60}): full failed 3 times: {reason}"]  # told once
    assert cut is not None
    assert re.fullmatch(r"full failed 3 times: (word )+word\.\.\.", cut)
    assert 490 < len(cut) <= 500
    assert shown[1].startswith(f"  desktop-1 ({'x' * 13}... full ")
    assert max(map(len, shown)) <= 80
    assert " ".join(line.strip() for line in shown[2:]) == cut


@pytest.mark.parametrize("refused", ["full", "any"])
def test_a_submodel_that_does_not_fit_is_tried_once(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    said: list[str],
) -> None:
    waits: list[float] = []

    def train(folder: Path, data: str, out: Path, **options: object) -> Trained:
        submodel = json.loads((folder / "manifest.json").read_bytes())["submodel"]
        if refused in (submodel, "any"):
            raise DoesNotFitError(f"{submodel} does not fit.")
        return train_vector(folder, data, out, **options)  # type: ignore[arg-type]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len([line for line in said if line.startswith("Told the coordinator")]) == 2:
            raise KeyboardInterrupt
        time.sleep(0.01)

    lines = [
        "Round 1: training", "Training full failed: full does not fit.",
        "Told the coordinator. From round 1 on this device trains slice:0.2.",
        "Round 1: training",
    ]  # fmt: skip
    if refused == "any":
        with pytest.raises(KeyboardInterrupt):
            round_loop.run(options(tmp_path), train=train, sleep=sleep)
        lines += [
            "Training slice:0.2 failed: slice:0.2 does not fit.",
            "Told the coordinator. There is no smaller submodel for this device; trying again in "
            "the next round.",
        ]
    else:
        assert round_loop.run(options(tmp_path), train=train, sleep=sleep) == 3
    start = said.index("Round 1: training")
    told = [line for line in said[start:] if not line.startswith(("Fetching", "Sending"))]
    assert told[: len(lines)] == lines
    assert max(waits, default=0) < 5  # nothing waits before another try
    note = {
        "full": "full failed 1 time: full does",
        "any": "slice:0.2 failed 1 time: slice:0.2 does",
    }
    assert desk(server).note == f"{note[refused]} not fit."


def test_an_agent_whose_trainings_all_fail_ends_with_their_reason(tmp_path: Path) -> None:
    with running(configured(tmp_path / "coordinator", f"deadline_s = 0.2\n{TWO}")) as server:
        for name in ("weak", "fast"):
            join(server.url, token(server.config, "desktop"), name, tmp_path / name)
        fast = threading.Thread(
            target=round_loop.run,
            args=(options(tmp_path, "fast"),),
            kwargs={"sleep": quick, "train": train_vector},
        )

        def train(*given: object, **options: object) -> Trained:
            if not fast.ident:
                fast.start()
            raise DoesNotFitError("it does not fit.")

        with refused("agent.nothing-sent", reason="it does not fit.") as error:
            round_loop.run(options(tmp_path, "weak"), train=train, sleep=quick)
        fast.join(20)
    assert isinstance(error.value, LimitError)


def test_kills_are_reported_after_a_restart(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    path = tmp_path / "state" / "attempts.json"
    record = training_attempts.Record(
        submodel="full", round=1, failures=2, reason=KILLED, boot=training_attempts._boot_id()
    )
    Attempts(path)._write(record)
    assert round_loop.run(options(tmp_path), train=train_vector, sleep=quick) == 3
    assert said[:2] == [
        f"Training full failed 3 times in a row: {KILLED}",
        "Told the coordinator. From round 1 on this device trains slice:0.2.",
    ]


@contextmanager
def agent(folder: Path, *arguments: object, **more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(
            "edgetailor-agent",
            "run",
            "--data",
            LOCAL.format(folder),
            "--state",
            "state",
            *arguments,
        ),
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def now(minutes: int) -> str:
    return f"{datetime.now() + timedelta(minutes=minutes):%H:%M}"


def test_quiet_hours_of_a_process_with_a_log_for_programs(server: Server, tmp_path: Path) -> None:
    end = now(60)
    (tmp_path / "o.toml").write_text(f'log_json = true\nquiet_hours = "{now(-60)}-{end}"\n')
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(address))
        service.settimeout(20)
        with agent(tmp_path, "--config", "o.toml", NOTIFY_SOCKET=str(address)) as process:
            until = f"quiet hours until {end}"
            assert_soon(lambda: (desk(server).state, desk(server).note) == ("ineligible", until))
            assert process.stderr is not None
            line = json.loads(process.stderr.readline())
            assert [service.recv(200) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]
            assert service.recv(200).startswith(b"STATUS=")
            process.send_signal(signal.SIGTERM)
            stdout, rest = process.communicate(timeout=20)
    assert (process.returncode, stdout, rest) == (0, "", "")
    assert (desk(server).state, desk(server).note) == (
        "stopped", "stopped by its owner or its system",
    )  # fmt: skip
    stamp = datetime.fromisoformat(line.pop("time"))
    assert stamp.tzinfo is not None
    assert abs(stamp.timestamp() - time.time()) < 60
    assert 0 <= line.pop("elapsed_s") < 60
    assert line == {"level": "info", "message": f"Paused: {until}."}


def test_a_device_that_has_left_cannot_run(server: Server, tmp_path: Path) -> None:
    secret = json.loads((tmp_path / "state" / "device.json").read_bytes())["secret"]
    CoordinatorClient(server.url, secret).leave()
    with agent(tmp_path, "--log-json") as process:
        stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (6, "")
    line = json.loads(stderr)
    assert (line["level"], line["message"]) == (
        "error", "desktop-1 has left this federation: join again with a token.",
    )  # fmt: skip


def test_a_limit_that_cannot_be_kept_ends_it_at_once(server: Server, tmp_path: Path) -> None:
    if owner_limits.sensors.temperature_c() is not None:
        pytest.skip("this machine shows its temperature")
    with agent(tmp_path, "--max-temperature", 70) as process:
        stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (2, "")
    assert re.fullmatch(r"Error: This machine has no temperature sensor .*\n", stderr)


@pytest.mark.parametrize("asked", ["train", "judge"])
def test_rounds_that_stop_protecting_samples_are_skipped(
    asked: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    class Stopped(Exception):  # noqa: N818
        pass

    def rest(seconds: float) -> None:
        if (state.bundle / "manifest.json").exists():
            raise Stopped
        time.sleep(0.05)  # the coordinator has no work yet

    def judge(*given: object, **more: object) -> None:
        raise AssertionError("a figure of the samples was computed")

    if asked == "judge":
        monkeypatch.setattr(
            round_loop._Rounds, "_take_part", lambda self, work: bool(self._judge(work))
        )
    state = DeviceState(tmp_path / "state")
    add_spent(state.privacy, SampleSteps(0.5, 1.0, 3), 1e-5)
    with pytest.raises(Stopped):
        round_loop.run(options(tmp_path), judge=judge, sleep=rest)
    with refused("trust.no-sample-privacy"):
        check_still_private(state.privacy, state.sample_privacy())
    assert (desk(server).state, desk(server).rounds_trained) == ("paused", 0)
    assert "privacy for samples" in (desk(server).note or "")
    assert not state.update.exists()
    leave(tmp_path / "state")  # whoever joins again agrees
    assert not state.privacy.exists()
