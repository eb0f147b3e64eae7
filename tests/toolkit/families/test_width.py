"""A narrowed model equals a narrow model written by hand; also EmbracingFL's Table 10."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bundles import SAMPLE_SHAPE, tiny_cnn
from device_agent.formats.bundle import open_bundle
from edgetailor import GlobalModel, TrainingConfig, split
from exporters.export import export
from narrow_models import (
    Concatenating,
    Encoder,
    Gated,
    Mixer,
    Packed,
    Plain,
    Recurrent,
    Residual,
    Separable,
    Shared,
    Shuffled,
    Signal,
)
from parameters import quarter_quick, some_long
from refusals import refused
from toolkit.families import family_named
from toolkit.models import resnet20
from toolkit.submodels.submodel import Submodel

RATE = 0.1
Indices = Mapping[str, Mapping[int, Sequence[int]]]
"""Kept indices of the axes of a tensor, if they are not the first ones."""


@dataclass(frozen=True)
class Case:
    """A model, and the narrow model for `ratio` with widths counted by hand."""

    build: Callable[..., nn.Module]
    widths: tuple[int, ...]
    narrow: tuple[int, ...]
    shape: tuple[int, ...]
    ratio: str = "0.4"
    indices: Indices = field(default_factory=dict)


# Pieces of 7 + 5 + 10 + 2 channels, of which 3 + 2 + 4 + 2 stay.
PIECES = [0, 1, 2, 7, 8, 12, 13, 14, 15, 22, 23]
# Right half, then left half, of 2 * 5 channels, between margins of 4: 2, 3 + 3, 2 stay.
HALVES = [0, 1, 2, 5, 6, 7]
PADDED = [0, 1, 4, 5, 6, 9, 10, 11, 14, 15]
# Four gates of 6 features, of which 3 stay; three gates of 5, of which 2 stay.
LSTM_GATES = [0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20]
GRU_GATES = [0, 1, 5, 6, 10, 11]
BOTH_WAYS = [0, 1, 2, 6, 7, 8]
LEAVES = ("weight", "bias")
CASES = {
    "plain": Case(Plain, (7, 10, 12), (3, 4, 5), (3, 9, 9)),
    "residual": Case(Residual, (6, 4, 9), (3, 2, 4), (2, 8, 8)),
    "separable": Case(Separable, (8, 6, 5), (4, 3, 2), (1, 9, 9)),
    "concatenating": Case(
        Concatenating,
        (7, 10, 5, 6),
        (3, 4, 2, 3),
        (2, 8, 8),
        indices={
            "join.weight": {1: PIECES},
            "beside.weight": {0: PIECES},
            "classifier.weight": {1: PIECES},
            **{f"bn.{leaf}": {0: PIECES} for leaf in ("weight", "bias")},
            **{f"bn.running_{leaf}": {0: PIECES} for leaf in ("mean", "var")},
            "beside.bias": {0: PIECES},
        },
    ),
    "signal": Case(
        Signal,
        (6, 5),
        (4, 2),
        (2, 18),
        indices={
            # Two groups of three channels keep two each.
            **{
                f"{n}.{leaf}": {0: [0, 1, 3, 4]}
                for n in ("conv1", "groups")
                for leaf in ("weight", "bias")
            },
            "conv2.weight": {1: [0, 1, 3, 4]},
            "classifier.weight": {1: [0, 1, 5, 6, 10, 11, 15, 16, 20, 21]},
        },
    ),
    "recurrent": Case(
        Recurrent,
        (5, 6, 5),
        (2, 3, 2),
        (7, 3),
        indices={
            **{
                f"lstm.{leaf}_l{end}": {0: LSTM_GATES}
                for leaf in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                for end in ("0", "0_reverse", "1", "1_reverse")
            },
            "lstm.weight_ih_l1": {0: LSTM_GATES, 1: BOTH_WAYS},
            "lstm.weight_ih_l1_reverse": {0: LSTM_GATES, 1: BOTH_WAYS},
            "gru.weight_ih_l0": {0: GRU_GATES, 1: BOTH_WAYS},
            "gru.weight_hh_l0": {0: GRU_GATES},
            "classifier.weight": {1: [*BOTH_WAYS, 12, 13]},
        },
    ),
    "mixer": Case(Mixer, (9, 6, 11), (4, 3, 5), (3, 8, 8)),
    "gated": Case(
        Gated,
        (5, 5, 4),
        (3, 3, 2),
        (2, 6, 6),
        ratio="0.5",
        indices={
            "gated.weight": {0: HALVES},
            "gated.bias": {0: HALVES},
            "halves.weight": {0: HALVES},
            "halves.bias": {0: HALVES},
            "wide.weight": {0: PADDED, 1: HALVES},
            "wide.bias": {0: PADDED},
            "classifier.weight": {1: PADDED},
        },
    ),
    # Of 3 x 4 heads of 3 features, the first two heads of queries, keys and values stay.
    "packed attention": Case(
        Packed,
        (6, 4, 10),
        (3, 2, 5),
        (3, 8, 8),
        ratio="0.5",
        indices={
            f"qkv.{leaf}": {0: [*range(6), *range(12, 18), *range(24, 30)]} for leaf in LEAVES
        },
    ),
    "shared keys": Case(Shared, (6, 3), (3, 2), (3, 2), ratio="0.5"),
    # Each group of 6 keeps 3. Shuffled, channels 0 and 1 of both groups are the first half, of
    # which channel 0 stays; channels 2 and 3 are the second half, of which 2 stays.
    "shuffled": Case(
        Shuffled,
        (6, 4),
        (3, 2),
        (2, 5),
        ratio="0.5",
        indices={
            **{f"first.{leaf}": {0: [0, 1, 2, 6, 7, 8]} for leaf in LEAVES},
            **{f"grouped.{leaf}": {0: [0, 2, 4, 6]} for leaf in LEAVES},
            **{
                f"norm.{leaf}": {0: [0, 2, 4, 6]}
                for leaf in (*LEAVES, "running_mean", "running_var")
            },
            "right.weight": {0: [0, 1], 1: [0, 1]},
            "right.bias": {0: [0, 1]},
            "classifier.weight": {1: [0, 1, 4, 5]},
        },
    ),
    # The attention's own width is that of its heads, which is the width of the layer here.
    "encoder layer": Case(
        Encoder,
        (8, 4, 10),
        (4, 2, 5),
        (5, 3),
        ratio="0.5",
        indices={
            f"layer.self_attn.in_proj_{leaf}": {0: [*range(4), *range(8, 12), *range(16, 20)]}
            for leaf in LEAVES
        },
    ),
}


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomised(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw all tensors of `model` at random, in float64; variances are above zero."""
    model = model.double()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.5
            value.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
    return model


def sliced(case: Case, wide: nn.Module, twin: nn.Module) -> nn.Module:
    """`twin` with the elements of `wide` that it should hold."""
    own = wide.state_dict()
    for name, value in twin.state_dict().items():
        indices = [
            case.indices.get(name, {}).get(axis, range(size))
            for axis, size in enumerate(value.shape)
        ]
        value.copy_(own[name][np.ix_(*indices)] if indices else own[name])
    return twin


def submodel_of(model: nn.Module, case: Case, spec: str) -> Submodel:
    """Capturing takes float32."""
    return split(model.float(), spec, case.shape, TrainingConfig(learning_rate=RATE))


def run(
    submodel: Submodel, signature: str, tensors: Mapping[str, Tensor], **feeds: Tensor
) -> dict[str, Tensor]:
    """Call one signature in float64, with optimizer state zero."""
    (own,) = [s for s in submodel.program.signatures if s.name == signature]
    state = {
        e.name: tensors[e.name].double() if e.stored else torch.zeros(e.shape, dtype=torch.float64)
        for e in submodel.program.tensors
    }
    return own.function({**state, **feeds})


def assert_runs_as(
    twin: nn.Module,
    submodel: Submodel,
    received: Mapping[str, Tensor],
    case: Case,
    generator: torch.Generator,
) -> None:
    """Prediction, loss and the tensors after one step of SGD are those of `twin`."""
    x = torch.randn(6, *case.shape, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (6,), generator=generator)
    came = run(submodel, "predict", received, x=x)["output"]
    torch.testing.assert_close(came, twin.eval()(x), rtol=1e-10, atol=1e-10)
    optimizer = torch.optim.SGD(twin.train().parameters(), lr=RATE)
    loss = nn.functional.cross_entropy(twin(x), y)
    loss.backward()
    optimizer.step()
    rate = torch.tensor(RATE, dtype=torch.float64)
    results = run(submodel, "train", received, x=x, y=y, rate=rate)
    torch.testing.assert_close(results["loss"], loss.detach(), rtol=1e-10, atol=1e-10)
    for entry in submodel.program.tensors:
        if entry.stored:
            torch.testing.assert_close(
                results[f"{entry.name}+"], twin.state_dict()[entry.name], rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize("name", quarter_quick(some_long(CASES, "encoder layer", "shared keys")))
def test_prediction_and_step_are_the_hand_written_twins(
    name: str, generator: torch.Generator
) -> None:
    case = CASES[name]
    wide = randomised(case.build(*case.widths), generator)
    twin = sliced(case, wide, case.build(*case.narrow).double())
    weights = GlobalModel({n: v.clone() for n, v in wide.state_dict().items()})
    submodel = submodel_of(wide, case, f"width:{case.ratio}")
    received = submodel.cut(weights)
    for entry in submodel.program.tensors:
        if entry.stored:
            assert entry.shape == received[entry.name].shape == twin.state_dict()[entry.name].shape
            assert torch.equal(received[entry.name], twin.state_dict()[entry.name]), entry.name
    assert_runs_as(twin, submodel, received, case, generator)


@pytest.mark.parametrize(
    "name", some_long(["plain", "residual", "separable", "mixer"], "separable", "mixer")
)
def test_a_scaler_divides_outputs_of_narrowed_layers_in_training(
    name: str, generator: torch.Generator
) -> None:
    """HeteroFL's Scaler, as hooks of the narrow model written by hand."""
    case = CASES[name]
    wide = randomised(case.build(*case.widths), generator)
    twin = sliced(case, wide, case.build(*case.narrow).double())
    ratio, scaled = float(case.ratio), 0
    for path, module in twin.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            before, after = wide.get_submodule(path).weight.shape[0], module.weight.shape[0]
            if after < before:
                module.register_forward_hook(lambda m, _, y: y / ratio if m.training else y)
                scaled += 1
    assert scaled
    weights = GlobalModel({n: v.clone() for n, v in wide.state_dict().items()})
    submodel = submodel_of(wide, case, f"width:{case.ratio},scaler=on")
    assert_runs_as(twin, submodel, submodel.cut(weights), case, generator)


def test_ratio_1_is_the_model_itself(generator: torch.Generator) -> None:
    case = CASES["separable"]
    model = case.build(*case.widths)
    submodel, full = (submodel_of(model, case, spec) for spec in ("width:1", "full"))
    assert submodel.counts == full.counts
    assert all(entry.part is None for entry in submodel.program.tensors)
    weights = GlobalModel(randomised(model, generator).state_dict())
    received = submodel.cut(weights)
    assert all(torch.equal(value, weights.tensors[name]) for name, value in received.items())
    x = torch.randn(4, *case.shape, generator=generator, dtype=torch.float64)
    assert torch.equal(run(submodel, "predict", received, x=x)["output"], model.eval()(x))


@pytest.mark.long
def test_table_10_of_embracingfl() -> None:
    model = resnet20()
    specs = ("full", "width:0.4375", "width:0.1875")
    counts = [split(model, spec, (3, 32, 32)).counts for spec in specs]
    assert [c.params for c in counts[1:]] == [52_874, 10_006]
    assert [c.activations for c in counts[1:]] == [3_039_552, 1_302_848]
    assert [f"{c.capacity(counts[0]):.2f}" for c in counts[1:]] == ["0.43", "0.18"]


def test_parts_and_layer_decisions_say_what_is_left() -> None:
    case = CASES["concatenating"]
    submodel = submodel_of(case.build(*case.widths), case, "width:0.4")
    parts = {entry.name: entry.part for entry in submodel.program.tensors if entry.stored}
    pieces = ((0, 3), (7, 9), (12, 16), (22, 24))
    assert parts["down.weight"] == (((0, 3),), ((0, 2),), ((0, 3),), ((0, 3),))
    assert parts["bn.running_mean"] == (pieces,)
    assert parts["classifier.weight"] == (((0, 4),), pieces)
    assert parts["classifier.bias"] is None
    forms = {d.layer: d.form for d in submodel.layer_decisions}
    assert forms["join"] == "11 of 24 channels in, 3 of 6 out"
    assert forms["classifier"] == "11 of 24 channels in, 4 of 4 out"


def test_an_update_comes_back_under_the_global_names(generator: torch.Generator) -> None:
    case = CASES["plain"]
    submodel = submodel_of(case.build(*case.widths), case, "width:0.4")
    table = submodel.program.tensors
    update = {e.name: torch.randn(e.shape, generator=generator) for e in table if e.stored}
    recovered = family_named("width").recover(
        update, [e for e in table if e.stored], dict.fromkeys(update, ())
    )
    assert recovered.keys() == update.keys()
    assert all(torch.equal(recovered[name], value) for name, value in update.items())


def test_frozen_parameters_lose_the_same_channels() -> None:
    case = CASES["plain"]
    wide, twin = case.build(*case.widths), case.build(*case.narrow)
    for model in (wide, twin):
        model.bn.requires_grad_(False)
    narrow, full = submodel_of(wide, case, "width:0.4"), submodel_of(twin, case, "full")
    assert narrow.counts == full.counts
    shapes = [{e.name: (e.role, e.shape) for e in s.program.tensors} for s in (narrow, full)]
    assert shapes[0] == shapes[1]


def test_a_bundle_is_the_narrow_network(tmp_path: Path) -> None:
    model = tiny_cnn()
    submodel = split(model, "width:0.5", SAMPLE_SHAPE)
    values = submodel.cut(GlobalModel(model.state_dict()))
    made = export(submodel.program, values, tmp_path / "bundle", base="none")
    assert made.verdict is not None
    assert made.verdict.passed
    assert open_bundle(tmp_path / "bundle").manifest.tensors == submodel.program.tensors


@pytest.mark.parametrize("ratio", ["0", "-0.5", "1.1", "nan", "half"])
def test_a_ratio_out_of_range_is_refused_with_the_range(ratio: str) -> None:
    with refused("spec.invalid-size", spec=f"width:{ratio}", size=ratio) as caught:
        split(nn.Linear(3, 3), f"width:{ratio}", (3,))
    assert "channel ratio must be a number above 0 and at most 1" in str(caught.value)


def test_a_second_family_is_refused() -> None:
    with refused("spec.invalid-combination", spec="width:0.5+low-rank:0.25"):
        split(nn.Linear(3, 3), "width:0.5+low-rank:0.25", (3,))


def test_a_ratio_that_drops_nothing_is_refused_with_the_largest_that_does() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    with refused("spec.nothing-smaller", spec="width:0.9", highest_ratio=0.875):
        split(model, "width:0.9", (3,))
    assert split(model, "width:0.875", (3,)).counts.params == 7 * 4 + 7 * 2 + 2
    three = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    with refused("spec.nothing-smaller", spec="width:0.9", highest_ratio=0.6666):
        split(three, "width:0.9", (3,))
    assert split(three, "width:0.6666", (3,)).counts.params == 2 * 4 + 2 * 2 + 2


def test_a_decimal_ratio_is_exactly_that() -> None:
    # 0.07 * 100 is 7.000000000000001 in binary.
    model = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 2))
    assert split(model, "width:0.07", (3,)).counts.params == 7 * 4 + 7 * 2 + 2


def test_a_model_with_no_layer_between_input_and_classes_is_refused() -> None:
    with refused("spec.nothing-smaller", spec="width:0.5") as caught:
        split(nn.Linear(3, 3), "width:0.5", (3,))
    assert "highest_ratio" not in caught.value.values


class Memory(nn.Module):
    """A recurrent layer that starts with zeros of the model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.memory = nn.GRU(3, hidden, batch_first=True)
        self.last = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.memory(x)[0][:, -1])


def test_first_states_that_pytorch_makes_shrink_too() -> None:
    narrow, twin = split(Memory(8), "width:0.5", (5, 3)), split(Memory(4), "full", (5, 3))
    assert narrow.counts == twin.counts
