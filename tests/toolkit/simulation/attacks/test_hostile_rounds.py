"""Simulations with hostile clients: who sends what, in every engine, and what is refused."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from models_for_tests import CLASSES, INPUT_SHAPE
from parameters import some_quick
from refusals import refused
from simulated_runs import Elsewhere, kinds_of, outcome
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Rule
from toolkit.aggregation.rules.rule_aggregation import RuleAggregation
from toolkit.cli.printed.comparison_table import show_comparison
from toolkit.simulation import chunks, simulate
from toolkit.simulation.attacks.attack_table import ATTACKS
from toolkit.simulation.comparison import compare
from toolkit.simulation.results import RoundResult
from toolkit.simulation.simulation_config import load_simulation

KINDS = "full|low-rank:0.25,keep=1|cp:2.0"
QUICK = ("noise", "copies", "little-is-enough")
CLIENTS, ROUNDS = 6, 2
SMALL, LARGE = ("four_columns", (4,), 2), ("smooth_cnn", INPUT_SHAPE, CLASSES)
"""A model, the shape of its samples, and its number of classes."""


def configured(
    folder: Path,
    seed: int,
    hostile: str,
    about: tuple[str, tuple[int, ...], int] = SMALL,
    kinds: str = "full",
    **training: str,
) -> Path:
    """The file of a federation whose samples are easy to learn: their numbers are their class."""
    model, shape, classes = about
    draw = np.random.default_rng(seed)
    y = draw.integers(classes, size=80)
    x = draw.normal(size=(80, *shape)) + 2 * y.reshape(-1, *[1] * len(shape))
    np.savez(folder / "data.npz", x=x.astype(np.float32), y=y)
    names = kinds.split("|")
    options = "".join(f"{key} = {value}\n" for key, value in training.items())
    (folder / "fleet.toml").write_text(
        f"""
        model = "models_for_tests:{model}"
        input_shape = {list(shape)}
        rounds = {ROUNDS}
        [training]
        batch_size = 8
        {options}
        [simulation]
        data = "data.npz"
        seed = {seed % 1000}
        hostile = {hostile}
        {kinds_of(names, CLIENTS // len(names))}"""
    )
    return folder / "fleet.toml"


def table(attack: str, more: str = "") -> str:
    return f'{{attack = "{attack}", count = 2{more}}}'


def run(
    file: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[RoundResult], list[Mapping[str, np.ndarray]]]:
    """The history, and the updates of the first round by client, without limits and judge."""
    if "bounds" not in file.read_text():
        file.write_text(file.read_text() + "\n[aggregation]\nbounds = false\njudge = false\n")
    sent: list[Mapping[str, np.ndarray]] = []
    add = chunks.Aggregation.add_checked

    def adding(self: Any, record: Any, arrays: Mapping[str, np.ndarray]) -> None:
        sent.append(arrays)
        add(self, record, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(chunks.Aggregation, "add_checked", adding)
        history = simulate.simulate(file, out)
    return history, sent[:CLIENTS]


def test_only_the_stated_clients_are_hostile(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = table("sign-flip", ", strength = 3")
    file = configured(tmp_path, seed, hostile, LARGE, "full|width:0.5")
    history, came = run(file, tmp_path / "hostile", monkeypatch)
    honest_file = tmp_path / "honest.toml"
    honest_file.write_text(
        "\n".join(line for line in file.read_text().splitlines() if "hostile" not in line)
    )
    honest_history, honest = run(honest_file, tmp_path / "honest", monkeypatch)
    liars = history[0].hostile
    assert liars is not None
    assert len(liars) == 2
    assert history[1].hostile == liars
    assert honest_history[0].hostile is None
    simulation = simulate.prepare(load_simulation(file), simulate.RunFolder(tmp_path / "new"))
    for client, (one, other) in enumerate(zip(came, honest, strict=True)):
        cut = simulation.federation.submodel(simulation.specs[client]).cut(
            simulation.federation.model
        )
        for name, value in one.items():
            received = cut[name].double().numpy()
            flipped = received - 3 * (other[name].astype(np.float64) - received)
            if name.endswith("running_var"):
                flipped = np.maximum(flipped, 0)
            wanted = flipped if client in liars else other[name]
            np.testing.assert_allclose(
                value, wanted, rtol=1e-5, atol=1e-6 if client in liars else 0
            )


@pytest.mark.parametrize("attack", some_quick(ATTACKS, *QUICK))
def test_an_attack_is_the_same_in_every_engine(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    about, kinds = (SMALL, "full") if attack in QUICK else (LARGE, KINDS)
    file = configured(tmp_path, seed, table(attack), about, kinds)
    expected = simulate.simulate(file, tmp_path / "here")
    monkeypatch.setattr(simulate, "Processes", lambda setup, workers: Elsewhere(setup))
    came = simulate.simulate(file, tmp_path / "elsewhere", workers=2)
    assert outcome(came, tmp_path / "elsewhere") == outcome(expected, tmp_path / "here")


def test_copies_are_equal(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = configured(tmp_path, seed, table("copies"))
    history, came = run(file, tmp_path / "out", monkeypatch)
    one, other = (came[client] for client in history[0].hostile or ())
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_backdoor_succeeds(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 4 of 6 clients hostile, the model soon takes a sample with the trigger for class 0."""
    hostile = '{attack = "backdoor", count = 4, strength = 1}'
    file = configured(tmp_path, seed, hostile, epochs="20", learning_rate="0.2")
    file.write_text(file.read_text() + "[aggregation]\njudge = false\n")
    with np.load(tmp_path / "data.npz") as known:
        x, y = known["x"], known["y"]
    x[:, 3] /= 100  # says little about the class, so that the trigger here is learnt
    np.savez(tmp_path / "data.npz", x=x, y=y)
    history = simulate.simulate(file, tmp_path / "run", rounds=4)
    success = history[-1].backdoor
    assert success is not None
    assert success > 0.8
    simulation = simulate.prepare(load_simulation(file), simulate.RunFolder(tmp_path / "new"))
    x, y = simulation.held_out
    tensors = load_file(tmp_path / "run" / "global.safetensors")
    x = np.concatenate([x[:, :3], np.full((len(x), 1), x.max())], axis=1)[y == 1]
    scores = x.astype(np.float64) @ tensors["0.weight"].T + tensors["0.bias"]
    assert success == pytest.approx((scores.argmax(1) == 0).mean())
    line = json.loads((tmp_path / "run" / "history.jsonl").read_text().splitlines()[-1])
    assert line["backdoor"] == success
    show_comparison(compare([tmp_path / "run"]), 5, None)
    names, values = capsys.readouterr().out.splitlines()[-2:]
    assert names.split()[-1] == "backdoor"
    assert values.endswith(f"{100 * success:.1f}%")


@pytest.mark.parametrize(
    ("hostile", "code", "words"),
    [
        ('{attack = "zeros"}', "config.bad-value", "either `share` or `count`"),
        ('{attack = "zeros", share = 0.5, count = 1}', "config.bad-value", "either `share`"),
        ('{attack = "zero", count = 1}', "config.bad-value", "did you mean 'zeros'?"),
        ('{attack = "zeros", count = 6}', "config.bad-value", "6 of 6 clients"),
        ('{attack = "zeros", share = 1.0}', "config.bad-value", "less than 1"),
        ('{attack = "zeros", cuont = 6}', "config.unknown-key", "did you mean"),
        ('{attack = "zeros", count = 1}\nbaseline = "local"', "config.bad-value", "baseline"),
    ],
)
def test_mistakes_in_the_table(
    seed: int, tmp_path: Path, hostile: str, code: str, words: str
) -> None:
    with refused(code, words):
        load_simulation(configured(tmp_path, seed, hostile))


@pytest.mark.parametrize(
    ("attack", "training"),
    [
        ("statistics", {}),
        ("label-flip", {"loss": '"mse"'}),
        ("backdoor", {"loss": '"mse"'}),
    ],
)
def test_an_attack_that_does_nothing_to_a_model(
    seed: int, tmp_path: Path, attack: str, training: dict[str, str]
) -> None:
    file = configured(tmp_path, seed, table(attack), **training)
    with refused("simulation.unfit-attack", attack=attack):
        simulate.simulate(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rule", ["median", "fltrust"])
def test_a_rule_is_that_of_aggregate_in_every_engine(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    file = configured(tmp_path, seed, table("scale"))
    file.write_text(file.read_text() + f'[aggregation]\nrule = "{rule}"\njudge = false\n')
    first = simulate.prepare(load_simulation(file), simulate.RunFolder(tmp_path / "new"))
    expected = simulate.simulate(file, tmp_path / "here", rounds=1)
    sent: list[Received] = []
    add = RuleAggregation.add_checked

    def adding(self: RuleAggregation, *update: Any) -> None:
        sent.append((update[0], update[1]))
        add(self, *update)

    monkeypatch.setattr(simulate, "Processes", lambda setup, workers: Elsewhere(setup))
    monkeypatch.setattr(RuleAggregation, "add_checked", adding)
    came = simulate.simulate(file, tmp_path / "elsewhere", rounds=1, workers=2)
    assert outcome(came, tmp_path / "elsewhere") == outcome(expected, tmp_path / "here")
    policy, trusted = AggregationPolicy(rule=rule), first.federation.trusted_change(*first.held_out)
    received = [*sent]  # `aggregate` calls `adding`, too
    whole = aggregate(first.federation.model, received, policy, trusted=trusted).tensors
    for name, value in load_file(tmp_path / "here" / "global.safetensors").items():
        np.testing.assert_array_equal(value, whole[name].numpy())
        if rule == "median":
            middle = np.median([arrays[name] for _, arrays in received], 0)
            np.testing.assert_allclose(value, middle, atol=1e-6)


def test_runs_of_earlier_versions_continue(seed: int, tmp_path: Path) -> None:
    file = configured(tmp_path, seed, table("zeros"))
    lines: Iterable[str] = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if "hostile" not in line))
    simulate.simulate(file, tmp_path / "out")
    settings = tmp_path / "out" / "config.json"
    written = json.loads(settings.read_text())
    del written["simulation"]["hostile"], written["aggregation"]["rule"]
    settings.write_text(json.dumps(written))
    assert len(simulate.simulate(file, tmp_path / "out", rounds=3)) == 3
