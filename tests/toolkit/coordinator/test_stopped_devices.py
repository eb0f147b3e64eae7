"""Devices that stop: the coordinator is told why, and no round waits for them."""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from commands import run
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import round_loop
from device_agent.federation.fleet_status import lines
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.federation.stop_report import stop_report, without_folders
from device_agent.formats.protocol.fleet import DeviceStatus
from device_agent.formats.protocol.rounds import Stopped, SubmodelFailure
from device_agent.runtime.runtime_errors import runtime_error
from profiles.errors import BundleError, DataError, StorageError
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from vector_fleet import (
    CONFIG,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    task,
    token,
    trained,
)

ALONE = CONFIG[: CONFIG.rindex("[[devices]]")].replace("count = 2", "")
GONE = Stopped(code="data.unknown-class", reason="local.csv, line 3: no class.", round=1)


def seen(server: Server, device: str) -> DeviceStatus:
    return next(d for d in server.coordinator.status().devices if d.device == device)


def take_part(links: dict[str, CoordinatorClient], folder: Path, *names: str) -> None:
    for name in names:
        work, _, update = trained(links[name], folder / name)
        send(links[name], work.round, update)


def test_no_round_waits_for_a_device_that_has_stopped(tmp_path: Path) -> None:
    config, told = configured(tmp_path / "c", f"deadline_s = 86400\n{CONFIG}"), list[str]()
    with running(config, say=told.append) as server:
        links = enrol(server, tmp_path)
        take_part(links, tmp_path / "1", "desktop-1", "desktop-2")
        assert task(links["board-1"]).round == 1
        for _ in range(3):  # a service that is started again and again
            links["board-1"].stopped(GONE, again=False)
        assert_soon(lambda: server.coordinator.status().round == 2)
        board = seen(server, "board-1")
        assert (board.state, board.note, board.round) == ("stopped", GONE.reason, None)
        shown = lines(server.coordinator.status())
        assert shown[-2:] == [
            "  board-1 (machine 2)   low-rank:0.5     stopped", f"    {GONE.reason}",
        ]  # fmt: skip
        assert [line for line in told if "stopped" in line] == [
            f"board-1 (machine 2) has stopped: {GONE.reason} (data.unknown-class)"
        ]
        take_part(links, tmp_path / "2", "desktop-1", "desktop-2")
        assert_soon(lambda: server.coordinator.status().round == 3)
    with running(config) as server:  # a restart does not forget it
        assert seen(server, "board-1").note == GONE.reason
        links = {f"desktop-{n}": joined(server, tmp_path / str(n - 1)) for n in (1, 2)}
        take_part(links, tmp_path / "3", "desktop-1")
        # It is back, and takes part in the open round.
        links["board-1"] = joined(server, tmp_path / "2")
        take_part(links, tmp_path / "3", "board-1")
        assert seen(server, "board-1").note is None
        assert server.coordinator.status().state == "training"
        take_part(links, tmp_path / "3", "desktop-2")
        assert_soon(lambda: server.coordinator.status().state == "finished")
        assert [r.updates for r in server.coordinator.status().history] == [0, 2, 2, 3]


def test_an_update_of_a_device_that_stopped_afterwards_counts(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", f"quorum = 2\n{CONFIG}")
    with running(config) as server:
        links = enrol(server, tmp_path)
        take_part(links, tmp_path / "1", "board-1")
        links["board-1"].stopped(GONE, again=False)
        assert task(links["desktop-1"]).round == 1
    with running(config) as server:
        take_part({"desktop-1": joined(server, tmp_path / "0")}, tmp_path / "2", "desktop-1")
        assert_soon(lambda: server.coordinator.status().round == 2)
        assert server.coordinator.status().history[-1].updates == 2


def test_a_round_that_everybody_left_opens_again_for_the_first_who_is_back(tmp_path: Path) -> None:
    with running(configured(tmp_path / "c", ALONE)) as server:
        known = join(server.url, token(server.config, "desktop"), "desk", tmp_path / "s")
        link = CoordinatorClient(server.url, known.secret, patience_s=0)
        assert task(link).round == 1
        link.stopped(GONE, again=False)
        assert server.coordinator.rounds.phase == "aggregating"
        server.round_worker.turn()
        assert server.coordinator.rounds.phase == "aggregating"
        assert link.work().state == "wait"
        assert task(link).round == 1


def test_a_round_in_which_it_failed_is_not_offered_again(tmp_path: Path) -> None:
    with running(configured(tmp_path / "c")) as server:
        links = enrol(server, tmp_path)
        board = links["board-1"]
        submodel = task(board).submodel
        board.report(SubmodelFailure(submodel=submodel, failures=3, reason="It does not fit."))
        board.stopped(GONE, again=False)
        assert board.work().state == "wait"
        take_part(links, tmp_path / "1", "desktop-1", "desktop-2")
        assert task(board).round == 2


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def train(*arguments: object, **options: object) -> NoReturn:
        raise error

    return train


ENDS = [
    (
        DataError("{path}: {name!r} is no class.", code="data.x", path="/ann/a.csv", name="ok"),
        "a.csv: '...' is no class.",
    ),
    (
        DataError("{p}: the label {label} is unknown.", code="data.x", p="/ann/a.npz", label=12),
        "a.npz: the label '...' is unknown.",
    ),
    (StorageError("The disk with {path} is full.", code="storage.y", path="/mnt/a b/c"),
     "The disk with c is full."),
    (BundleError("Version 9 of a bundle.", code="bundle.z"), "Version 9 of a bundle."),
    (OSError(errno.EIO, "Input/output error", "/home/ann/x.npz"), "x.npz: Input/output error"),
    (MemoryError(), "memory ran out"),
    (ZeroDivisionError("/home/ann"), "an internal error (ZeroDivisionError)"),
    (SystemExit(0), "stopped by its owner or its system"),
    (KeyboardInterrupt(), "stopped by its owner or its system"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "reason"), ENDS)
def test_whatever_ends_an_agent_is_told(tmp_path: Path, error: BaseException, reason: str) -> None:
    with running(configured(tmp_path / "c", ALONE)) as server:
        join(server.url, token(server.config, "desktop"), "desk", tmp_path / "s")
        options = RunOptions(data=str(server.config.held_out), state=tmp_path / "s")
        with pytest.raises(type(error)):
            round_loop.run(options, train=raising(error), sleep=lambda seconds: None)
        device = seen(server, "desktop-1")
        assert (device.state, device.note) == ("stopped", reason)


def test_what_run_refuses_at_its_start_is_told(tmp_path: Path) -> None:
    with running(configured(tmp_path / "c", ALONE)) as server:
        join(server.url, token(server.config, "desktop"), "desk", tmp_path / "s")
        options = RunOptions(data=str(tmp_path / "no.npz"), state=tmp_path / "s")
        with pytest.raises(DataError):
            round_loop.run(options, sleep=lambda seconds: None)
        assert seen(server, "desktop-1").note == (
            "no.npz does not exist; give an .npz file with x and y, or x_NAME and y_NAME for "
            "several inputs or outputs."
        )


def test_no_folder_leaves_the_device() -> None:
    assert stop_report(DataError("x" * 9999, code="data.x"), 3) == Stopped(
        code="data.x", reason="x" * 500, round=3
    )
    for text, plain in {
        "~/data/a.npz cannot be read": "a.npz cannot be read",
        "write http://host:1/v1 or 3/4": "write http://host:1/v1 or 3/4",
        "'/home/ann/a b.npz' and ../x/y.npz": "'a b.npz' and y.npz",
    }.items():
        assert without_folders(text, ["/home/ann/a b.npz"]) == plain


def test_no_number_of_a_runtimes_message_leaves_the_device(tmp_path: Path) -> None:
    """A graph could look up a sample in a table without rows, and the message names the row."""
    said = ValueError("node Gather_3: indices element out of data bounds, idx=-1234 of [-4,3]")
    for trouble in ("failed in", "is refused by"):
        report = stop_report(runtime_error(said, tmp_path / "train.onnx", trouble, "library"), 3)
        assert report is not None
        assert not re.search(r"\d", report.reason.replace("Gather_3", ""))
        assert "Gather_3: indices element out of data bounds" in report.reason


FLEET = """
model = "models_for_tests:four_columns"
input_shape = [4]
rounds = 2
held_out = "held_out.csv"
port = 0
deadline_s = 86400

[data]
kind = "series"
columns = ["a", "b", "c", "d"]
label = "y"
classes = ["no", "yes"]

[training]
batch_size = 2
epochs = 1

[[devices]]
name = "pc"
submodel = "full"
count = 2
"""
RIGHT = "a,b,c,d,y\n1,2,3,4,yes\n0,0,1,-1,no\n5,4,3,2,yes\n"


def test_a_wrong_label_delays_no_round(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    for name in ("held_out.csv", "good.csv"):
        (tmp_path / name).write_text(RIGHT)
    (tmp_path / "bad.csv").write_text(RIGHT + "3,4,5,6,ok\n")
    config, told = load_config(tmp_path / "fleet.toml"), list[str]()
    with running(config, federation(config), told.append) as server:
        for name in ("good", "bad"):
            given = ("--token-file", "state/tokens/pc.token", "--state", name, "--name", name)
            run("edgetailor-agent", "join", server.url, *given, cwd=tmp_path).succeeded()
        bad = run("edgetailor-agent", "run", "--data", "bad.csv", "--state", "bad", cwd=tmp_path)
        assert bad.code == 2
        assert "bad.csv, line 5: the model has no class 'ok'" in bad.stderr
        [stopped] = [line for line in told if "has stopped" in line]
        shown = run("edgetailor-agent", "status", "--state", "good", cwd=tmp_path).stdout
        good = run("edgetailor-agent", "run", "--data", "good.csv", "--state", "good", cwd=tmp_path)
        assert good.code == 0, good.stderr  # after both rounds, long before their deadline
    said = "pc-2 (bad) has stopped: bad.csv, line 5: the model has no class '...'"
    assert said in stopped
    assert stopped.endswith("(data.unknown-class)")
    said = r"pc-2 \(bad\) +full +stopped\n    bad.csv, line 5: the model has no class '...'"
    assert re.search(said, shown)
