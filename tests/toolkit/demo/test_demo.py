"""The demo: how it deals out the data, what it reports, and that it leaves no process behind."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from device_agent.formats.protocol import DeviceStatus, RoundResult, Status
from made_profiles import made_phase, made_profile
from profiles.errors import InputError
from refusals import refused
from toolkit.coordinator.federation_config import load_config
from toolkit.demo import demo_settings, demo_table, digits_data
from toolkit.demo.baselines import Baselines, read_baselines, train_baselines
from toolkit.demo.child_processes import Processes
from toolkit.demo.demo_charts import draw, draw_accuracy, draw_memory, draw_traffic
from toolkit.demo.demo_fleet import config_text
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_result import DemoResult, DeviceReport, TrainingMemory
from toolkit.demo.live_display import FleetTable, Lines, stage
from toolkit.demo.run_demo import run_demo

ROOT = Path(__file__).resolve().parents[3]
LABELS = st.lists(st.integers(0, 9), min_size=30, max_size=200).map(np.array)
WATCHING = """
import sys, time
from pathlib import Path
from toolkit.demo.child_processes import Processes, interruptible
with interruptible(), Processes(Path(sys.argv[1])) as processes:
    processes.start("sleeper", "sleeper", [sys.argv[1]])
    print("started", flush=True)
    processes.pause(60)
"""


# Data


@given(
    labels=LABELS, devices=st.integers(1, 12), alpha=st.floats(0.1, 10), seed=st.integers(0, 2**40)
)
def test_every_sample_is_held_out_or_on_exactly_one_device(
    labels: np.ndarray, devices: int, alpha: float, seed: int
) -> None:
    held_out, parts = digits_data.split_samples(labels, devices, 0.2, alpha, seed)
    assert len(parts) == devices
    assert min(map(len, parts)) >= digits_data.LEAST
    assert len(held_out) == round(0.2 * len(labels))
    assert sorted(np.concatenate([held_out, *parts])) == list(range(len(labels)))


@given(labels=LABELS, seed=st.integers(0, 2**40))
def test_a_seed_gives_the_same_split_again(labels: np.ndarray, seed: int) -> None:
    one, other = (digits_data.split_samples(labels, 4, 0.2, 0.5, seed) for _ in range(2))
    assert np.array_equal(one[0], other[0])
    assert all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def test_another_seed_gives_another_split() -> None:
    y = digits_data.digits().y
    one, other = (digits_data.split_samples(y, 8, 0.2, 0.5, seed)[1] for seed in (0, 1))
    assert [len(part) for part in one] != [len(part) for part in other]


def test_a_small_alpha_gives_each_device_few_classes() -> None:
    y = digits_data.digits().y
    shares = [
        np.mean([np.bincount(y[part]).max() / len(part) for part in parts])
        for parts in (digits_data.split_samples(y, 8, 0.2, alpha, 0)[1] for alpha in (0.5, 100.0))
    ]
    assert shares[0] > 2 * shares[1]


def test_too_few_samples_are_refused() -> None:
    with refused("demo.too-few-samples", samples=3, devices=2):
        digits_data.dirichlet_split(np.zeros(3, int), 2, 0.5, np.random.default_rng(0))


def test_the_digits_are_as_devices_want_them(tmp_path: Path) -> None:
    digits = digits_data.digits()
    assert digits.x.shape == (1797, 1, 8, 8)
    assert (digits.x.min(), digits.x.max()) == (0, 1)
    digits[np.arange(5)].save(tmp_path / "local.npz")
    with np.load(tmp_path / "local.npz") as file:
        assert (file["x"].dtype, file["y"].dtype) == (np.float32, np.int64)
        assert np.array_equal(file["x"], digits.x[:5])


# Settings


def test_all_full_changes_the_submodels_only() -> None:
    mixed, full = (
        demo_settings.members(demo_settings.fleet(False)),
        demo_settings.members(demo_settings.fleet(True)),
    )
    assert [member.name for member in mixed] == [member.name for member in full]
    assert {member.kind.submodel for member in full} == {"full"}
    families = {member.kind.submodel.partition(":")[0] for member in mixed}
    assert families == {"full", "low-rank", "slice", "cp"}


def test_the_coordinator_reads_the_configuration(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.create(force=False)
    folder.config.write_text(config_text(folder, demo_settings.FLEET, rounds=3, seed=7))
    config = load_config(folder.config)
    assert (config.rounds, config.seed, config.port) == (3, 7, 0)
    assert (config.training, config.devices) == (demo_settings.TRAINING, demo_settings.FLEET)
    assert (config.held_out, config.state) == (folder.held_out, folder.coordinator)


# Folder


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        run_demo(tmp_path, rounds=1, seed=0, all_full=True, force=False)
    assert not list(tmp_path.iterdir())


def test_force_leaves_a_folder_alone_that_no_demo_made(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with refused("file.not-replaceable", file=str(tmp_path)):
        run_demo(tmp_path, rounds=1, seed=0, all_full=True, force=True)
    assert (tmp_path / "thesis.txt").exists()


def test_force_replaces_the_folder_of_a_demo(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.create(force=False)
    (folder.data / "old.npz").touch()
    folder.create(force=True)
    assert not list(folder.data.iterdir())


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with refused("option.invalid-value", option="seed", value=-1):
        run_demo(tmp_path / "demo", rounds=1, seed=-1, all_full=True, force=False)
    assert not (tmp_path / "demo").exists()


# Report


def device(name: str, submodel: str, peak: int | None = 75_900_000) -> DeviceReport:
    phases = [
        made_phase(name, role, median, None if peak is None else peak - 60_000_000)
        for name, role, median in (("predict", "forward", 0.00091), ("train", "train", 0.02141))
    ]
    profile = msgspec.structs.replace(made_profile(submodel, *phases), batch_size=16)
    return DeviceReport(
        name=name, submodel=submodel, samples=1231, params=33338, capacity=1.0,
        bytes_down=12_976_543, bytes_up=1_640_000, profile=profile,
    )  # fmt: skip


def result(*devices: DeviceReport) -> DemoResult:
    history = (
        RoundResult(round=0, accuracy=0.1, loss=2.3, updates=0),
        RoundResult(round=1, accuracy=0.8, loss=0.5, updates=2),
        RoundResult(round=2, accuracy=0.975, loss=0.1, updates=2),
    )
    alone = {"desktop-1": (0.1, 0.5, 0.625), "board-2": (0.1, 0.25, 0.5)}
    larger = [TrainingMemory("full", 38_400_000), TrainingMemory("slice:convs.2", 12_000_000)]
    return DemoResult(
        out=Path("edgetailor-demo"), seed=0, all_full=False, held_out_samples=359, elapsed_s=123.4,
        history=history, devices=devices, baselines=Baselines((0.1, 0.9, 0.992), alone),
        larger_model=tuple(larger),
    )  # fmt: skip


TABLE = """\
                                                 down   up forward backprop peak
device    submodel      samples params capacity    MB   MB      ms       ms   MB
desktop-1 full            1,231 33,338     1.00 12.98 1.64    0.91    20.50   76
board-2   slice:units.2   1,231 33,338     1.00 12.98 1.64    0.91    20.50   76
down, up: all rounds together. forward, backprop: one batch of 16, one thread.
peak: process peak, the whole agent with Python and its runtime.

Accuracy 97.5% on 359 held-out digits after 2 rounds, in 2 min 3 s
all devices full: 99.2%
each device alone: mean 56.2%, from 50.0% to 62.5%
VGG8 on 32 x 32 images, batch 128, MB above the idle agent:
  full 38, slice:convs.2 12
charts: edgetailor-demo/accuracy.png
everything: edgetailor-demo
"""


def test_the_report_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    demo_table.show(result(device("desktop-1", "full"), device("board-2", "slice:units.2")))
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == TABLE.splitlines()
    assert max(map(len, printed.splitlines())) <= 80


def test_unsteady_times_are_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    steady = device("desktop-1", "full")
    forward, train = steady.profile.phases
    slow = msgspec.structs.replace(train, steady=msgspec.structs.replace(train.steady, p90_s=0.043))
    busy = replace(
        device("board-2", "slice:units.2"),
        profile=msgspec.structs.replace(steady.profile, phases=(forward, slow)),
    )
    demo_table.show(result(steady, busy))
    printed = capsys.readouterr().out
    lines = [line.rstrip() for line in printed.splitlines()]
    expected = TABLE.splitlines()
    expected[3] = expected[3].replace("    20.50", "   ~20.50")
    expected.insert(
        6,
        "~: unsteady; the slowest tenth of the runs took over twice the median.",
    )
    assert lines == expected
    assert max(map(len, lines)) <= 80


def test_an_unknown_peak_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = result(device("desktop-1", "full", peak=None))
    demo_table.show(unknown)
    assert "-: not measurable on this system." in capsys.readouterr().out
    assert demo_table.as_json(unknown)["devices"][0]["process_peak_bytes"] is None


def test_the_document_names_its_units() -> None:
    document = demo_table.as_json(result(device("desktop-1", "full")))
    assert set(document) == {
        "version", "folder", "accuracy_curve", "seed", "all_full", "rounds", "elapsed_s",
        "held_out_samples", "accuracy", "history", "batch_size", "threads", "machine", "devices",
        "baselines", "larger_model",
    }  # fmt: skip
    assert set(document["devices"][0]) == {
        "device", "submodel", "samples", "params", "capacity", "bytes_down", "bytes_up",
        "forward_s", "backprop_s", "process_peak_bytes",
    }  # fmt: skip
    assert (document["version"], document["accuracy"], document["rounds"]) == (1, 0.975, 2)
    assert [entry["round"] for entry in document["history"]] == [0, 1, 2]
    assert json.loads(json.dumps(document)) == document


def test_the_charts_are_a_png(tmp_path: Path) -> None:
    draw(result(device("desktop-1", "full")), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_charts_show_every_figure() -> None:
    found = result(device("desktop-1", "full"), device("board-2", "slice:units.2"))
    accuracy, memory, traffic = Figure().subplots(1, 3)
    draw_accuracy(accuracy, found)
    draw_memory(memory, found)
    draw_traffic(traffic, found)
    curves = {line.get_label().partition(":")[0]: line.get_ydata() for line in accuracy.lines}
    assert curves.keys() == {"mixed fleet", "all devices full", "each device alone"}
    assert list(curves["mixed fleet"]) == [0.1, 0.8, 0.975]
    assert list(curves["each device alone"]) == pytest.approx([0.1, 0.375, 0.5625])
    assert [bar.get_width() for bar in memory.patches] == [38.4, 12.0]
    assert [text.get_text() for text in memory.texts][1:] == ["38.4", "12.0 (31%)"]
    assert [bar.get_width() for bar in traffic.patches] == [12.976543, 12.976543, 1.64, 1.64]


def test_memory_that_could_not_be_measured_is_not_drawn_as_nothing() -> None:
    found = replace(result(device("d", "full")), larger_model=(TrainingMemory("full", None),))
    axes = Figure().subplots()
    draw_memory(axes, found)
    assert axes.texts[1].get_text() == "not measurable"
    assert not any("MB above" in line for line in demo_table.comparisons(found))


def test_a_fleet_of_full_models_is_compared_with_devices_alone_only() -> None:
    mixed = result(device("desktop-1", "full"))
    found = replace(mixed, all_full=True, baselines=replace(mixed.baselines, all_full=None))
    axes = Figure().subplots()
    draw_accuracy(axes, found)
    labels = {line.get_label().partition(":")[0] for line in axes.lines}
    assert labels == {"all devices full", "each device alone"}
    assert demo_table.comparisons(found)[0].startswith("each device alone")


def test_why_cp_counts_more_parameters_is_explained() -> None:
    full, personal = device("desktop-1", "full"), replace(device("t", "cp:2.0"), params=50_000)
    assert [line for line in demo_table.notes(result(full, personal)) if "cp" in line] == [
        "cp: more params than full: a personal model is trained beside the factors."
    ]
    smaller = replace(personal, params=20_000)
    assert not any("cp" in line for line in demo_table.notes(result(full, smaller)))


def test_baselines_train_together_and_alone(tmp_path: Path) -> None:
    digits = digits_data.digits()
    digits[np.arange(100)].save(tmp_path / "held-out.npz")
    data = {}
    for number, label in enumerate((0, 1)):
        only = np.flatnonzero(digits.y == label)[:32]
        digits[only].save(tmp_path / f"{number}.npz")
        data[f"device-{number}"] = tmp_path / f"{number}.npz"
    found = train_baselines(tmp_path / "held-out.npz", data, rounds=1, seed=3, full_too=True)
    assert found.all_full is not None
    curves = [found.all_full, *found.alone.values()]
    assert [len(curve) for curve in curves] == [2, 2, 2]
    assert len({curve[0] for curve in curves}) == 1  # all begin with the same model
    share = np.mean(digits.y[:100] == 0)
    assert found.alone["device-0"][1] == pytest.approx(share, abs=0.05)  # it knows one digit
    (tmp_path / "b.json").write_text(json.dumps(asdict(found)))
    assert read_baselines(tmp_path / "b.json") == found


# Display


def status(round_: int, *history: RoundResult, ready: int = 4) -> Status:
    training = DeviceStatus(
        device="board-a", name="board-1", submodel="slice:units.2", state="training", loss=0.25,
        rounds_trained=1, bytes_down=1, bytes_up=1, idle_s=0,
    )  # fmt: skip
    return Status(
        state="training", round=round_, rounds=2, expected_devices=2, devices=[training],
        history=list(history), kinds=4, kinds_ready=ready,
    )  # fmt: skip


class Kept(logging.Handler):
    """Keeps the texts of log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the live display logs."""
    logger, kept = logging.getLogger("toolkit.demo.live_display"), Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept.texts
    logger.removeHandler(kept)


def test_without_a_terminal_each_round_is_one_line(said: list[str]) -> None:
    history = result().history
    lines = Lines()
    for seen in (
        status(0, ready=0),
        status(0, history[0], ready=2),
        status(0, history[0], ready=2),
        status(0, history[0], ready=4),
        status(1, history[0]),
        status(2, *history[:2]),
    ):
        lines.show(seen)
    assert said == [
        "Before training: accuracy 10.0%, loss 2.3000",
        "Making graphs of training steps, 2 of 4 kinds",
        "Making graphs of training steps, 4 of 4 kinds",
        "Round 1 of 2: accuracy 80.0%, loss 0.5000",
    ]


def test_all_graphs_are_told_of_though_the_first_round_begins_with_the_last(
    said: list[str],
) -> None:
    lines = Lines()
    for seen in (status(0, ready=1), status(1), status(1, ready=2), status(2, ready=0)):
        lines.show(seen)
    assert said == [
        "Making graphs of training steps, 1 of 4 kinds",
        "Making graphs of training steps, 4 of 4 kinds",
    ]


def test_the_picture_has_a_line_for_each_device() -> None:
    picture = FleetTable(["board-1", "board-2"], time.monotonic())
    picture.show(status(2, *result().history[:2]))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(picture)
    head, _, *rows = console.export_text().splitlines()
    assert head.rstrip() == "Round 2 of 2, training · 0 s · global accuracy 80.0%"
    assert [row.split() for row in rows] == [
        ["device", "submodel", "state", "loss"],
        ["board-1", "slice:units.2", "training", "0.2500"],
        ["board-2", "starting"],
    ]


def test_the_picture_says_how_far_the_graphs_are() -> None:
    assert stage(status(0, ready=2)) == (
        "Making graphs of training steps, 2 of 4 kinds, 1 of 2 devices"
    )


# Processes


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that children can run, and of their logs."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "dying.py").write_text("print('starting')\nraise SystemExit('disk on fire')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


def test_a_dying_child_ends_the_others_and_is_named(modules: Path) -> None:
    log = modules / "phone-1.log"
    with Processes(modules) as processes:
        sleeper = processes.start("sleeper", "sleeper", [])
        processes.start("phone-1", "dying", [])
        with refused("demo.process-failed", process="phone-1", exit_code=1, log=str(log)) as caught:
            processes.pause(60)
    assert not sleeper.running
    assert str(caught.value).endswith(f"{log}: disk on fire")
    assert "\n" not in str(caught.value)


def test_a_killed_child_is_named_with_its_signal(modules: Path) -> None:
    with Processes(modules) as processes:
        processes.start("phone-1", "sleeper", []).process.kill()
        with refused("demo.process-failed", process="phone-1", exit_code=-9) as caught:
            processes.pause(60)
    assert "(SIGKILL)" in str(caught.value)


def test_a_child_that_does_not_end_in_time_is_an_error(modules: Path) -> None:
    with Processes(modules) as processes:
        sleeper = processes.start("phone-1", "sleeper", [])
        with refused("demo.process-timeout", process="phone-1", limit_s=1):
            processes.finish([sleeper], 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "ended_by"),
    [(signal.SIGTERM, signal.SIGINT), (signal.SIGKILL, signal.SIGKILL)],  # SIGTERM interrupts
)
def test_children_end_with_their_parent(
    modules: Path, number: signal.Signals, ended_by: signal.Signals
) -> None:
    command = [sys.executable, "-c", WATCHING, str(modules)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    assert any("sleeper" in line for line in command_lines_with(modules))
    parent.send_signal(number)
    parent.communicate(timeout=20)
    assert parent.returncode == -ended_by
    wait_until(lambda: not command_lines_with(modules))


def test_a_coordinator_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_settings, "MODEL", "nowhere:nothing")
    out = tmp_path / "demo"
    log = out / "logs" / "coordinator.log"
    with refused("demo.process-failed", process="coordinator", exit_code=2, log=str(log)) as caught:
        run_demo(out, rounds=1, seed=0, all_full=True, force=False)
    assert "Cannot import nowhere" in str(caught.value)
    assert log.exists()


def command_lines_with(folder: Path) -> list[str]:
    """Command lines of running processes that name `folder`, this one's apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended
            if str(folder) in line:
                found.append(line)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


# The whole demo


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_demo_trains_a_fleet_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "toolkit.cli", "demo", "--rounds", "2", "--out", str(out)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((out / "report.json").read_text())
    names = [member.name for member in demo_settings.members(demo_settings.FLEET)]
    assert [entry["device"] for entry in document["devices"]] == names
    assert len(document["history"]) == 3
    assert len(document["baselines"]["all_full"]) == 3
    assert document["baselines"]["alone"].keys() == set(names)
    assert min(document["larger_model"]["training_above_idle_bytes"].values()) > 1_000_000
    assert all(min(e["bytes_down"], e["bytes_up"]) > 50_000 for e in document["devices"])
    assert all(e["forward_s"] > 0 and e["params"] > 0 for e in document["devices"])
    assert "Round 2 of 2: accuracy" in done.stderr
    for name in ("accuracy.png", "global.safetensors", "data/held-out.npz", "logs/phone-1.log"):
        assert (out / name).stat().st_size > 0, name
    for kind in demo_settings.FLEET:
        assert (out / "bundles" / kind.name / "manifest.json").exists()
    assert not command_lines_with(out)
