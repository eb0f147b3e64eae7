"""Sweeps: keys and grids, runs that fail or are finished, the front and limits, the command."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commands
from bundles import write_noise
from commands import edgetailor, refusal
from models_for_tests import CLASSES, INPUT_SHAPE
from profiles.errors import InputError
from refusals import refused
from toolkit.cli.printed.sweep_table import show_sweep
from toolkit.coordinator.federation_file.sweep_table import grid_of_table
from toolkit.simulation.comparison import Row
from toolkit.simulation.logged_figures import Observer
from toolkit.simulation.results import RoundResult
from toolkit.simulation.simulate import simulate
from toolkit.simulation.simulation_config import load_simulation
from toolkit.simulation.sweeps import sweep as sweeps
from toolkit.simulation.sweeps.grid import combinations, folder_names, grid_of_options, short_keys
from toolkit.simulation.sweeps.sweep import runs_of, sweep
from toolkit.simulation.sweeps.trade_off_plot import draw_trade_off
from toolkit.simulation.sweeps.trade_offs import Limits, Point, best_of, front
from toolkit.toml_files import with_values

GRID = {"training.learning_rate": [0.05, 0.1]}
TEXT = f"""
model = "models_for_tests:relu_cnn"
input_shape = {list(INPUT_SHAPE)}
rounds = 2
[training]
batch_size = 8
[simulation]
data = "data.npz"
[[devices]]
name = "desk"
submodel = "full"
[[devices]]
name = "board"
submodel = "full"
count = 2
"""


@pytest.fixture
def file(tmp_path: Path, seed: int) -> Path:
    write_noise(tmp_path / "data.npz", 40, seed, INPUT_SHAPE, CLASSES)
    (tmp_path / "fleet.toml").write_text(TEXT)
    return tmp_path / "fleet.toml"


@contextmanager
def unwatched(rounds: int) -> Iterator[Observer]:
    yield lambda result: None


def scores_of(folder: Path) -> list[float]:
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["accuracy"] for line in lines]


def test_the_command(file: Path, tmp_path: Path) -> None:
    """The second run fails, and the others go on. A second call repeats only that one."""
    specs = ("full", "slice:nowhere", "width:0.5")
    arguments = (
        "simulate",
        file,
        "--rounds",
        1,
        "--grid",
        f"devices.board.submodel={'|'.join(specs)}",
    )
    done = edgetailor(*arguments, cwd=tmp_path)
    out = tmp_path / "fleet-sweep"
    assert done.code == 2, done.stderr
    full, narrow = (scores_of(out / f"submodel={name}")[-1] for name in ("full", "width-0.5"))
    sent = [
        sum(json.loads(line)[key] for key in ("bytes_down", "bytes_up"))
        for name in ("full", "width-0.5")
        for line in (out / f"submodel={name}" / "history.jsonl").read_text().splitlines()
    ]
    best = 1 if full > narrow else 2
    shares = [f"{total / 1000:.1f} kB" for total in sent]
    each = [f"{total / 3000:.1f} kB" for total in sent]
    first = "1*" if full > narrow else "1 "
    lines = done.stdout.splitlines()
    assert lines[:6] == [
        "row   submodel  last 5     sent  a round",
        f"{first}        full  {full:>6.1%}  {shares[0]:>7}  {each[0]:>7}",
        f"2*   width:0.5  {narrow:>6.1%}  {shares[1]:>7}  {each[1]:>7}",
        "",
        "* No other row is as good for fewer bytes.",
        f"Best: row {best}, devices.board.submodel = {specs[0 if best == 1 else 2]}.",
    ]
    failed = " ".join(lines[6:])
    assert failed.startswith("Failed: devices.board.submodel = slice:nowhere: 'slice:nowhere': ")
    assert max(map(len, lines)) <= 80
    assert (out / "trade-off.png").read_bytes().startswith(b"\x89PNG")
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/global.safetensors")}
    most = math.ceil(sent[1] / 3)
    again = edgetailor(*arguments, "--json", "--most-traffic", f"{most}B", cwd=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    printed = json.loads(again.stdout)
    assert [run["bytes"] for run in printed["runs"]] == sent
    assert [run["last_accuracy"]["mean"] for run in printed["runs"]] == [full, narrow]
    assert [run["within_limits"] for run in printed["runs"]] == [False, True]
    assert printed["best"] == 2
    assert [own["values"] for own in printed["failed"]] == [{"devices.board.submodel": specs[1]}]
    assert (again.code, again.stderr.count("it is finished already")) == (2, 2)


def test_a_table_of_the_file_is_the_same_sweep(file: Path, tmp_path: Path) -> None:
    """In every notation of TOML."""
    text = file.read_text()
    notations = (
        "[sweep]\ntraining.learning_rate = [0.05, 0.1]",
        '[sweep]\n"training.learning_rate" = [0.05, 0.1, 0.05]',
        "[sweep.training]\nlearning_rate = [0.05, 0.1]",
    )
    for notation in notations:
        file.write_text(f"{text}{notation}\n")
        grid = load_simulation(file).sweep
        assert grid is not None
        assert grid_of_table(grid) == GRID
        run = runs_of(file, tmp_path / "out", grid_of_table(grid))[0]
        assert "sweep" not in run.config.model_dump(mode="json")  # so the table may grow
    for wrong, words in (
        ("training.learning_rate = 0.1", "it must be a list of the values to try"),
        ("training.learning_rate = []", "it must be a list of the values to try"),
        ('training.epochs = [1]\n"training.epochs" = [2]', "has `training.epochs` twice"),
    ):
        file.write_text(f"{text}[sweep]\n{wrong}\n")
        with pytest.raises(InputError, match=words):
            load_simulation(file)


def test_the_command_refuses_before_any_run(file: Path, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        return commands.refused(tmp_path, "simulate", file, *arguments)

    assert said("--grid", "quorum=1|2", "--grid", "devices.bord.submodel=full") == (
        f"{file} has no `devices.bord.submodel`: nothing here is called 'bord': did you mean "
        "'board'? The names here are desk, board."
    )
    assert "unknown key `training.epoch`: did you mean 'epochs'?" in said(
        "--grid", "training.epoch=1"
    )
    assert "--most-memory needs a prediction" in said("--grid", "quorum=1", "--most-memory", "5MB")
    assert "are for sweeps: give --grid" in said("--most-traffic", "5MB")
    assert "both set `seed`" in said("--seed", 1, "--grid", "simulation.seed=1|2")


def test_an_interrupted_sweep_continues(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results are those of single simulations of files with the same values."""
    began: list[str] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        began.append(Path(arguments[1]).name)
        if len(began) == 2:
            raise KeyboardInterrupt
        return simulate(*arguments, **options)

    monkeypatch.setattr(sweeps, "simulate", interrupted)
    out = tmp_path / "out"
    runs = runs_of(file, out, GRID)
    with pytest.raises(KeyboardInterrupt):
        sweep(file, out, runs, watch=unwatched)
    assert sweep(file, out, runs, watch=unwatched) == []
    names = [f"learning_rate={rate}" for rate in (0.05, 0.1)]
    assert began == [names[0], names[1], names[1]]
    for name, rate in zip(names, (0.05, 0.1), strict=True):
        file.write_text(TEXT.replace("[training]", f"[training]\nlearning_rate = {rate}"))
        simulate(file, tmp_path / name)
        assert scores_of(out / name) == scores_of(tmp_path / name)
        model = (out / name / "global.safetensors").read_bytes()
        assert model == (tmp_path / name / "global.safetensors").read_bytes()


def test_folders_that_are_not_of_this_sweep(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with refused("simulation.other-folder", path=str(out)):
        sweep(file, out, runs_of(file, out, GRID), watch=unwatched)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_values_of_keys() -> None:
    content = {"rounds": 2, "devices": [{"name": "board", "count": 1}, {"name": "phone"}]}
    values = {"rounds": 5, "devices.phone.count": 3, "training.epochs": 2}
    assert with_values(Path("f.toml"), content, values) == {
        "rounds": 5,
        "devices": [{"name": "board", "count": 1}, {"name": "phone", "count": 3}],
        "training": {"epochs": 2},
    }
    assert content["devices"] == [{"name": "board", "count": 1}, {"name": "phone"}]
    for key, code in (
        ("rounds.x", "config.unknown-key"),
        ("devices.phon", "config.unknown-key"),
        ("devices.phone", "config.wrong-type"),
    ):
        with refused(code, key=key):
            with_values(Path("f.toml"), content, {key: 1})


def test_grids() -> None:
    grid = grid_of_options(["training.epochs=1|2|1", "devices.board.submodel=full|width:0.5"])
    assert grid == {"training.epochs": [1, 2], "devices.board.submodel": ["full", "width:0.5"]}
    runs = combinations(grid)
    assert [[*run.values()] for run in runs] == [
        [1, "full"], [1, "width:0.5"], [2, "full"], [2, "width:0.5"],
    ]  # fmt: skip
    assert folder_names(runs)[1] == "epochs=1+submodel=width-0.5"
    long = folder_names([{"x": "a" * 300}, {"x": "a" * 299 + "b"}, {"x": "a:b"}, {"x": "A-B"}])
    assert len({name.lower() for name in long}) == 4
    assert max(map(len, long)) < 255
    assert short_keys(["devices.a.submodel", "devices.b.submodel"]) == {
        "devices.a.submodel": "a.submodel", "devices.b.submodel": "b.submodel",
    }  # fmt: skip
    for wrong in ("x", "=1", "x=1||2", "x="):
        with refused("simulation.bad-grid", text=wrong):
            grid_of_options([wrong])
    with refused("simulation.bad-grid"):
        grid_of_options(["x=1", "x=2"])


def random_point(draw: np.random.Generator) -> Point:
    """Few different values, so that points share costs and scores."""
    result = RoundResult(
        round=1, accuracy=float(draw.integers(5)) / 5, loss=0.0, clients=3, failed=1, diverged=0,
        bytes_down=int(draw.integers(1, 6)) * 4, bytes_up=0, seconds=1.0, simulated_s=5.0,
        memory=int(draw.integers(1, 6)),
    )  # fmt: skip
    return Point({}, Row("", [Path()], [[result]], 9))


def test_the_front_and_the_best_within_limits(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    points = [random_point(draw) for _ in range(12)]
    figures = [
        (own.row.histories[0][0].accuracy, own.row.histories[0][0].bytes_down) for own in points
    ]
    undominated = {
        (score, cost)
        for score, cost in figures
        if not any(a >= score and b <= cost and (a, b) != (score, cost) for a, b in figures)
    }
    came = front(points, "bytes")
    assert {(own.score.mean, own.costs["bytes"]) for own in came} == undominated
    assert len(came) == len(undominated)
    within = [
        result.accuracy
        for result in (own.row.histories[0][0] for own in points)
        if result.bytes_down / 4 <= 3 and result.memory <= 3
    ]
    best = best_of(points, Limits(traffic=3, memory=3))
    assert (best and best.quality) == max(within, default=None)
    assert best_of(points, Limits(traffic=0)) is None
    draw_trade_off(points, tmp_path / "plot.png")
    picture = (tmp_path / "plot.png").read_bytes()
    assert int.from_bytes(picture[20:24], "big") == 3 * 540  # 4.5 inches of 120 dots


def test_a_wide_table_has_two_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """A key whose values are all the same has no column."""
    point = random_point(np.random.default_rng(0))
    keys = ("devices.board.submodel", "devices.desk.submodel", "training.loss", "seed")
    ends = (("low-rank:0.25,decay=0.001", "full"), ("slice:0.5", "full"), ("mse", "mae"), (1, 1))
    points = [
        replace(point, values=dict(zip(keys, values, strict=True)))
        for values in zip(*ends, strict=True)
    ]
    show_sweep(points, [], Limits(), keys)
    values, figures, _ = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in values.splitlines()] == [
        ["row", "board.submodel", "desk.submodel", "loss"],
        ["1*", "low-rank:0.25,decay=0.001", "slice:0.5", "mse"],
        ["2", "full", "full", "mae"],
    ]
    assert figures.splitlines()[0].split() == [
        "row", "last", "5", "sent", "a", "round", "memory", "simulated",
    ]  # fmt: skip
    assert [line.split()[0] for line in figures.splitlines()[1:]] == ["1*", "2"]


def test_a_command_without_a_finished_run_says_why(file: Path, tmp_path: Path) -> None:
    done = edgetailor("simulate", file, "--grid", "devices.board.submodel=slice:x", cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert (done.code, done.stdout, len(lines)) == (2, "", 1)
    assert refusal(done).startswith("'slice:x': the model cannot be cut there.")
