"""`edgetailor compare` against numpy, on folders that a test writes."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from commands import edgetailor, refusal
from device_agent.formats.protocol.fleet import FederatedEvaluation, HeldOutFigures, KindEvaluation
from profiles.text_formatting import format_duration
from refusals import refused
from toolkit.simulation.comparison import compare, simulated_times
from toolkit.simulation.results import RoundResult, RunFolder, read_run

ROUNDS, CLIENTS = 5, 7


def settings(seed: int, **more: object) -> dict[str, object]:
    table = {"seed": seed, "alpha": 0.5, "clients": CLIENTS}
    return {"rounds": ROUNDS, "seed": seed, "simulation": table, **more}


def write_run(folder: Path, about: dict[str, object], history: list[RoundResult]) -> Path:
    run = RunFolder(folder)
    run.begin(about, force=False)
    for result in history:
        run.finish_round(result, b"")
    return folder


def random_history(draw: np.random.Generator, **more: object) -> list[RoundResult]:
    return [
        RoundResult(
            round=round_ + 1,
            loss=float(draw.random()),
            clients=3,
            diverged=0,
            bytes_down=int(draw.integers(10**6)),
            bytes_up=int(draw.integers(10**6)),
            seconds=float(draw.random()),
            **{
                "accuracy": float(draw.random()),
                "local_accuracy": float(draw.random()),
                "simulated_s": float(draw.random()) * 5000,
                "memory": int(draw.integers(10**8)),
                **more,
            },
        )
        for round_ in range(ROUNDS)
    ]


def table_of(history: list[RoundResult], key: str) -> np.ndarray:
    return np.array([getattr(result, key) for result in history], float)


def test_runs_of_several_seeds_are_one_row(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    histories = [random_history(draw) for _ in range(4)]
    folders = [
        write_run(tmp_path / f"slices-{number}", settings(number), history)
        for number, history in enumerate(histories[:3])
    ]
    folders.append(write_run(tmp_path / "other", settings(0, epochs=2), histories[3]))
    row, single = compare(folders)
    assert (row.name, single.name) == ("slices", "other")
    runs = histories[:3]
    accuracy = np.array([table_of(run, "accuracy") for run in runs])
    sent = np.array([table_of(run, "bytes_down") + table_of(run, "bytes_up") for run in runs])
    days = [table_of(run, "simulated_s").sum() / 24 / 3600 for run in runs]
    assert row.memory == max(table_of(run, "memory").max() for run in runs)
    for came, expected in (
        (row.final, accuracy[:, -1]),
        (row.best, accuracy.max(1)),
        (row.own_models, [run[-1].local_accuracy for run in runs]),
        (row.sent, sent.sum(1)),
        (row.seconds, [table_of(run, "seconds").sum() for run in runs]),
        (row.simulated_s, [table_of(run, "simulated_s").sum() for run in runs]),
        (row.mean_of_last(3), accuracy[:, -3:].mean(1)),
        (row.mean_of_last(99), accuracy.mean(1)),
        (row.traffic, [s.sum() / CLIENTS / day for s, day in zip(sent, days, strict=True)]),
    ):
        assert came == pytest.approx((np.mean(expected), np.std(expected, ddof=1)))
    assert single.final == (histories[3][-1].accuracy, None)


def test_a_second_run_with_the_same_seeds_is_no_sample(seed: int, tmp_path: Path) -> None:
    history = random_history(np.random.default_rng(seed))
    folders = [
        write_run(tmp_path / name, settings(number, state=str(tmp_path / name)), history)
        for number, name in ((0, "run-0"), (1, "run-1"), (1, "again-1"))
    ]
    first, again = compare(folders)
    assert (list(first.folders), list(again.folders)) == (folders[:2], folders[2:])
    assert again.final.deviation is None


def test_a_regression_is_judged_by_its_loss(seed: int, tmp_path: Path) -> None:
    missing = dict.fromkeys(("accuracy", "local_accuracy", "simulated_s"))
    history = random_history(np.random.default_rng(seed), **missing)
    (row,) = compare([write_run(tmp_path / "run", settings(0), history)])
    losses = table_of(history, "loss")
    assert (row.final.mean, row.best.mean) == (losses[-1], losses.min())
    assert (row.own_models, row.simulated_s) == (None, None)


def test_rounds_bytes_and_time_until_an_accuracy(tmp_path: Path) -> None:
    """The first round that reaches it counts, even if later rounds do not."""
    scores = [[0.1, 0.5, 0.9, 0.2, 0.9], [0.1, 0.2, 0.3, 0.9, 0.1], [0.5, 0.5, 0.5, 0.5, 0.5]]
    for seed, accuracies in enumerate(scores):
        history = [
            msgspec.structs.replace(
                result, accuracy=own, bytes_down=2 * 10**6, bytes_up=10**6, simulated_s=60.0
            )
            for own, result in zip(
                accuracies, random_history(np.random.default_rng(seed)), strict=True
            )
        ]
        write_run(tmp_path / f"run-{seed}", settings(seed), history)
    (row,) = compare([tmp_path / "run-0", tmp_path / "run-1"])
    assert row.reaching(0.9) == (
        (3.5, pytest.approx(0.5**0.5)),
        (10.5e6, pytest.approx(4.5e12**0.5)),
        (210, pytest.approx(1800**0.5)),
    )
    (row,) = compare([tmp_path / f"run-{seed}" for seed in range(3)])
    assert row.reaching(0.9) is None
    shown = edgetailor("compare", "run-0", "run-1", "--target", "0.9", cwd=tmp_path).stdout
    head, *cells = shown.splitlines()[3:]
    assert head.endswith("rounds to 0.9  sent by then  time by then")
    assert cells[0].split()[-7:] == ["4", "10.5", "MB", "3", "min", "30", "s"]
    options = ("--target", "0.9", "--curves", "curves.png", "--json")
    printed = json.loads(edgetailor("compare", "run-0", "run-1", *options, cwd=tmp_path).stdout)
    assert printed["runs"][0]["simulated_s_to_target"]["mean"] == 210
    shown = edgetailor("compare", "run-2", "--target", "0.9", cwd=tmp_path).stdout
    assert shown.splitlines()[4].endswith("never")


def test_a_regression_reaches_a_loss(tmp_path: Path) -> None:
    history = [
        msgspec.structs.replace(result, accuracy=None, loss=loss)
        for loss, result in zip(
            (0.9, math.nan, 0.4, 0.7, 0.3), random_history(np.random.default_rng(0)), strict=True
        )
    ]
    (row,) = compare([write_run(tmp_path / "run", settings(0), history)])
    reached = row.reaching(0.5)
    assert reached is not None
    assert (reached.rounds.mean, reached.simulated_s is None) == (3, False)


def test_scores_by_simulated_time(seed: int, tmp_path: Path) -> None:
    history = random_history(np.random.default_rng(seed))
    (row,) = compare([write_run(tmp_path / "run", settings(0), history)])
    (times,) = map(simulated_times, row.histories)
    np.testing.assert_allclose(times, np.cumsum([result.simulated_s for result in history]))


@pytest.mark.parametrize(
    ("missing", "column"), [("simulated_s", "own"), ("local_accuracy", "simulated")]
)
def test_the_command(seed: int, tmp_path: Path, missing: str, column: str) -> None:
    draw = np.random.default_rng(seed)
    runs = ["a-long-name-of-a-run-0", "a-long-name-of-a-run-1"]
    for number, name in enumerate(runs):
        write_run(tmp_path / name, settings(number), random_history(draw, **{missing: None}))
    shown = edgetailor("compare", *runs, "--curves", "curves.png", cwd=tmp_path).succeeded()
    head, row, _, *needs = shown.stdout.splitlines()
    columns = ["run", "seeds", "final", "best", "sent", "time"]
    columns.insert(4 if column == "own" else 6, column)
    assert head.split() == columns
    assert row.startswith("a-long-name-of-a-run ")
    assert max(len(head), len(row)) <= 80
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    panels = 2 if missing == "simulated_s" else 3
    assert int.from_bytes(picture[20:24], "big") == panels * 540  # 4.5 inches of 120 dots
    printed = json.loads(edgetailor("compare", *runs, "--json", cwd=tmp_path).stdout)
    (expected,) = compare([tmp_path / result for result in runs])
    assert printed["runs"][0]["final_accuracy"] == expected.final._asdict()
    assert f"{100 * expected.final.mean:.1f}±{100 * expected.final.deviation:.1f}%" in row
    assert max(map(len, needs)) <= 80
    assert needs[0].split()[:3] == ["run", "last", "5"]
    day = [] if missing == "simulated_s" else ["a", "day"]
    assert needs[0].split()[3:] == [*day, "memory"]
    assert printed["runs"][0]["memory_bytes"] == expected.memory
    if expected.simulated_s is not None:
        assert printed["runs"][0]["bytes_per_device_and_day"] == expected.traffic._asdict()
        assert printed["runs"][0]["simulated_s"] == expected.simulated_s._asdict()
        assert row.endswith(f" {format_duration(expected.simulated_s.mean)}")


def test_folders_without_results(tmp_path: Path) -> None:
    assert refusal(edgetailor("compare", "nothing", cwd=tmp_path))
    with refused("simulation.no-results", path=str(tmp_path)):
        compare([tmp_path])
    write_run(tmp_path / "begun", settings(0), [])
    with refused("simulation.no-rounds", path=str(tmp_path / "begun")):
        compare([tmp_path / "begun"])
    (tmp_path / "begun" / "history.jsonl").write_bytes(msgspec.json.encode({"round": 1}) + b"\n")
    with refused("simulation.damaged-folder"):
        compare([tmp_path / "begun"])
    for text in ("{", "{}", '{"simulation": 1}'):
        (tmp_path / "begun" / "config.json").write_text(text)
        with refused("simulation.damaged-folder"):
            compare([tmp_path / "begun"])


def test_losses_that_are_no_numbers(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    for number in range(2):
        history = random_history(draw, accuracy=None)
        history[-1] = msgspec.structs.replace(history[-1], loss=math.inf)
        write_run(tmp_path / f"run-{number}", settings(number), history)
    done = edgetailor("compare", "run-0", "run-1", "--json", "--curves", "c.png", cwd=tmp_path)
    (row,) = msgspec.json.decode(done.stdout)["runs"]
    assert row["final_loss"] == {"mean": None, "deviation": None}
    best = [
        min(result.loss for result in read_run(tmp_path / f"run-{n}")[1][:-1]) for n in range(2)
    ]
    assert row["best_loss"]["mean"] == pytest.approx(np.mean(best))


def judged(accuracy: float | None, kinds: tuple[str, ...]) -> FederatedEvaluation:
    """How ten devices judge a model; the others' figures follow from that of all."""

    def kind(lower: float) -> KindEvaluation:
        own = None if accuracy is None else accuracy - lower
        trained = None if own is None else own + 0.05
        return KindEvaluation(
            devices=5, samples=50, counted=50, correct=None, accuracy=own, loss=1 + lower,
            trained_accuracy=trained, trained_loss=0.9 + lower,
        )  # fmt: skip

    return FederatedEvaluation(
        **vars(kind(0.0)), round=ROUNDS, mean_accuracy=accuracy, mean_loss=1.0,
        worst_accuracy=None if accuracy is None else accuracy / 2, worst_loss=3.0,
        kinds={name: kind(0.1 * number) for number, name in enumerate(kinds)},
    )  # fmt: skip


def write_judged(folder: Path, seed: int, **more: object) -> None:
    history = random_history(np.random.default_rng(seed))
    history[-1] = msgspec.structs.replace(history[-1], **more)
    write_run(folder, settings(seed, model=folder.name.partition("-")[0]), history)


def rows_of(shown: str) -> list[list[str]]:
    assert max(map(len, shown.splitlines())) <= 80
    return [line.split() for line in shown.splitlines()]


def test_runs_side_by_side_by_class(tmp_path: Path) -> None:
    counts = {
        "iid-0": [(10, 9), (20, 10), (0, 0)], "iid-1": [(10, 8), (20, 12), (0, 0)],
        "skewed": [(10, 4), (20, 20), (5, 1)],
    }  # fmt: skip
    for seed, (name, classes) in enumerate(counts.items()):
        write_judged(tmp_path / name, seed, held_out=HeldOutFigures(classes=classes))
    done = edgetailor("compare", *counts, "--by", "class", cwd=tmp_path)
    rows = rows_of(done.stdout)
    assert ["class", "iid", "skewed", "difference"] in rows
    assert ["0", "85.0%", "40.0%", "-45.0"] in rows
    assert ["1", "55.0%", "100.0%", "+45.0"] in rows
    assert ["2", "20.0%"] in rows
    assert ["mean", "70.0%", "53.3%", "-16.7"] in rows
    printed = json.loads(edgetailor("compare", *counts, "--json", cwd=tmp_path).stdout)
    assert printed["runs"][0]["classes"] == [[20, 17], [40, 22], [0, 0]]
    write_judged(tmp_path / "none", 9)
    alone = edgetailor("compare", "none", "--by", "class", cwd=tmp_path).stdout
    assert alone.endswith("No run has figures by class.\n")


def test_runs_side_by_side_by_device(tmp_path: Path) -> None:
    write_judged(tmp_path / "iid-0", 0, devices=judged(0.8, ("board", "phone")))
    write_judged(tmp_path / "iid-1", 1, devices=judged(0.9, ("board", "phone")))
    write_judged(tmp_path / "skewed", 2, devices=judged(0.5, ("board",)))
    runs = ("iid-0", "iid-1", "skewed")
    rows = rows_of(edgetailor("compare", *runs, "--by", "device", cwd=tmp_path).stdout)
    assert ["devices", "iid", "skewed", "difference"] in rows
    assert ["all", "85.0%", "50.0%", "-35.0"] in rows
    assert ["all,", "trained", "90.0%", "55.0%", "-35.0"] in rows
    assert ["worst", "tenth", "42.5%", "25.0%", "-17.5"] in rows
    assert ["kind", "board", "85.0%", "50.0%", "-35.0"] in rows
    assert ["kind", "phone,", "trained", "80.0%"] in rows
    write_judged(tmp_path / "loss", 3, accuracy=None, devices=judged(None, ()))
    rows = rows_of(edgetailor("compare", "loss", "--by", "device", cwd=tmp_path).stdout)
    assert ["all,", "trained", "0.9000"] in rows


def test_a_regression_shows_its_errors(tmp_path: Path) -> None:
    for seed, rmse in enumerate((0.5, 0.7)):
        figures = HeldOutFigures(rmse=rmse, mae=rmse / 2)
        write_judged(tmp_path / f"line-{seed}", seed, accuracy=None, held_out=figures)
    rows = rows_of(edgetailor("compare", "line-0", "line-1", cwd=tmp_path).stdout)
    assert rows[-2:] == [["run", "RMSE", "MAE"], ["line", "0.6000±0.1414", "0.3000±0.0707"]]


def test_metrics_of_a_loss_are_compared(tmp_path: Path) -> None:
    """A cell is empty if not all seeds of a run have the metric."""
    for seed, iou in enumerate((0.5, 0.7)):
        metrics = {"iou": iou, "distance": 1.5} if seed else {"iou": iou}
        write_judged(
            tmp_path / f"own-{seed}", seed, accuracy=None, held_out=HeldOutFigures(metrics=metrics)
        )
    figures = HeldOutFigures(metrics={"distance": 2.0})
    write_judged(tmp_path / "other", 0, accuracy=None, held_out=figures)
    runs = ("own-0", "own-1", "other")
    rows = rows_of(edgetailor("compare", *runs, cwd=tmp_path).stdout)
    assert rows[-3:] == [["run", "iou", "distance"], ["own", "0.6000±0.1414"], ["other", "2.0000"]]
    printed = json.loads(edgetailor("compare", *runs, "--json", cwd=tmp_path).stdout)["runs"]
    assert [list(run["metrics"]) for run in printed] == [["iou"], ["distance"]]
    assert printed[0]["rmse"] is None
