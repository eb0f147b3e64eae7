"""Dropout between recurrent layers: single layers and explicit masks are the oracle."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import eager
from edgetailor import TrainingConfig, export, split
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.seeded_random import keep_mask
from exporters.recording.capture import capture
from layer_cases import TOLERANCE, open_session
from parameters import half_quick, some_long
from toolkit.submodels.global_model import from_model

FEATURES, UNITS, CLASSES, RATE, SHAPE = 3, 4, 2, 0.3, (5, 3)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Stacked(nn.Module):
    """Recurrent layers with dropout between them, then a linear layer on all that they return."""

    def __init__(self, kind: str, layers: int = 2, **options: bool) -> None:
        super().__init__()
        self.cells = KINDS[kind](FEATURES, UNITS, layers, dropout=RATE, **options)
        self.head = nn.LazyLinear(CLASSES)
        self(torch.zeros(2, *SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        sequence, last = self.cells(x if self.cells.batch_first else x.transpose(0, 1))
        sequence = sequence if self.cells.batch_first else sequence.transpose(0, 1)
        return self.joined(sequence, list(last) if isinstance(last, tuple) else [last])

    def joined(self, sequence: Tensor, last: list[Tensor]) -> Tensor:
        """The output for a sequence (batch, time, features) and states (layers, batch, units)."""
        rows = [sequence, *(state.transpose(0, 1) for state in last)]
        return self.head(torch.cat([row.flatten(1) for row in rows], 1))


def explicit(model: Stacked, x: Tensor, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of `model` in float64 with masks of `seed`, and its parameters by name."""
    cells, sequence, states, own = model.cells, x.transpose(0, 1), [], {}
    for layer in range(cells.num_layers):
        if layer:
            kept = keep_mask(sequence.shape, RATE, torch.tensor(seed), layer)
            sequence = sequence * kept / (1 - RATE)
        width = sequence.shape[-1]
        single = type(cells)(width, UNITS, bidirectional=cells.bidirectional).double()
        names = {f"cells.{n}".replace("_l0", f"_l{layer}"): p for n, p in single.named_parameters()}
        with torch.no_grad():
            for name, value in names.items():
                value.copy_(model.state_dict()[name])
        own |= names
        sequence, last = single(sequence)
        states.append(last if isinstance(last, tuple) else (last,))
    wide = model.double()
    output = wide.joined(
        sequence.transpose(0, 1), [torch.cat(s) for s in zip(*states, strict=True)]
    )
    return output, {**own, **{f"head.{n}": p for n, p in wide.head.named_parameters()}}


BOTH_WAYS = {"batch_first": True, "bidirectional": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    half_quick(
        some_long(
            itertools.product(KINDS, ({}, BOTH_WAYS)),
            ("gru", {}),
            ("gru", BOTH_WAYS),
            ("rnn", {}),
            ("rnn", BOTH_WAYS),
        )
    ),
    ids=str,
)
def test_step_equals_explicit_masks(kind: str, options: dict[str, bool], seed: int) -> None:
    torch.manual_seed(seed)
    model = Stacked(kind, layers=3, **options)
    submodel = split(model, "full", SHAPE, TrainingConfig(momentum=0.0))
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    x, y = torch.randn(6, *SHAPE, dtype=torch.float64), torch.randint(CLASSES, (6,))
    feeds = {"x": x, "y": y, "rate": 1.0, "seed": torch.tensor(11)}
    new = eager.call(submodel, "train", state, **feeds)
    output, parameters = explicit(model, x, 11)
    loss = cross_entropy(output, y)
    torch.testing.assert_close(new["loss"], loss.detach(), rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    assert parameters.keys() == dict(model.named_parameters()).keys()
    for name, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(state[name] - new[name], gradient, rtol=1e-9, atol=1e-12)
    other = eager.call(submodel, "train", state, **{**feeds, "seed": torch.tensor(12)})
    assert other["loss"] != new["loss"]
    expected = model.eval()(x)
    torch.testing.assert_close(eager.call(submodel, "predict", state, x=x)["output"], expected)


def test_onnx_step_equals_explicit_masks(seed: int) -> None:
    torch.manual_seed(seed)
    model = Stacked("lstm", batch_first=True)
    program = split(model, "full", SHAPE, TrainingConfig(momentum=0.0)).program
    session = open_session(to_onnx(next(s for s in program.signatures if s.name == "train")))
    x, y = torch.randn(6, *SHAPE), torch.randint(CLASSES, (6,))
    values = {n: v.detach().clone().numpy() for n, v in model.named_parameters()}
    feeds = {
        "x": x.numpy(),
        "y": y.numpy(),
        "rate": np.asarray(1, np.float32),
        "seed": np.asarray(11),
    }
    names = [output_.name for output_ in session.get_outputs()]
    new = dict(zip(names, session.run(None, {**feeds, **values}), strict=True))
    output, parameters = explicit(model, x.double(), 11)
    losses = cross_entropy(output, y, reduction="none") / len(y)
    own = list(parameters.values())
    terms = [torch.autograd.grad(loss, own, retain_graph=True) for loss in losses]
    for name, *shares in zip(parameters, *terms, strict=True):
        change = torch.from_numpy(values[name] - new[f"{name}+"]).double()
        # Rounding is relative to the summands, which may cancel, and to the parameter.
        size = sum(float(share.norm()) for share in shares)
        rounding = 1e-7 * float(parameters[name].detach().norm())
        assert float((change - sum(shares)).norm()) <= TOLERANCE * size + rounding, name


@pytest.mark.long
def test_tflite_step_equals_pytorchs(seed: int, tmp_path: Path) -> None:
    """Exporting compares three steps with PyTorch."""
    torch.manual_seed(seed)
    model = Stacked("rnn")
    submodel = split(model, "full", SHAPE, TrainingConfig(batch_size=4))
    done = export(submodel, from_model(model), tmp_path / "b", format="tflite")
    assert done.verdict is not None


SPECS = ("low-rank:0.5,keep=0", "slice:head", "width:0.5", "cp:2.0")


@pytest.mark.parametrize("spec", some_long(SPECS, *(s for s in SPECS if s != "slice:head")))
def test_other_families_predict_without_dropout(spec: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Stacked("gru", batch_first=True)
    submodel = split(model, spec, SHAPE)
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    x = torch.randn(6, *SHAPE, dtype=torch.float64)
    if spec.startswith("cp"):
        state |= eager.call(submodel, "personal_init", state)
    x = eager.recorded(submodel, state, x)
    first, second = (eager.call(submodel, "predict", state, x=x)["output"] for _ in range(2))
    assert torch.equal(first, second)


def test_one_layer_has_no_dropout() -> None:
    with pytest.warns(UserWarning, match="non-zero dropout expects num_layers greater than 1"):
        model = Stacked("lstm", layers=1)
    program = split(model, "full", SHAPE).program
    assert "seed" not in {port.name for s in program.signatures for port in s.inputs}


def test_both_graphs_have_single_layers() -> None:
    captured = capture(Stacked("lstm", layers=3), SHAPE)
    for graph in (captured.training, captured.inference):
        layers = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.lstm.input)
        assert [node.args[4] for node in layers] == [1, 1, 1]
