"""The table, the charts, the document and the baselines of the demo."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from device_agent.formats.evaluation_counts import EvaluationCounts, LocalEvaluation
from device_agent.formats.protocol.fleet import RoundResult
from made_profiles import made_phase, made_profile
from toolkit.demo import demo_table
from toolkit.demo.baselines import Baselines, train_baselines
from toolkit.demo.demo_charts import draw, draw_accuracy, draw_memory, draw_traffic
from toolkit.demo.demo_result import DemoResult, DeviceReport, TrainingMemory
from toolkit.demo.deployed_models import DeployedModel
from toolkit.simulation.digits import digits

EVALUATION = LocalEvaluation(
    before=EvaluationCounts(samples=20, counted=20, correct=19, loss_sum=3.5),
    after=EvaluationCounts(samples=20, counted=20, correct=20, loss_sum=1.5),
)
DEPLOYED = (
    DeployedModel("desktop", "full", "float32", 140_432, 0.975),
    DeployedModel("phone", "low-rank:0.5", "float32", 80_000, 0.96),
    DeployedModel("board", "full", "float32", 140_432, 0.975),
    DeployedModel("desktop", "full", "int8", 38_200, 0.972),
)


def device(name: str, submodel: str, peak: int | None = 75_900_000) -> DeviceReport:
    phases = [
        made_phase(name, role, median, None if peak is None else peak - 60_000_000)
        for name, role, median in (("predict", "forward", 0.00091), ("train", "train", 0.02141))
    ]
    profile = msgspec.structs.replace(made_profile(submodel, *phases), batch_size=16)
    return DeviceReport(
        name=name, submodel=submodel, samples=1231, params=33338, capacity=1.0,
        bytes_down=12_976_543, bytes_up=1_640_000, evaluation=EVALUATION, correct=9,
        profile=profile,
    )  # fmt: skip


def result(*devices: DeviceReport) -> DemoResult:
    history = (
        RoundResult(round=0, accuracy=0.1, loss=2.3, updates=0),
        RoundResult(round=1, accuracy=0.8, loss=0.5, updates=2),
        RoundResult(round=2, accuracy=0.975, loss=0.1, updates=2),
    )
    alone = {"desktop-1": [0.1, 0.5, 0.625], "board-2": [0.1, 0.25, 0.5]}
    larger = [TrainingMemory("full", 38_400_000), TrainingMemory("slice:convs.2", 12_000_000)]
    return DemoResult(
        out=Path("edgetailor-demo"), seed=0, all_full=False, held_out_samples=359, elapsed_s=123.4,
        history=history, devices=devices, baselines=Baselines([0.1, 0.9, 0.992], alone),
        larger_model=tuple(larger), deployed=DEPLOYED,
    )  # fmt: skip


TABLE = """\
                                       got own  down   up forward backprop peak
device    submodel      samples params   %   %    MB   MB      ms       ms   MB
desktop-1 full            1,231 33,338  95 100 12.98 1.64    0.91    20.50   76
board-2   slice:units.2   1,231 33,338  95 100 12.98 1.64    0.91    20.50   76
got, own: accuracy on the 10% of samples that a device keeps apart. got: of the
last round's model; own: after the device trained it (cp: the personal model).
down, up: all rounds together. forward, backprop: one batch of 16, one thread.
peak: process peak, the whole agent with Python and its runtime.

Accuracy 97.5% on 359 held-out digits after 2 rounds, in 2 min 3 s
all devices full: 99.2%
each device alone: mean 56.2%, from 50.0% to 62.5%
VGG8 on 32 x 32 images, batch 128, MB above the idle agent:
  full 38, slice:convs.2 12
deployed full as float32: 140.4 kB, 97.5%
deployed low-rank:0.5 as float32: 80.0 kB, 96.0%
deployed full as int8: 38.2 kB, 97.2%
2 devices predict 20 digits with it: 18 right
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
        8,
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
        "baselines", "larger_model", "deployed",
    }  # fmt: skip
    assert set(document["devices"][0]) == {
        "device", "submodel", "samples", "params", "capacity", "bytes_down", "bytes_up",
        "forward_s", "backprop_s", "process_peak_bytes", "evaluation", "predicted_correctly",
    }  # fmt: skip
    assert (document["version"], document["accuracy"], document["rounds"]) == (1, 0.975, 2)
    assert [entry["round"] for entry in document["history"]] == [0, 1, 2]
    assert json.loads(json.dumps(document)) == document


def test_the_charts_are_a_png(tmp_path: Path) -> None:
    draw(result(device("desktop-1", "full")), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_charts_show_every_figure() -> None:
    demo = result(device("desktop-1", "full"), device("board-2", "slice:units.2"))
    accuracy, memory, traffic = Figure().subplots(1, 3)
    draw_accuracy(accuracy, demo)
    draw_memory(memory, demo)
    draw_traffic(traffic, demo)
    curves = {line.get_label().partition(":")[0]: line.get_ydata() for line in accuracy.lines}
    assert curves.keys() == {"mixed fleet", "all devices full", "each device alone"}
    assert list(curves["mixed fleet"]) == [0.1, 0.8, 0.975]
    assert list(curves["each device alone"]) == pytest.approx([0.1, 0.375, 0.5625])
    assert [bar.get_width() for bar in memory.patches] == [38.4, 12.0]
    assert [text.get_text() for text in memory.texts][1:] == ["38.4", "12.0 (31%)"]
    assert [bar.get_width() for bar in traffic.patches] == [12.976543, 12.976543, 1.64, 1.64]


def test_memory_that_could_not_be_measured_is_not_drawn_as_nothing() -> None:
    demo = replace(result(device("d", "full")), larger_model=(TrainingMemory("full", None),))
    axes = Figure().subplots()
    draw_memory(axes, demo)
    assert axes.texts[1].get_text() == "not measurable"
    assert not any("MB above" in line for line in demo_table.comparisons(demo))


def test_a_fleet_of_full_models_is_compared_with_devices_alone_only() -> None:
    mixed = result(device("desktop-1", "full"))
    demo = replace(mixed, all_full=True, baselines=replace(mixed.baselines, all_full=None))
    axes = Figure().subplots()
    draw_accuracy(axes, demo)
    labels = {line.get_label().partition(":")[0] for line in axes.lines}
    assert labels == {"all devices full", "each device alone"}
    assert demo_table.comparisons(demo)[0].startswith("each device alone")


def test_why_cp_counts_more_parameters_is_explained() -> None:
    full, personal = device("desktop-1", "full"), replace(device("t", "cp:2.0"), params=50_000)
    assert [line for line in demo_table.notes(result(full, personal)) if "params" in line] == [
        "cp: more params than full: a personal model is trained in addition."
    ]
    smaller = replace(personal, params=20_000)
    assert not any("params" in line for line in demo_table.notes(result(full, smaller)))


def test_baselines_train_together_and_alone(tmp_path: Path) -> None:
    x, y = digits()
    rows = {"held-out": np.arange(100)}
    rows |= {f"device-{label}": np.flatnonzero(y == label)[:32] for label in (0, 1)}
    for name, own in rows.items():
        np.savez(tmp_path / f"{name}.npz", x=x[own], y=y[own])
    held_out, *devices = (tmp_path / f"{name}.npz" for name in rows)
    trained = train_baselines(
        held_out, {path.stem: path for path in devices}, rounds=2, seed=3, full_too=True
    )
    assert trained.all_full is not None
    curves = [trained.all_full, *trained.alone.values()]
    assert [len(curve) for curve in curves] == [3, 3, 3]
    assert len({curve[0] for curve in curves}) == 1  # all begin with the same model
    for label in (0, 1):  # a device alone knows one digit
        share = np.mean(y[:100] == label)
        assert trained.alone[f"device-{label}"][2] == pytest.approx(share, abs=0.05)
    assert Baselines(**json.loads(json.dumps(asdict(trained)))) == trained
