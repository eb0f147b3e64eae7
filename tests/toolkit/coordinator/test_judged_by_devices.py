"""Devices judge the global models, with and without samples of the coordinator."""

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from bundles import CLASSES, tiny_cnn
from commands import edgetailor
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership, round_loop
from device_agent.federation.fleet_status import lines
from device_agent.federation.run_options import RunOptions
from device_agent.formats.evaluation_counts import EvaluationCounts, Judgement
from device_agent.formats.manifest import (
    EVALUATE,
    MANIFEST,
    Manifest,
    Port,
    Signature,
    encode,
)
from device_agent.formats.protocol.fleet import FederatedEvaluation, RoundResult, Status
from device_agent.formats.update import RECORD, TENSORS
from device_agent.training.batching import held_out
from device_agent.training.training_options import TrainingOptions
from log_messages import logged
from refusals import refused
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation
from toolkit.coordinator.rounds.falling_quality import falling
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.saved_rounds import model_file, saved_rounds
from toolkit.simulation.digits import digits
from toolkit.simulation.partition import dirichlet_split
from vector_fleet import (
    CONFIG,
    VectorModel,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    task,
    token,
    trained,
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

[[devices]]
name = "desktop"
submodel = "full"
count = {DEVICES - BOARDS}

[[devices]]
name = "board"
submodel = "slice:classifier"
count = {BOARDS}
"""
WITHOUT_SAMPLES = CONFIG.replace('held_out = "held_out.npz"\n', "")
WITHOUT_SAMPLES = WITHOUT_SAMPLES.replace(
    "[[devices]]", "[evaluation]\nshare = 0.5\n\n[[devices]]", 1
)


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
    with logged(messages=messages), running(config, federation(config)) as server:
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


class JudgedModel(VectorModel):
    """A VectorModel whose bundles say that devices can evaluate them."""

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        files = super().bundle(submodel, round_)
        manifest = msgspec.json.decode(files[MANIFEST], type=Manifest)
        metric = {"kind": "metric", "dtype": "float32", "shape": ()}
        labels = Port(name="y", kind="labels", dtype="int64", shape=(None,))
        evaluate = Signature(
            graph="train.onnx",
            inputs=(labels,),
            outputs=(Port(name="loss", **metric), Port(name="correct", **metric)),
        )
        judged = msgspec.structs.replace(manifest, signatures={EVALUATE: evaluate})
        return {**files, MANIFEST: encode(judged)}


SOUND = EvaluationCounts(samples=10, counted=10, correct=6, loss_sum=4.0)


def update_with(
    link: CoordinatorClient, folder: Path, evaluation: dict[str, Any] | None
) -> tuple[int, Path]:
    """An update for the open round, whose record has `evaluation`, whatever it says."""
    work, _, update = trained(link, folder)
    record = json.loads((update / RECORD).read_bytes())
    if evaluation is not None:
        record["evaluation"] = evaluation
    (update / RECORD).write_text(json.dumps(record))
    return work.round, update


def send(link: CoordinatorClient, round_: int, update: Path) -> None:
    link.send_tensors(round_, update / TENSORS)
    link.send_update(round_, (update / RECORD).read_bytes())


def both(counts: EvaluationCounts, **changes: Any) -> dict[str, Any]:
    """The field `evaluation` of a record: `counts` before and after, altered by `changes`."""
    before = {**msgspec.to_builtins(counts), **changes}
    return {"before": before, "after": before}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"correct": 11}, "update.unusable-evaluation"),
        ({"samples": 10**12}, "update.unusable-evaluation"),
        ({"loss_sum": -1.0}, "update.unusable-evaluation"),
        ({"loss_sum": 1e308}, "update.unusable-evaluation"),
        ({"correct": -1}, "update.malformed-record"),
        ({"samples": 10**30}, "update.malformed-record"),
        ({"loss_sum": "nan"}, "update.malformed-record"),
        ({"loss_sum": None}, "update.malformed-record"),
        ({"counted": 11}, "update.unfitting-evaluation"),
        ({"correct": None}, "update.unfitting-evaluation"),
        ({"absolute_sum": 0.1}, "update.unfitting-evaluation"),
        ({"classes": [[6, 3], [4, 3]]}, "update.unasked-evaluation"),
    ],
)
def test_hostile_counts_are_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    with running(configured(tmp_path, WITHOUT_SAMPLES), JudgedModel()) as server:
        link = enrol(server, tmp_path)["board-1"]
        round_, update = update_with(link, tmp_path / "hostile", both(SOUND, **changes))
        with refused(code):
            send(link, round_, update)
        round_, update = update_with(link, tmp_path / "sound", both(SOUND))
        send(link, round_, update)


def test_counts_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    with running(configured(tmp_path), JudgedModel()) as server:
        link = enrol(server, tmp_path)["board-1"]
        round_, update = update_with(link, tmp_path / "unasked", both(SOUND))
        with refused("update.unasked-evaluation"):
            send(link, round_, update)


def counts(correct: int, of: int, loss: float | None = None) -> EvaluationCounts:
    wrong = float(of - correct) if loss is None else loss
    return EvaluationCounts(samples=of, counted=of, correct=correct, loss_sum=wrong)


def test_a_restart_goes_on_with_the_judging_of_the_last_model(tmp_path: Path) -> None:
    config = configured(tmp_path, WITHOUT_SAMPLES.replace("rounds = 3", "rounds = 1"))
    with running(config, JudgedModel()) as server:
        links = enrol(server, tmp_path)
        for number, (name, link) in enumerate(links.items()):
            evaluation = None if name == "board-1" else both(counts(number, 4))
            send(link, *update_with(link, tmp_path / name, evaluation))
        first, second, board = links.values()
        assert board.work().state in ("wait", "finished")  # it has sent no counts
        work = task(first)
        assert (work.state, work.round) == ("judge", 1)
        assert work.evaluation is not None
        offered = next(offer.sha256 for offer in work.files if offer.name == MANIFEST)
        with refused("round.other-bundle"):
            first.send_judgement(1, Judgement(bundle="0" * 64, counts=counts(3, 4)))
        with refused("update.unusable-evaluation"):
            first.send_judgement(1, Judgement(bundle=offered, counts=counts(5, 4)))
        first.send_judgement(1, Judgement(bundle=offered, counts=counts(3, 4)))
        first.send_judgement(1, Judgement(bundle=offered, counts=counts(3, 4)))  # safe to repeat
        with refused("round.closed"):
            board.send_judgement(1, Judgement(bundle=offered, counts=counts(1, 4)))
        assert first.work().state == "finished"
        assert server.coordinator.status().state == "judging"
    with running(config, JudgedModel()) as server:
        first, second = (joined(server, tmp_path / str(number)) for number in (0, 1))
        assert_soon(lambda: first.work().state == "finished")
        work = task(second)
        offered = next(offer.sha256 for offer in work.files if offer.name == MANIFEST)
        second.send_judgement(1, Judgement(bundle=offered, counts=counts(1, 4)))
        assert_soon(lambda: server.coordinator.status().state == "finished")
        last = server.coordinator.status().history[-1].devices
        assert_soon(lambda: not server.coordinator.store.final_evaluation.answers())
    assert last is not None
    assert (last.devices, last.correct, last.counted, last.loss) == (2, 4, 8, 0.5)
    assert (last.accuracy, last.worst_accuracy, last.trained_loss) == (0.5, 0.25, None)


def test_devices_that_do_not_judge_in_time_are_left_out(tmp_path: Path) -> None:
    text = WITHOUT_SAMPLES.replace("rounds = 3", "rounds = 1\ndeadline_s = 3")
    with running(configured(tmp_path, text), JudgedModel()) as server:
        for number, (name, link) in enumerate(enrol(server, tmp_path).items()):
            send(link, *update_with(link, tmp_path / name, both(counts(number, 4))))
        assert_soon(lambda: server.coordinator.status().state == "finished", 30)
        initial, last = server.coordinator.status().history
    assert last.devices is None
    assert initial.devices is not None
    assert (initial.devices.correct, initial.devices.counted) == (3, 12)


def test_somebody_has_to_judge(tmp_path: Path) -> None:
    text = CONFIG.replace('held_out = "held_out.npz"\n', "")
    with refused("federation.not-judged"):
        Server(configured(tmp_path, text), VectorModel(), Path("fleet.toml"))
    static = text.replace("epochs = 1", 'epochs = 1\nbatch_norm = "static"')
    static = static.replace("[[devices]]", "[evaluation]\nshare = 0.5\n\n[[devices]]", 1)
    with refused("federation.no-statistics"):
        Server(configured(tmp_path, static), VectorModel(), Path("fleet.toml"))
    site = "site = true\n" + WITHOUT_SAMPLES
    with refused("option.conflict"):
        Server(configured(tmp_path, site), VectorModel(), Path("fleet.toml"))


def test_the_share_cannot_change_later(tmp_path: Path) -> None:
    with running(configured(tmp_path, WITHOUT_SAMPLES)):
        pass
    with refused("state.other-federation", key="evaluation.share"):
        text = WITHOUT_SAMPLES.replace("share = 0.5", "share = 0.4")
        Server(configured(tmp_path, text), VectorModel(), Path("fleet.toml"))


def judged_round(round_: int, accuracy: float | None, loss: float | None = None) -> RoundResult:
    """A round that a device has judged; not yet if `accuracy` is None."""
    figure = None
    if accuracy is not None:
        device = DeviceCounts("board", counts(round(100 * accuracy), 100, loss))
        figure = federated_evaluation(round_ + 1, [device])
    return RoundResult(round=round_, accuracy=None, loss=None, updates=1, devices=figure)


def test_the_warning_rests_on_the_devices_without_samples() -> None:
    falls = [judged_round(n, a) for n, a in enumerate([0.9, 0.8, 0.7, 0.6, None])]
    warning = falling(falls)
    assert warning is not None
    assert "quality on the devices fell 3 rounds in a row" in warning
    assert "accuracy 0.6000" in warning
    assert falling([*falls[:-2], judged_round(3, 0.75), falls[-1]]) is None


def test_models_that_nobody_has_judged_yet_do_not_stay_for_ever(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for round_ in range(5):
        store.add_result(judged_round(round_, None), f"model {round_}".encode())
    store.close()
    saved = saved_rounds(tmp_path)
    assert [round_.round for round_ in saved if round_.kept] == [3, 4]
    assert not any(round_.best for round_ in saved)


def test_the_best_round_has_the_highest_accuracy_on_the_devices(tmp_path: Path) -> None:
    """Whatever its loss is. The judgement of a round comes with the result of the next."""
    store = Store(tmp_path, keep="best")
    accuracies = [0.5, 0.9, 0.7]
    for round_ in range(4):
        earlier = judged_round(round_ - 1, accuracies[round_ - 1], loss=100.0 * round_)
        received = earlier.devices if round_ else None
        store.add_result(judged_round(round_, None), f"model {round_}".encode(), received)
    store.close()
    saved = saved_rounds(tmp_path)
    assert [round_.round for round_ in saved if round_.best] == [1]
    assert [round_.round for round_ in saved if round_.kept] == [1, 3]


def test_the_status_shows_the_judgement_in_80_columns() -> None:
    shown = lines(
        Status(
            state="judging",
            round=3,
            rounds=3,
            expected_devices=1,
            devices=[],
            history=[judged_round(2, 0.8125), judged_round(3, None)],
            model_round=3,
        )
    )
    assert max(map(len, shown)) <= 80
    assert shown[0] == "round 3 of 3, judging"  # the newest model has no judgement yet
    assert " ".join(" ".join(shown[1:]).split()) == (
        "the devices judge the model of round 2: accuracy 0.8100 on 1 device (worst tenth: "
        "accuracy 0.8100)"
    )
