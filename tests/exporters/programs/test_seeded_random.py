"""Dropout in a training step: the seed that the device feeds determines the masks."""

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dropping_model import CLASSES, SHAPE, Dropping
from edgetailor import ExportedBundle, TrainingConfig, export, split
from exporters.programs.seeded_random import SeededBernoulli, keep_mask
from exporters.recording.capture import capture
from layer_cases import TOLERANCE, open_session
from models_for_tests import Photons
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import train_bundle


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_fraction_of_kept_elements(rate: float, seed: int) -> None:
    """The means of the mask, its rows and its columns are those of independent draws."""
    kept = keep_mask((100, 1000), rate, torch.tensor(seed % (2**31 - 1)), 1).double()
    variance = rate * (1 - rate)
    assert abs(float(kept.mean()) - (1 - rate)) <= 5 * (variance / 1e5) ** 0.5
    assert float((kept.mean(1) - (1 - rate)).abs().max()) <= 6 * (variance / 1000) ** 0.5
    assert float((kept.mean(0) - (1 - rate)).abs().max()) <= 6 * (variance / 100) ** 0.5


def test_masks_of_different_seeds_and_dropouts_are_independent(seed: int) -> None:
    start = seed % (2**31 - 2)
    first = keep_mask((100, 1000), 0.5, torch.tensor(start), 1)
    others = [
        keep_mask((100, 1000), 0.5, torch.tensor(start + 1), 1),
        keep_mask((100, 1000), 0.5, torch.tensor(start), 2),
        first.roll(1, 0),
        first.roll(1, 1),
    ]
    for other in others:
        agreement = float((first == other).double().mean())
        assert abs(agreement - 0.5) <= 5 * (0.25 / 1e5) ** 0.5
    assert torch.equal(first, keep_mask((100, 1000), 0.5, torch.tensor(start), 1))
    assert not keep_mask((3, 4), 1.0, torch.tensor(start), 1).any()
    assert keep_mask((3, 4), 0.0, torch.tensor(start), 1).all()


@dataclass(frozen=True)
class Made:
    """The model, its bundle, and the folder of the bundle and of local data."""

    model: Dropping
    exported: ExportedBundle
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Made:
    """Verified against PyTorch; predictions are those of the model."""
    torch.manual_seed(seed)
    model = Dropping()
    folder = tmp_path_factory.mktemp("dropout")
    training = TrainingConfig(batch_size=4, epochs=2, momentum=0.0)
    submodel = split(model, "full", SHAPE, training)
    weights = from_model(model)
    values = submodel.cut(weights)
    done = export(submodel, weights, folder / "bundle")
    assert done.verdict is not None
    draw = np.random.default_rng(0)
    x = draw.normal(size=(10, *SHAPE)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=draw.integers(CLASSES, size=10))
    session = open_session(done.graphs["predict"].data)
    stored = {n: t.numpy() for n, t in values.items()}
    fed = {i.name: x if i.name == "x" else stored[i.name] for i in session.get_inputs()}
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(torch.from_numpy(x))
    np.testing.assert_allclose(session.run(None, fed)[0], expected, rtol=1e-4, atol=1e-5)
    return Made(model, done, folder)


def test_step_equals_pytorchs_with_the_same_masks(made: Made, seed: int) -> None:
    torch.manual_seed(seed)
    model, session = made.model, open_session(made.exported.graphs["train"].data)
    x, y = torch.randn(7, *SHAPE), torch.randint(CLASSES, (7,))
    values = {n: v.detach().numpy() for n, v in model.named_parameters()}
    steps = {}
    for fed in (5, 2**31 - 2):
        feeds = {
            "x": x.numpy(),
            "y": y.numpy(),
            "rate": np.asarray(1, np.float32),
            "seed": np.asarray(fed),
        }
        names = [output.name for output in session.get_outputs()]
        steps[fed] = dict(zip(names, session.run(None, {**feeds, **values}), strict=True))
        wide = Dropping().double()
        wide.load_state_dict(model.state_dict())
        with SeededBernoulli(fed):
            loss = functional.cross_entropy(wide(x.double()), y)
        loss.backward()
        assert float(steps[fed]["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, value in wide.named_parameters():
            ours = torch.from_numpy(values[name] - steps[fed][f"{name}+"]).double()
            assert value.grad is not None
            # The difference of two float32 parameters has a rounding error of 1e-7 of their size.
            rounding = 1e-7 * float(value.detach().norm())
            assert float((ours - value.grad).norm()) <= TOLERANCE * value.grad.norm() + rounding
    losses = [float(step["loss"]) for step in steps.values()]
    assert losses[0] != losses[1]


def test_the_same_seed_repeats_a_run_bit_for_bit_and_another_does_not(made: Made) -> None:
    updates, folder = [], made.folder
    for number, start in enumerate((3, 3, 4)):
        out = folder / f"update{number}"
        train_bundle(folder / "bundle", str(folder / "data.npz"), out, threads=1, seed=start)
        updates.append((out / "update.safetensors").read_bytes())
    assert updates[0] == updates[1]
    assert updates[0] != updates[2]


@pytest.mark.long
@pytest.mark.parametrize("spec", ["slice:branch", "slice:head", "low-rank:0.5,keep=0"])
def test_families_with_the_same_masks(spec: str, seed: int, tmp_path: Path) -> None:
    """Exporting compares three steps with PyTorch; predictions are those of the model."""
    torch.manual_seed(seed)
    model = Dropping()
    submodel = split(model, spec, SHAPE, TrainingConfig(batch_size=4))
    done = export(submodel, from_model(model), tmp_path / "b")
    assert done.verdict is not None
    if spec.startswith("slice"):
        assert submodel.counts.params < sum(p.numel() for p in model.parameters())


def test_a_model_without_dropout_takes_no_seed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, CLASSES))
    for signature in split(model, "full", (3,)).program.signatures:
        assert "seed" not in {port.kind for port in signature.inputs}


def test_other_random_layers_are_refused() -> None:
    operator = "aten.poisson.default"
    with refused("model.random-numbers", operator=operator, layer="1"):
        capture(nn.Sequential(nn.Linear(3, 4), Photons()), (3,))
