"""Where static batch norm takes its statistics from, against numpy."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edgetailor import Federation, TrainingConfig
from refusals import refused
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.model_evaluation import CHUNK
from vector_fleet import messages_to

STATIC = TrainingConfig(batch_norm="static")
SHAPE = (3,)
FILE = f"""
model = "{__name__}:two_norms"
input_shape = [3]
rounds = 1
held_out = "held_out.npz"
{{}}

[training]
batch_norm = "static"

[[devices]]
name = "phone"
submodel = "full"
"""


def two_norms() -> nn.Module:
    layers = OrderedDict(
        first=nn.Linear(3, 5),
        norm=nn.BatchNorm1d(5),
        relu=nn.ReLU(),
        second=nn.Linear(5, 4),
        norm2=nn.BatchNorm1d(4),
        classifier=nn.Linear(4, 3),
    )
    return nn.Sequential(layers)


def samples(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(2, 3, (count, *SHAPE)).astype(np.float32)
    return x, draw.integers(0, 3, count)


def statistics_of(federation_: Federation) -> dict[str, np.ndarray]:
    return {n: v.numpy().copy() for n, v in federation_.model.tensors.items() if "running" in n}


def by_numpy(federation_: Federation, chunks: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Means and unbiased variances of what the norms see, averaged over the chunks."""
    w = {
        name: value.numpy().astype(np.float64) for name, value in federation_.model.tensors.items()
    }
    statistics: list[dict[str, np.ndarray]] = []
    for x in chunks:
        first = x @ w["first.weight"].T + w["first.bias"]
        normed = (first - first.mean(0)) / np.sqrt(first.var(0) + 1e-5)
        normed = normed * w["norm.weight"] + w["norm.bias"]
        second = np.maximum(normed, 0) @ w["second.weight"].T + w["second.bias"]
        statistics.append(
            {
                "norm.running_mean": first.mean(0),
                "norm.running_var": first.var(0, ddof=1),
                "norm2.running_mean": second.mean(0),
                "norm2.running_var": second.var(0, ddof=1),
            }
        )
    return {
        name: np.mean([chunk_statistics[name] for chunk_statistics in statistics], axis=0)
        for name in statistics[0]
    }


def test_statistics_are_those_of_the_given_samples(seed: int) -> None:
    x, _ = samples(seed, 2 * CHUNK)
    model = Federation(f"{__name__}:two_norms", SHAPE, STATIC, statistics=x)
    judged: list[dict[str, np.ndarray]] = []
    for held_out in (samples(seed + 1, 40), samples(seed + 2, 7)):
        model.evaluate(*held_out)
        judged.append(statistics_of(model))
    expected = by_numpy(model, np.split(x, 2))
    assert judged[0].keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(judged[0][name], value, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(judged[0][name], judged[1][name])


def test_the_figure_is_of_a_model_with_these_statistics(seed: int) -> None:
    (x, _), (held_out, y) = samples(seed, 64), samples(seed + 1, 40)
    model = Federation(f"{__name__}:two_norms", SHAPE, STATIC, statistics=x)
    _, loss = model.evaluate(held_out, y)
    model.model.load_into(model.module)
    with torch.no_grad():
        logits = model.module.eval()(torch.from_numpy(held_out)).double().numpy()
    logits -= logits.max(1, keepdims=True)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    assert loss == pytest.approx(expected.mean())


def test_without_samples_the_held_out_ones_serve_with_one_warning(seed: int) -> None:
    x, y = samples(seed, 40)
    messages: list[str] = []
    with messages_to(messages.append):
        model = Federation(f"{__name__}:two_norms", SHAPE, STATIC)
        for _ in range(2):
            model.evaluate(x, y)
    for name, value in by_numpy(model, [x]).items():
        np.testing.assert_allclose(statistics_of(model)[name], value, rtol=1e-4, atol=1e-5)
    (message,) = messages
    assert "Set `statistics` to training samples" in message


def test_no_warning_if_no_samples_are_missing() -> None:
    messages: list[str] = []
    with messages_to(messages.append):
        Federation(f"{__name__}:two_norms", SHAPE, STATIC, statistics=samples(0, 8)[0])
        Federation(f"{__name__}:two_norms", SHAPE, TrainingConfig())
    assert messages == []


def test_samples_without_static_batch_norm_are_refused() -> None:
    x, _ = samples(0, 8)
    with refused("option.conflict", options=["statistics", "batch_norm"]):
        Federation(f"{__name__}:two_norms", SHAPE, TrainingConfig(), statistics=x)


def test_the_federations_file_names_them(tmp_path: Path, seed: int) -> None:
    (x, y), judged = samples(seed, 64), samples(seed + 1, 40)
    np.savez(tmp_path / "train.npz", x=x, y=y)
    (tmp_path / "f.toml").write_text(FILE.format('statistics = "train.npz"'))
    model = federation(load_config(tmp_path / "f.toml"))
    model.evaluate(*judged)
    for name, value in by_numpy(model, [x]).items():
        np.testing.assert_allclose(statistics_of(model)[name], value, rtol=1e-4, atol=1e-5)

    np.savez(tmp_path / "train.npz", x=x[:, :2], y=y)
    with refused("data.wrong-shape", "`statistics`"):
        federation(load_config(tmp_path / "f.toml"))
