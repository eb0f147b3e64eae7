"""Models of many fields, as their users write them: one step equals PyTorch's after an export."""

import copy
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from edgetailor import TrainingConfig, export, split
from exporters.programs.seeded_random import SeededBernoulli
from exporters.recording.replacements.random_functions import uniform_draws
from exporters.verification.whole_step import run
from field_models.table import MODELS, FieldModel
from parameters import needs_litert, quarter_quick, some_quick, without
from refusals import refused
from toolkit.submodels.global_model import from_model

SAMPLES, RATE, SEED = 8, 0.1, 5
QUICK = [
    ("variational autoencoder", "onnx"),
    ("lstm cell in a loop", "tflite"),
    ("hypernetwork", "onnx"),
]
ONNX_ONLY = [("autoencoder with unpooling", "tflite")]
EXPORTED = without(product(MODELS, ("onnx", "tflite")), *ONNX_ONLY)


def loss_of(row: FieldModel, output: Tensor, y: Tensor) -> Tensor:
    """The loss as its user computes it in PyTorch."""
    if row.loss == "mse":
        return functional.mse_loss(output, y.to(output))
    if row.loss == "binary-cross-entropy":
        return functional.binary_cross_entropy_with_logits(output.view(-1), y.to(output))
    if row.loss == "ctc":
        counts, steps = (y >= 0).sum(1), torch.full((len(y),), output.shape[1])
        scores = output.log_softmax(-1).transpose(0, 1)
        sums = functional.ctc_loss(scores, y.clamp(min=0), steps, counts, reduction="sum")
        return sums / counts.sum()
    return functional.cross_entropy(output.transpose(1, 2) if output.dim() == 3 else output, y)


def gradients(
    model: nn.Module,
    row: FieldModel,
    x: Tensor,
    y: Tensor,
    nudge: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """PyTorch's gradients with the device's masks and draws, for weights off by `nudge`.

    What `forward` itself changes in a parameter is added, as if a gradient had changed it.
    """
    right = copy.deepcopy(model).to(dtype).train()
    for value in right.parameters():
        value.data *= 1 + nudge * torch.randn_like(value)
    start = {name: value.detach().clone() for name, value in right.named_parameters()}
    with SeededBernoulli(SEED), uniform_draws():
        output = right(x.to(dtype) if x.is_floating_point() else x)
    loss_of(row, output, y).backward()
    return {
        name: (
            (torch.zeros_like(value) if value.grad is None else value.grad)
            + (start[name] - value.detach()) / RATE
        ).double()
        for name, value in right.named_parameters()
        if value.requires_grad
    }


def norm(values: Mapping[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in values.values()]).norm())


@pytest.mark.parametrize(("name", "format"), quarter_quick(some_quick(EXPORTED, *QUICK)))
def test_one_step_equals_pytorchs(name: str, format: str, seed: int, tmp_path: Path) -> None:
    needs_litert(format)
    torch.manual_seed(seed)
    row = MODELS[name]
    model = row.model()
    x, y = row.samples(SAMPLES), row.labels(SAMPLES)
    config = TrainingConfig(batch_size=SAMPLES, momentum=0.0, loss=row.loss)
    submodel, weights = split(model, "full", row.shape, config), from_model(model)
    exported = export(submodel, weights, tmp_path / "bundle", format=format)
    assert exported.verdict is not None  # without an exception: each operator is right

    (train,) = (s for s in submodel.program.signatures if s.name == "train")
    given = {"x": x, "y": y, "rate": torch.tensor(RATE), "seed": torch.tensor(SEED)}
    feeds = {p.name: given[p.name] for p in train.inputs if p.state is None}
    outputs = run(train, exported.graphs["train"], {**submodel.cut(weights), **feeds})
    expected, nudged = (gradients(model, row, x, y, nudge) for nudge in (0.0, 1e-7))
    # Rounding decides where a gradient is zero but for rounding, as that of a bias before a norm:
    # there PyTorch itself has no better one in float32.
    floor = 1e-7 * norm(expected)
    owns = [gradients(model, row, x, y, n, dtype=torch.float32) for n in (0.0, 1e-7, -1e-7)]
    for parameter, gradient in expected.items():
        before = weights.tensors[parameter].double()
        change = (before - outputs[f"{parameter}+"].double()) / RATE
        rounding = 2**-24 * before.norm() / RATE
        moved = (nudged[parameter] - gradient).norm()  # across a kink, or by a sum that cancels
        errors = [(own[parameter] - gradient).norm() for own in owns]
        rounded = max(errors) if gradient.norm() < floor else 0.0
        allowed = 1e-5 * gradient.norm() + floor + 2 * rounding + 4 * moved + 2 * rounded
        assert (change - gradient).norm() <= allowed, parameter


FAMILIES = ("low-rank:0.5,keep=0", "slice:0.5", "cp:2.0", "width:0.5", "depth:0.5", "pfedme")
WITHOUT_BLOCKS = [
    ("variational autoencoder", "depth:0.5"),
    ("x-vector", "depth:0.5"),
    ("lstm seq2seq", "depth:0.5"),
    ("unet", "depth:0.5"),
]
TEN = (
    *("variational autoencoder", "x-vector", "eegnet", "tabnet", "mlp-mixer", "unet"),
    *("soft mixture of experts", "graphsage", "lstm seq2seq", "patchtst"),
)


PAIRS = without(product(TEN, FAMILIES), *WITHOUT_BLOCKS)


@pytest.mark.long
@pytest.mark.parametrize(("name", "spec"), PAIRS)
def test_families_export(name: str, spec: str, tmp_path: Path) -> None:
    """Verification compares each step with autograd in float64."""
    row = MODELS[name]
    model = row.model()
    config = TrainingConfig(batch_size=SAMPLES, momentum=0.0, loss=row.loss)
    submodel = split(model, spec, row.shape, config)
    assert export(submodel, from_model(model), tmp_path / "bundle").verdict is not None


@pytest.mark.parametrize(("name", "spec"), some_quick(WITHOUT_BLOCKS, *WITHOUT_BLOCKS[:1]))
def test_models_without_blocks_to_leave_out_are_refused(name: str, spec: str) -> None:
    row = MODELS[name]
    config = TrainingConfig(batch_size=SAMPLES, momentum=0.0, loss=row.loss)
    with refused("spec.nothing-smaller"):
        split(row.model(), spec, row.shape, config)
