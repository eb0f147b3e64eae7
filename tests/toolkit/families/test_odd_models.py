"""Unusual code in users' models: it is computed correctly or refused by name."""

import copy
import itertools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

import eager
from edgetailor import TrainingConfig, split
from exporters.recording.capture import capture
from parameters import half_quick
from refusals import refused
from toolkit import inspection
from toolkit.factor_layers.cp_layers import with_cp_factors
from toolkit.families.low_rank import factorized_layer
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import Optimizer
from toolkit.submodels.submodel import Submodel

C = 5
Change = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """Three layers, with an unusual operation between them."""

    def __init__(self, odd: Change = lambda _, y: y) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, C)
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        y = self.odd(self, torch.tanh(self.a(x)))
        return self.h(torch.tanh(self.b(y)))


def written(_: nn.Module, y: Tensor) -> Tensor:
    y = y * 1
    y[:, :4] = 0
    y[:, 5:].mul_(3)
    return y


def predicted(model: nn.Module, submodel: Submodel, x: Tensor) -> Tensor:
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    return eager.call(submodel, "predict", state, x=eager.recorded(submodel, state, x))["output"]


def assert_right(model: nn.Module, spec: str, shape: tuple[int, ...] = (6,)) -> Submodel:
    submodel = split(model, spec, shape)
    x = torch.randn(4, *shape, dtype=torch.float64)
    came = predicted(model, submodel, x)
    torch.testing.assert_close(came, model.double().eval()(x), rtol=1e-9, atol=1e-9)
    return submodel


@pytest.mark.parametrize("spec", ["full", "slice:b"])
def test_writes_through_views(spec: str) -> None:
    assert_right(Net(written), spec)


def test_a_model_that_writes_through_its_strides_is_not_sliced() -> None:
    def strided(_: nn.Module, y: Tensor) -> Tensor:
        y = y * 1
        y.as_strided((2,), (1,), 0).zero_()
        return y

    with refused("model.cannot-slice", operator="aten.zero_.default"):
        split(Net(strided), "slice:b", (6,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.conv2, self.norm2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)).flatten(1))


def test_a_residual_block_that_writes_in_place_is_sliced() -> None:
    assert_right(Residual(), "slice:second", (3, 4, 4))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_layers_with_hooks_stay_dense(kind: str) -> None:
    model = Net()
    getattr(model.b, kind)(lambda *given: (given[-1][0] if "pre" in kind else given[-1]) * 3)
    with refused("spec.nothing-smaller", "b: it has hooks"):
        split(model, "low-rank:0.3,keep=1", (6,))
    assert_right(model, "full")


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.cumsum(1)


def test_a_custom_backward_pass_that_mixes_elements_is_refused() -> None:
    with refused("model.custom-gradient", "test_odd_models.py, line"):
        split(Net(lambda _, y: Mixed.apply(y)), "full", (6,))


def test_an_autocast_does_not_change_the_recording() -> None:
    def lower(_: object, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y + y @ y.T @ y

    assert_right(Net(lower), "full")


def test_the_norm_limit_of_an_embedding_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(20, 8, max_norm=0.5), nn.Flatten(), nn.Linear(24, C))
    with refused("model.writes-own-tensor", "remove max_norm", tensor="0.weight"):
        split(model, "full", (3,))


def test_weight_norm() -> None:
    assert_right(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, C)),
        "full",
    )


CALLS = itertools.count(1)
ODD_WHEN_RECORDED: dict[str, Change] = {
    "counts": lambda _, y: y * next(CALLS),
    "exports": lambda _, y: y * 2 if torch.compiler.is_exporting() else y,
    "exports to predict": lambda own, y: (
        y * 2 if torch.compiler.is_exporting() and not own.training else y
    ),
}


@pytest.mark.parametrize("odd", ODD_WHEN_RECORDED)
def test_a_model_that_computes_something_else_when_recorded_is_refused(odd: str) -> None:
    with refused("model.recording-differs", what="output"):
        split(Net(ODD_WHEN_RECORDED[odd]), "full", (6,))


@pytest.mark.parametrize(
    "odd",
    [
        lambda _, y: y.mean(0, keepdim=True),
        lambda _, y: torch.cat([y, y]),
    ],
)
def test_an_output_without_the_batch_is_refused(odd: Change) -> None:
    with refused("model.wrong-output") as caught:
        split(Net(odd), "full", (6,))
    assert str(caught.value.values["shape"]) in str(caught.value)


OUTPUT = "model.wrong-output"
UNFIT: dict[str, tuple[Change, str, dict[str, object], str]] = {
    "text": (lambda _, y: "logits", OUTPUT, {}, "no tensor"),
    "empty": (lambda _, y: (), OUTPUT, {}, "no tensor"),
    "double": (lambda _, y: y.double(), OUTPUT, {"dtype": "torch.float64"}, "float32"),
    "whole numbers": (lambda _, y: y.long(), OUTPUT, {"dtype": "torch.int64"}, "float32"),
    "roots": (lambda _, y: (y - 9).sqrt(), "model.result-not-finite", {"what": "output"}, "output"),
    "masked": (
        lambda _, y: y.masked_fill(y > 0, -math.inf),
        *("model.result-not-finite", {"what": "output"}, r"masked_fill\(mask, -1e9\)"),
    ),
    "steep": (
        lambda _, y: (y * 0).sqrt(),
        *("model.result-not-finite", {"what": "gradient"}, "gradient"),
    ),
    "cut off": (lambda _, y: y.detach(), "model.backward-fails", {}, "element 0 of"),
    "written": (
        lambda _, y: y.tanh().mul_(2),
        *("model.backward-fails", {}, "modified by an inplace operation: .*backward"),
    ),
    "asserted": (
        lambda _, y: y if torch.compiler.is_exporting() else y.missing,
        *("model.forward-fails", {}, r"'missing' \(.*test_odd_models\.py, line"),
    ),
}


@pytest.mark.parametrize("odd", UNFIT)
def test_an_output_that_cannot_be_trained_on_is_refused(odd: str) -> None:
    change, code, values, words = UNFIT[odd]

    class Tail(Net):
        def forward(self, x: Tensor) -> Tensor:
            return change(self, super().forward(x))

    with refused(code, **values) as caught:
        split(Tail(), "full", (6,))
    assert re.search(words, str(caught.value))


@pytest.mark.parametrize(
    ("odd", "code", "operator", "words"),
    [
        (
            lambda _, y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)),
            *("model.control-flow", "cond", r"torch\.where"),
        ),
    ],
)
def test_operators_without_a_runtime_are_refused(
    odd: Change, code: str, operator: str, words: str
) -> None:
    with refused(code, operator=operator) as caught:
        split(Net(odd), "full", (6,))
    assert re.search(words, str(caught.value))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(n, "sgd") for n in ("x", "y", "rate", "loss", "correct", "output")]
    + [("adam_steps", "adam")],
)
def test_a_parameter_called_like_a_port_is_refused(name: str, optimizer: Optimizer) -> None:
    """Otherwise a parameter called `rate` could be fed in place of the learning rate."""
    model = Net(lambda own, y: y * getattr(own, name))
    model.register_parameter(name, nn.Parameter(torch.tensor(0.7)))
    with refused("model.reserved-name", name=name):
        split(model, "full", (6,), TrainingConfig(optimizer=optimizer))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb"])
def test_names_that_a_recorded_model_cannot_have_are_refused(name: str) -> None:
    model = nn.Sequential(OrderedDict([("a", nn.Linear(6, 8)), (name, nn.Linear(8, C))]))
    with refused("model.invalid-name"):
        split(model, "full", (6,))


def test_samples_too_large_for_this_machine_are_refused() -> None:
    with refused("model.cannot-record", "allocate memory", shape=[10**15 - 1]):
        split(nn.Linear(6, C), "full", (10**15 - 1,))


class Twice(nn.Module):
    """Reads a weight again after other layers, through another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c, self.h = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, C)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.c(torch.tanh(self.b(x))))
        return self.h(torch.tanh(F.linear(x, self.b.weight.t())))


def test_a_weight_used_on_both_sides_of_a_cut_stays_as_it_is() -> None:
    table = split(Twice(), "slice:c", (8,)).program.tensors
    trained = {e.stands_for for e in table if e.role == "parameter"}
    assert trained == {"c.weight", "c.bias", "h.weight", "h.bias"}


def test_frozen_biases_stay_frozen() -> None:
    model = Net()
    model.b.bias.requires_grad_(False)
    for spec in ("low-rank:0.3,keep=0", "slice:b+low-rank:0.3", "cp:2.0"):
        roles = {e.stands_for: e.role for e in split(model, spec, (6,)).program.tensors}
        assert roles["b.bias"] == "frozen", spec


def test_a_decimal_is_a_capacity_even_where_a_module_is_called_so() -> None:
    inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
    model = nn.Sequential(inner, nn.Tanh(), nn.Linear(6, C))
    full = split(model, "full", (6,)).counts
    assert split(model, "slice:0.2", (6,)).counts.capacity(full) <= 0.2


def test_layers_of_zeros_stay_dense() -> None:
    model = Net()
    nn.init.zeros_(model.b.weight)
    with refused("spec.nothing-smaller", "b: its weights are zero"):
        split(model, "low-rank:0.3,keep=1", (6,))


def test_a_batch_norm_called_twice() -> None:
    model = Net(lambda own, y: own.norm(own.norm(y)))
    model.norm = nn.BatchNorm1d(8)
    assert_right(model, "full")


@pytest.mark.parametrize(
    "spec", half_quick(["full", "slice:h", "low-rank:0.3,keep=1", "width:0.5", "cp:2.0"])
)
def test_buffers_that_are_not_saved_are_constants(spec: str) -> None:
    model = Net(lambda own, y: y + own.position)
    model.register_buffer("position", torch.randn(8), persistent=False)
    if spec in ("full", "slice:h"):  # the others change the rest of the model, too
        assert_right(copy.deepcopy(model), spec)
    submodel, x = split(model, spec, (6,)), torch.randn(4, 6, dtype=torch.float64)
    weights = from_model(model)
    assert not [name for name in (*weights.tensors, *submodel.cut(weights)) if "position" in name]
    before = predicted(model, submodel, x)
    model.position.zero_()
    assert torch.equal(predicted(model, submodel, x), before)


def test_models_that_read_the_sizes_of_a_layer() -> None:
    model = Net(lambda own, y: y.reshape(-1, own.b.in_features))
    for spec in ("low-rank:0.3,keep=1", "cp:2.0"):
        split(model, spec, (6,))


@pytest.mark.parametrize("spec", ["low-rank:0.3,keep=1", "slice:b+low-rank:0.3", "cp:2.0"])
def test_models_that_read_the_tensors_of_a_layer(spec: str) -> None:
    # The model only reads the shapes of the tensors, so that factors can replace them.
    net = Net(lambda own, y: y.to(own.b.weight.dtype)[:, : len(own.b.weight) + len(own.b.bias)])
    submodel = split(net, spec, (6,))
    assert any(t.layer == "b" and t.form != "dense" for t in submodel.layer_decisions)


@pytest.mark.parametrize("spec", ["low-rank:0.3,keep=1", "slice:b+low-rank:0.3", "cp:2.0"])
def test_models_that_read_an_attribute_that_new_layers_lack(spec: str) -> None:
    model = Net(lambda own, y: y * own.b.gain)
    model.b.gain = 2.0
    with refused("spec.layers-not-replaceable", spec=spec) as caught:
        split(model, spec, (6,))
    assert "b" in caught.value.values["layers"]
    assert "'gain'" in str(caught.value)


@pytest.mark.parametrize("kind", ["Linear", "Conv1d", "Conv2d"])
def test_factorized_layers_have_a_dense_weight(kind: str) -> None:
    dense = nn.Linear(6, 4) if kind == "Linear" else getattr(nn, kind)(6, 4, 3, groups=2)
    low_rank = factorized_layer(dense, {"weight": 2})
    assert low_rank.weight.shape == dense.weight.shape
    assert low_rank.bias is dense.bias
    compressed = with_cp_factors(nn.Sequential(dense), {"0.weight": 3})[0]
    for factor in compressed.factors:
        nn.init.normal_(factor)
    dense.weight.data = compressed.weight.data
    x = torch.randn(2, 6, *[5] * (dense.weight.dim() - 2))
    torch.testing.assert_close(compressed(x), dense(x))
    dense.weight.data = low_rank.weight.data
    torch.testing.assert_close(low_rank(x), dense(x))


def test_a_cut_before_a_parameter_of_the_model_itself() -> None:
    model = Net(lambda own, y: y * own.scale)
    model.scale = nn.Parameter(torch.rand(8))
    places = inspection.cut_places(capture(model, (6,)), 32)
    assert [place.module for place in places] == ["scale", "b", "h"]
    submodel = assert_right(model, "slice:scale")
    assert submodel.counts.params == 8 + 8 * 8 + 8 + 8 * C + C


def test_what_factors_draw_in_a_prediction_is_fixed(seed: int) -> None:
    torch.manual_seed(seed)
    model = Net(lambda own, y: y + torch.randn_like(y))
    submodel = split(model, "cp:2.0", (6,))
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    x = torch.randn(4, 6, dtype=torch.float64)
    one, two = (eager.call(submodel, "predict_local", state, x=x)["output"] for _ in range(2))
    assert torch.equal(one, two)


def test_a_model_that_is_one_layer() -> None:
    assert split(nn.Linear(6, C), "cp:2.0", (6,)).counts.exchanged == 1 * (6 + C) + C


class Extra(Net):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}


def double_buffer() -> nn.Module:
    model = Net()
    model.register_buffer("scale", torch.ones(8, dtype=torch.float64))
    return model


def plus() -> nn.Module:
    model = Net()
    model.odd_ones = nn.ParameterDict({"a+": torch.ones(8)})
    return model


def locked() -> nn.Module:
    model = Net()
    model.lock = threading.Lock()
    return model


@pytest.mark.parametrize(
    ("build", "code", "values"),
    [
        (Extra, "model.extra-state", {}),
        (double_buffer, "model.wrong-dtype", {"tensor": "scale", "dtype": "torch.float64"}),
        (plus, "model.invalid-name", {"name": "odd_ones.a+"}),
        (locked, "model.cannot-copy", {}),
        (
            lambda: Net(lambda _, y: nn.functional.dropout(y)),
            *("model.random-numbers", {}),
        ),
    ],
)
@pytest.mark.parametrize("spec", ["full", "low-rank:0.3,keep=0"])
def test_refused_by_name(
    build: Callable[[], nn.Module], code: str, values: dict[str, object], spec: str
) -> None:
    with refused(code, **values):
        split(build(), spec, (6,))
