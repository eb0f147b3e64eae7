"""The devices of a whole federation judge its global models: the figures, and what shows them."""

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from bundles import CLASSES, tiny_cnn
from commands import edgetailor
from device_agent.federation import membership, round_loop
from device_agent.federation.run_options import RunOptions
from device_agent.formats.protocol.fleet import FederatedEvaluation
from device_agent.training.batching import held_out
from device_agent.training.training_options import TrainingOptions
from log_messages import logged
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.storage.saved_rounds import model_file, saved_rounds
from toolkit.simulation.digits import digits
from toolkit.simulation.partition import dirichlet_split
from vector_fleet import (
    assert_soon,
    configured,
    running,
    token,
)

DEVICES, ALPHA, SHARE, ROUNDS = 12, 0.3, 0.25, 2
BOARDS = 4
JUDGED = f"""
model = "bundles:tiny_cnn"
input_shape = [1, 6, 6]
rounds = {ROUNDS}
port = 0

[training]
batch_size = 16
epochs = 1
learning_rate = 0.05

[evaluation]
share = {SHARE}
by_class = true
committee = 5

[[devices]]
name = "desktop"
submodel = "full"
count = {DEVICES - BOARDS}

[[devices]]
name = "board"
submodel = "slice:classifier"
count = {BOARDS}
"""


Played = tuple[Path, list[Path], list[str]]
"""The state folder of a whole federation, the data of its devices, and what was logged."""


def small_digits() -> tuple[np.ndarray, np.ndarray]:
    """Digits in the sample shape and the classes of `tiny_cnn`."""
    x, y = digits()
    known = y < CLASSES
    return np.ascontiguousarray(x[known][:, :, 1:7, 1:7]), y[known]


@pytest.fixture(scope="module")
def judged(
    tmp_path_factory: pytest.TempPathFactory,
) -> Played:
    """The state folder of a whole federation, the data of its devices, and each device's log."""
    folder = tmp_path_factory.mktemp("judged")
    x, y = small_digits()
    parts = dirichlet_split(y, DEVICES, ALPHA, np.random.default_rng(7))
    data = [folder / f"data-{number}.npz" for number in range(DEVICES)]
    for path, rows in zip(data, parts, strict=True):
        np.savez(path, x=x[rows], y=y[rows])
    config = configured(folder / "coordinator", JUDGED)
    messages: list[str] = []
    with (
        logged(messages=messages),
        running(config, federation(config), messages.append) as server,
    ):
        states = []
        for number in range(DEVICES):
            kind = "desktop" if number < DEVICES - BOARDS else "board"
            states.append(folder / f"state-{number}")
            membership.join(server.url, token(config, kind), f"m-{number}", states[-1])

        def take_part(number: int) -> None:
            options = RunOptions(
                data=str(data[number]),
                state=states[number],
                training=TrainingOptions(threads=1),
                report_classes=number % 2 == 0,
            )
            round_loop.run(options, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))

        agents = [threading.Thread(target=take_part, args=(n,)) for n in range(DEVICES)]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join()
        assert_soon(lambda: server.coordinator.rounds.phase == "finished")
    return config.state, data, messages


def pooled(state: Path, round_: int, data: list[Path]) -> list[dict[str, Any]]:
    """What plain PyTorch counts with the saved model of `round_`, for each device."""
    model = tiny_cnn()
    model.load_state_dict(load_file(model_file(state, round_)))
    counts = []
    for path in data:
        with np.load(path) as arrays:
            rows = held_out(len(arrays["y"]), SHARE)
            x, y = torch.from_numpy(arrays["x"][rows]), torch.from_numpy(arrays["y"][rows])
        with torch.no_grad():
            output = model.eval()(x)
        right = output.argmax(dim=1) == y
        loss = float(functional.cross_entropy(output.double(), y, reduction="sum"))
        classes = [(int((y == c).sum()), int(right[y == c].sum())) for c in range(CLASSES)]
        counts.append({"n": len(y), "right": int(right.sum()), "loss": loss, "classes": classes})
    return counts


def figure_of(state: Path, round_: int) -> FederatedEvaluation:
    (saved,) = [saved for saved in saved_rounds(state) if saved.round == round_]
    assert saved.loss is None
    assert saved.devices is not None
    return saved.devices


@pytest.mark.parametrize("round_", range(ROUNDS + 1))
def test_figures_are_those_of_pooled_samples(judged: Played, round_: int) -> None:
    """Of the initial model, of each round, and of the last, which no round trains."""
    state, data, _ = judged
    expected, came = pooled(state, round_, data), figure_of(state, round_)
    total, right = (sum(counts[key] for counts in expected) for key in ("n", "right"))
    assert (came.devices, came.samples, came.counted, came.correct) == (
        DEVICES,
        total,
        total,
        right,
    )
    assert came.accuracy == right / total
    assert came.loss == pytest.approx(sum(c["loss"] for c in expected) / total, rel=1e-5)
    accuracies = sorted(counts["right"] / counts["n"] for counts in expected)
    assert came.mean_accuracy == pytest.approx(np.mean(accuracies), rel=1e-12)
    assert came.worst_accuracy == pytest.approx(np.mean(accuracies[:2]), rel=1e-12)
    kinds = {"desktop": expected[:-BOARDS], "board": expected[-BOARDS:]}
    assert {kind: (k.devices, k.samples, k.correct) for kind, k in came.kinds.items()} == {
        kind: (len(own), sum(c["n"] for c in own), sum(c["right"] for c in own))
        for kind, own in kinds.items()
    }
    reporting = expected[::2]
    assert came.reporting_classes == len(reporting)
    assert came.classes == [
        tuple(np.sum([counts["classes"][label] for counts in reporting], axis=0))
        for label in range(CLASSES)
    ]
    # The last model is judged, but not trained further.
    assert (came.trained_accuracy is None) == (round_ == ROUNDS)


def test_a_round_by_device(judged: Played, tmp_path: Path) -> None:
    state, data, _ = judged
    shown = edgetailor("rounds", str(state), "--round", "1", "--json", cwd=tmp_path)
    by_device = json.loads(shown.stdout)["by_device"]
    expected = [
        {
            "labels": c["n"],
            "accuracy": c["right"] / c["n"],
            "loss": pytest.approx(c["loss"] / c["n"]),
        }
        for c in pooled(state, 1, data)
    ]
    accuracies = [own["accuracy"] for own in by_device]
    assert accuracies == sorted(accuracies)  # the worst first
    found = [{key: own[key] for key in ("labels", "accuracy", "loss")} for own in by_device]
    assert len(found) == len(expected) == DEVICES
    assert all(counts in found for counts in expected)
    trained = sum(own["labels"] * own["trained_accuracy"] for own in by_device)
    total = sum(own["labels"] for own in by_device)
    assert trained / total == pytest.approx(figure_of(state, 1).trained_accuracy)
    text = edgetailor("rounds", str(state), "--round", "1", cwd=tmp_path).stdout
    assert max(map(len, text.splitlines())) <= 80
    kind = figure_of(state, 1).kinds["board"]
    rows = [line.split() for line in text.splitlines()]
    assert [
        "kind", "board", str(kind.devices), str(kind.counted), f"{kind.accuracy:.1%}",
        f"{kind.trained_accuracy:.1%}",
    ] in rows  # fmt: skip
    classes = figure_of(state, 1).classes
    assert classes is not None
    shares = [f"{right / of:.1%}" if of else "" for of, right in classes]
    assert [[str(n), share] for n, share in enumerate(shares) if share] == [
        row for row in rows if len(row) == 2 and row[0].isdigit()
    ]
    # The last round's counts came without an update.
    last = edgetailor("rounds", str(state), "--round", str(ROUNDS), "--json", cwd=tmp_path)
    assert json.loads(last.stdout)["by_device"] == []


def test_the_best_round_is_that_of_the_devices(
    judged: Played,
) -> None:
    state, _, messages = judged
    saved = saved_rounds(state)
    accuracies = [figure_of(state, number).accuracy or 0.0 for number in range(ROUNDS + 1)]
    best = max(range(ROUNDS + 1), key=lambda number: (accuracies[number], number))
    assert [round_.round for round_ in saved if round_.best] == [best]
    history = json.loads((state / "history.json").read_text())["history"]
    assert [entry["devices"]["accuracy"] for entry in history] == accuracies
    told = [line for line in messages if line.startswith("Evaluation: 25% of")]
    assert len(told) == 2 * DEVICES  # at the join, and when the agent begins


def test_a_committee_of_agents_accepts_each_model(judged: Played) -> None:
    """A member evaluates the model that it then trains, so both give the same counts."""
    *_, messages = judged
    accepted = [line for line in messages if "the committee has accepted the new model" in line]
    assert [line.partition(":")[0] for line in accepted] == ["Round 1", "Round 2"]
    assert "Round 1: a committee of 5 devices judges the new model." in messages
    evaluated = [line for line in messages if line.startswith("Evaluating the new model of round")]
    # With three votes for the model it is decided, perhaps before the others have begun.
    assert sum(line.endswith("round 1") for line in evaluated) in (3, 4, 5)


def test_rounds_are_listed_in_80_columns(judged: Played, tmp_path: Path) -> None:
    state, _, _ = judged
    listed = edgetailor("rounds", str(state), cwd=tmp_path).stdout
    heading, *lines = listed.splitlines()
    assert "The best round has the best accuracy on the devices." in lines
    assert heading.split() == ["round", "devices", "worst", "trained", "updates", "model", "note"]
    assert max(map(len, listed.splitlines())) <= 80
    figure = figure_of(state, 1)
    assert f"{figure.accuracy:.1%}" in lines[1]
    assert f"{figure.worst_accuracy:.1%}" in lines[1]
    document = json.loads(edgetailor("rounds", str(state), "--json", cwd=tmp_path).stdout)
    as_read = json.loads(json.dumps(asdict(figure)))
    assert document["rounds"][1]["devices"] == as_read
