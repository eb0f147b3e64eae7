"""Families on models that were not written for them, against PyTorch's autograd in float64.

The oracle knows a submodel by its table only: it composes the dense weights by einsum and runs the
user's own module.
"""

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import eager
from composed_weights import composed, twin
from edgetailor import TrainingConfig, split
from exporters.recording.capture import SharedRecording, capture
from foreign_models import CLASSES, FOREIGN
from models_for_tests import Photons
from oracles import cross_entropy
from parameters import half_of, half_quick, some_long
from profiles.errors import SpecError
from refusals import refused
from toolkit.cutting.cut_points import Cutter
from toolkit.families import recovering_family
from toolkit.submodels.global_model import GlobalModel, from_model
from toolkit.submodels.submodel import Submodel

BATCH = 4
DECAY = 0.03
SPECS = (
    "full",
    f"low-rank:0.3,keep=1,decay={DECAY}",
    f"low-rank:0.4,keep=0,decay={DECAY}",
    "slice:0.6",
    f"slice:0.95+low-rank:0.3,decay={DECAY}",
)
PENALTY = 3.0
BI_LEVEL = (f"cp:2.0,penalty={PENALTY}", f"pfedme,penalty={PENALTY}")


@dataclass
class Case:
    """A model with random statistics, a submodel of it and the tensors that a device receives."""

    model: nn.Module
    submodel: Submodel
    state: eager.State
    x: Tensor
    y: Tensor


@functools.cache
def recorded(name: str, seed: int) -> tuple[nn.Module, SharedRecording]:
    """A model with random statistics, recorded once for all of its submodels."""
    torch.manual_seed(seed)
    model = FOREIGN[name].build()
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.dim() == 1:
                value.add_(torch.rand(value.shape) * 0.5)
    return model, SharedRecording(model, FOREIGN[name].shape)


def build(name: str, spec: str, seed: int) -> Case:
    foreign = FOREIGN[name]
    model, recording = recorded(name, seed)
    with recording:
        submodel = split(model, spec, foreign.shape, TrainingConfig(batch_size=BATCH, momentum=0.0))
    torch.manual_seed(seed)
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    x = torch.randn(BATCH, *foreign.shape, dtype=torch.float64)
    y = torch.randint(CLASSES, (BATCH, *foreign.labels))
    if foreign.labels:
        y[torch.rand(y.shape) < 0.2] = -100  # positions to ignore
    return Case(copy.deepcopy(model).double(), submodel, state, x, y)


# Factors of every layer, and a slice's: on few models, of those that are quick to record.
SLOW = {
    **dict.fromkeys(("unet", "segmentation"), (SPECS[1], SPECS[2], SPECS[4])),
    "called-twice": (SPECS[2], SPECS[4]),
    "tied": (SPECS[1], SPECS[2], SPECS[4]),
    "stock-transformer": SPECS,
    "transformer": (SPECS[1], SPECS[2], SPECS[4]),
    "tagger": (SPECS[1], SPECS[2], SPECS[4]),
    "separable": (SPECS[1], SPECS[2], SPECS[4]),
    "signal": (SPECS[2], SPECS[4]),
    "recurrent": (SPECS[1], SPECS[2], SPECS[4]),
}
BOTH = list(itertools.product(FOREIGN, SPECS))
DRAWN = half_of(half_of(both for both in BOTH if both[1] not in SLOW.get(both[0], ())))
CASES = [both if both in DRAWN else pytest.param(both, marks=pytest.mark.long) for both in BOTH]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def c(request: pytest.FixtureRequest, seed: int) -> Case:
    name, spec = request.param
    return build(name, spec, seed)


def test_forward_is_that_of_the_dense_twin(c: Case) -> None:
    came = eager.call(c.submodel, "predict", c.state, x=eager.recorded(c.submodel, c.state, c.x))[
        "output"
    ]
    dense = composed(c.submodel.program.tensors, c.state)
    expected = functional_call(c.model.eval(), dense, (c.x,))
    torch.testing.assert_close(came, expected, rtol=1e-10, atol=1e-10)


def test_gradients_are_autograds(c: Case) -> None:
    parameters = [e for e in c.submodel.program.tensors if e.role == "parameter"]
    new = eager.call(
        c.submodel,
        "train",
        c.state,
        x=eager.recorded(c.submodel, c.state, c.x),
        y=c.y,
        rate=1.0,
    )
    leaves = {e.name: c.state[e.name].clone().requires_grad_() for e in parameters}
    dense = composed(c.submodel.program.tensors, {**c.state, **leaves})
    model = twin(c.model, {str(e.stands_for) for e in parameters})
    statistics = {n: v.clone() for n, v in dense.items() if n in dict(model.named_buffers())}
    loss = cross_entropy(functional_call(model, {**dense, **statistics}, (c.x,)), c.y)
    torch.testing.assert_close(new["loss"], loss.detach(), rtol=1e-10, atol=1e-12)
    factorized = {e.stands_for for e in parameters if e.factor is not None}
    penalty = sum(dense[str(n)].square().sum() for n in factorized)
    (loss + DECAY / 2 * penalty).backward()
    for entry in parameters:
        gradient = leaves[entry.name].grad
        expected = torch.zeros(entry.shape, dtype=torch.float64) if gradient is None else gradient
        came = c.state[entry.name] - new[entry.name]
        error = float((came - expected).norm()) / max(float(expected.norm()), 1e-6)
        assert error < 1e-10, f"{entry.name}: {error:.1e}"
    for entry in c.submodel.program.tensors:
        if entry.role == "buffer":
            torch.testing.assert_close(new[entry.name], statistics[str(entry.stands_for)])


@pytest.mark.parametrize(
    ("name", "spec"),
    half_quick(
        some_long(
            itertools.product(FOREIGN, BI_LEVEL),
            *itertools.product(("stock-transformer", "transformer"), BI_LEVEL),
            *itertools.product(("tagger", "separable", "recurrent", "segmentation"), BI_LEVEL[:1]),
        )
    ),
)
def test_bi_level_steps_are_autograds(name: str, spec: str, seed: int) -> None:
    c = build(name, spec, seed)
    c.state |= eager.call(c.submodel, "personal_init", c.state)
    dense = composed(c.submodel.program.tensors, c.state)
    personal = {n: c.state[f"personal:{n}"] for n, _ in c.model.named_parameters()}
    for name_, value in personal.items():
        torch.testing.assert_close(value, dense[name_], rtol=1e-12, atol=1e-12)
        c.state[f"personal:{name_}"] = value + 0.1 * torch.randn_like(value)

    if spec.startswith("cp"):
        came = eager.call(c.submodel, "predict_local", c.state, x=c.x)["output"]
        expected = functional_call(c.model.eval(), dense, (c.x,))
        torch.testing.assert_close(came, expected, rtol=1e-9, atol=1e-9)

    new = eager.call(c.submodel, "personal_step", c.state, x=c.x, y=c.y, rate=1.0)
    leaves = {n: c.state[f"personal:{n}"].clone().requires_grad_() for n in personal}
    statistics = {n: v.clone() for n, v in dense.items() if n not in personal}
    loss = cross_entropy(functional_call(c.model.train(), {**leaves, **statistics}, (c.x,)), c.y)
    distance = sum((leaf - dense[n]).square().sum() for n, leaf in leaves.items())
    (loss + PENALTY / 2 * distance).backward()
    for name_, leaf in leaves.items():
        came = c.state[f"personal:{name_}"] - new[f"personal:{name_}"]
        error = float((came - leaf.grad).norm() / leaf.grad.norm())
        assert error < 1e-10, f"{name_}: {error:.1e}"

    if spec.startswith("cp"):
        check_factor_gradients(c)
    else:
        check_local_step(c, personal)


def check_factor_gradients(c: Case) -> None:
    """After one step from zero, Adam's first moment is a tenth of the gradient."""
    new = eager.call(c.submodel, "factor_step", c.state, rate=1.0)
    uploaded = [e for e in c.submodel.program.tensors if e.role == "parameter"]
    leaves = {e.name: c.state[e.name].clone().requires_grad_() for e in uploaded}
    dense = composed(c.submodel.program.tensors, {**c.state, **leaves})
    gaps = [
        (c.state[f"personal:{n}"] - dense[n]).square().sum() for n, _ in c.model.named_parameters()
    ]
    (PENALTY / 2 * torch.stack(gaps).sum()).backward()
    for entry in uploaded:
        expected = leaves[entry.name].grad
        came = new[f"adam_m:{entry.name}"] * 10
        error = float((came - expected).norm() / expected.norm())
        assert error < 1e-10, f"{entry.name}: {error:.1e}"


def check_local_step(c: Case, names: Mapping[str, Tensor]) -> None:
    """w - rate * lambda * (w - theta)."""
    new = eager.call(c.submodel, "local_step", c.state, rate=0.01)
    for name in names:
        old, theta = c.state[name], c.state[f"personal:{name}"]
        expected = old - 0.01 * PENALTY * (old - theta)
        torch.testing.assert_close(new[name], expected, rtol=1e-12, atol=1e-12)


def test_recovering_what_was_cut_is_the_dense_twin(c: Case) -> None:
    table = [e for e in c.submodel.program.tensors if e.role in ("parameter", "buffer")]
    model = GlobalModel(c.model.state_dict())
    shapes = {n: tuple(v.shape) for n, v in model.tensors.items()}
    family = recovering_family(c.submodel.spec)
    came = family.recover({e.name: c.state[e.name] for e in table}, table, shapes)
    expected = composed(c.submodel.program.tensors, c.state)
    assert came.keys() == {e.stands_for for e in table}
    for tensor, value in came.items():
        value = value if isinstance(value, Tensor) else value.dense()
        torch.testing.assert_close(value, expected[tensor], rtol=1e-10, atol=1e-12)


def test_long_skips_are_recorded_beside_the_path() -> None:
    foreign = FOREIGN["unet"]
    split(foreign.build(), "slice:bottom", foreign.shape)
    points = Cutter(capture(foreign.build(), foreign.shape)).points_by_module(BATCH)
    # Both skips; the trained part pools the lower one, which costs less than recording it too.
    assert points["bottom"].recorded == 6 * 8 * 8 + 8 * 4 * 4
    assert list(points) == ["down2", "bottom", "up2", "merge2", "merge1", "classify"]


def test_a_module_called_on_both_sides_of_a_cut_stays_as_it_is() -> None:
    foreign = FOREIGN["called-twice"]
    for spec in ("slice:middle", "slice:middle+low-rank:0.3"):
        table = split(foreign.build(), spec, foreign.shape).program.tensors
        trained = {e.stands_for for e in table if e.role == "parameter"}
        assert trained == {f"{n}.{own}" for n in ("middle", "head") for own in ("weight", "bias")}


@pytest.mark.parametrize(
    ("spec", "code", "values", "words"),
    [
        (
            *("low-rank:0.9", "spec.nothing-smaller", {"highest_ratio": 0.7}),
            r"layers.3: rank 9 would be no smaller; .*\. Ratios up to 0.7 make a layer",
        ),
        (
            *("low-rank:0.5,keep=99", "spec.nothing-smaller", {"highest_ratio": 0}),
            r"layers.5: one of the first 99 layers; head: the classifier\.$",
        ),
        ("slice:0.001", "spec.capacity-too-small", {"smallest_capacity": 0.027}, r"0\.027"),
        ("slice:head+low-rank:0.3", "spec.nothing-smaller", {"module": "head"}, "head"),
        ("slice:0.5+cp:2.0", "spec.invalid-combination", {}, r"low-rank\. .*slice:0\.42\+low-rank"),
        ("slice:0.5,skip=2+low-rank:0.5", "spec.invalid-combination", {}, "skip="),
        (
            *("cp:0.1", "spec.rate-out-of-range", {"rank": 53, "lowest": 0.667, "highest": 13}),
            r"rank 53, .* \(8, 2, 5\)\. .* from 0\.667 to 13 ",
        ),
        (
            *("cp:14", "spec.rate-out-of-range", {"lowest": 0.667, "highest": 13}),
            r"at a rate of 13, every weight has rank 1\. .* from 0\.667 to 13 ",
        ),
        ("cp:2.0+low-rank:0.5", "spec.invalid-combination", {}, r"only slice can .*low-rank\."),
        ("pfedme+low-rank:0.5", "spec.invalid-combination", {}, "only slice can"),
        ("pfedme:2", "spec.unexpected-size", {"size": "2"}, "'pfedme'"),
        ("width:1.5", "spec.invalid-size", {"size": "1.5"}, "channel ratio .* above 0 .* most 1"),
    ],
)
def test_what_this_model_cannot_give_is_refused_with_what_it_can(
    spec: str, code: str, values: dict[str, object], words: str, seed: int
) -> None:
    model, recording = recorded("signal", seed)
    with recording, refused(code, spec=spec, **values) as caught:
        split(model, spec, FOREIGN["signal"].shape)
    assert re.search(words, str(caught.value))


@pytest.mark.parametrize(
    ("inputs", "outputs"), some_long([(12, 8), (7, 13), (11, 3)], (7, 13), (11, 3))
)
def test_the_rates_that_a_refusal_names_are_accepted(inputs: int, outputs: int) -> None:
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Linear(outputs, 2))
    for rate in (0.001, 1000.0):
        with refused("spec.rate-out-of-range", spec=f"cp:{rate}") as caught:
            split(model, f"cp:{rate}", (inputs,))
        for named in ("lowest", "highest"):
            split(model, f"cp:{caught.value.values[named]}", (inputs,))


@pytest.mark.parametrize("inner", ["", "+low-rank:0.3"])
@pytest.mark.parametrize("name", some_long(["signal", "separable"], "separable"))
def test_the_capacity_that_a_refusal_names_is_accepted(name: str, inner: str, seed: int) -> None:
    shape, (model, recording) = FOREIGN[name].shape, recorded(name, seed)
    training = TrainingConfig(batch_size=999)  # hardly any weights count
    spec = f"slice:0.000001{inner}"
    with recording:
        with refused("spec.capacity-too-small", spec=spec) as caught:
            split(model, spec, shape, training)
        named = caught.value.values["smallest_capacity"]
        assert f"capacity {named}" in str(caught.value)
        full = split(model, "full", shape, training).counts
        smallest = split(model, "slice:head", shape, training).counts.capacity(full)
        assert smallest <= named <= 1.1 * smallest + 0.0005
        if not inner:
            split(model, f"slice:{named}", shape, training)


@pytest.mark.parametrize(
    ("name", "limit"), some_long([("separable", 0.45), ("signal", 0.71)], ("separable", 0.45))
)
def test_the_capacity_limit_holds_with_factors_too(name: str, limit: float, seed: int) -> None:
    """In one model factors add activations, in the other they save parameters."""
    shape, (model, recording) = FOREIGN[name].shape, recorded(name, seed)
    training = TrainingConfig(batch_size=BATCH)
    found = []
    with recording:
        full = split(model, "full", shape, training).counts
        places = Cutter(capture(model, shape)).points
        for module in dict.fromkeys(point.module for point in places):
            with contextlib.suppress(SpecError):
                found.append(split(model, f"slice:{module}+low-rank:0.3", shape, training).counts)
        came = split(model, f"slice:{limit}+low-rank:0.3", shape, training).counts
    assert came.capacity(full) == max(c.capacity(full) for c in found if c.capacity(full) <= limit)


def test_a_refusal_says_what_keeping_no_layer_dense_would_give() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    with refused("spec.nothing-smaller", spec="low-rank:0.25") as caught:
        split(model, "low-rank:0.25", (16,))
    assert "0: the first layer; " in str(caught.value)
    assert "With keep=0 0 would get smaller" in str(caught.value)
    split(model, "low-rank:0.25,keep=0", (16,))


def with_layer(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(4, CLASSES))


def without_weight() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = None  # type: ignore[assignment]
    return layer


def with_parameter(value: Tensor) -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.extra = nn.Parameter(value, requires_grad=False)
    return layer


def with_statistic(value: float) -> nn.Module:
    layer = nn.BatchNorm1d(4)
    layer.running_mean[1] = value
    return layer


def test_a_batch_norm_that_keeps_no_statistics_needs_no_momentum() -> None:
    norm = nn.BatchNorm1d(4, momentum=None, track_running_stats=False)
    assert split(with_layer(norm), "full", (4,)).counts.params == 4 + 4 + 4 * CLASSES + CLASSES


@pytest.mark.parametrize(
    ("layer", "code", "values"),
    [
        (nn.LazyLinear(4), "model.lazy-parameter", {"parameter": "0.weight"}),
        (without_weight(), "model.missing-weight", {"layer": "0"}),
        (
            with_parameter(torch.ones(2, dtype=torch.complex64)),
            "model.wrong-dtype",
            {"tensor": "0.extra", "dtype": "torch.complex64"},
        ),
        (
            with_parameter(torch.ones(2, dtype=torch.int64)),
            "model.wrong-dtype",
            {"tensor": "0.extra", "dtype": "torch.int64"},
        ),
        (
            with_parameter(torch.ones(0, 4)),
            "model.empty-parameter",
            {"parameter": "0.extra", "shape": [0, 4]},
        ),
        (
            with_parameter(torch.tensor([1.0, torch.nan])),
            "model.not-finite",
            {"tensor": "0.extra"},
        ),
        (with_statistic(torch.inf), "model.not-finite", {"tensor": "0.running_mean"}),
        (nn.BatchNorm1d(4, momentum=None), "model.cumulative-statistics", {"layer": "0"}),
        (Photons(), "model.random-numbers", {"layer": "0"}),
    ],
)
@pytest.mark.parametrize(
    "spec", ["full", "low-rank:0.5", "slice:0.5", "cp:2.0", "width:0.5", "depth:0.5"]
)
def test_models_that_no_family_takes(
    layer: nn.Module, code: str, values: dict[str, object], spec: str
) -> None:
    with refused(code, **values):
        split(with_layer(layer), spec, (4,))


def test_a_dropout_of_zero_is_none() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, CLASSES))
    assert split(model, "full", (4,)).counts.params == 4 * 6 + 6 + 6 * CLASSES + CLASSES
