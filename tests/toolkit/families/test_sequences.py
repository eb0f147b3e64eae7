"""Samples of whole numbers, single logits and frozen parameters, from model to update."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.func import grad_and_value

from device_agent.formats.update import TENSORS
from edgetailor import Federation, TrainingConfig, split
from exporters.export import export
from exporters.programs.training.losses import binary_cross_entropy
from exporters.recording.capture import capture
from parameters import half_quick
from profiles.errors import ModelError
from refusals import refused
from toolkit.coordinator.sample_files import read_samples
from toolkit.models import imdb_bilstm
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

WORDS, LENGTH = 20, 7
RATE = 0.5
TRAINING = TrainingConfig(batch_size=8, epochs=1, learning_rate=RATE, momentum=0.0)


class Bag(nn.Module):
    """Mean of word vectors, a hidden layer whose bias is frozen, one logit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.hidden = nn.Linear(6, 5)
        self.classifier = nn.Linear(5, 1)
        self.hidden.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.hidden(self.embedding(x).mean(1))))


class Folded(Bag):
    """Computes with the word numbers before it looks them up."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x % WORDS)


def reviews(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed)
    return order.integers(WORDS, size=(count, LENGTH)), order.integers(2, size=count)


def test_what_a_captured_model_says_of_its_samples() -> None:
    captured = capture(Bag(), (LENGTH,))
    assert (captured.sample_dtype, captured.sample_limit, captured.classes) == ("int64", WORDS, 1)
    assert list(captured.frozen) == ["hidden.bias"]
    assert "hidden.bias" not in captured.parameters
    folded = capture(Folded(), (LENGTH,))
    assert (folded.sample_dtype, folded.sample_limit) == ("int64", None)
    dense = capture(nn.Linear(3, 2), (3,))
    assert (dense.sample_dtype, dense.sample_limit, dense.frozen) == ("float32", None, {})


def test_a_model_without_an_embedding_is_not_tried_with_whole_numbers() -> None:
    with refused("model.wrong-input-shape", shape=[4], takes="(batch, ..., 3)"):
        capture(nn.Linear(3, 2), (4,))


def test_a_model_with_everything_frozen_is_refused() -> None:
    with refused("model.all-frozen"):
        capture(nn.Linear(3, 2).requires_grad_(False), (3,))


def test_a_long_recurrence_is_cut_into_factors() -> None:
    """The model is first run with random factors, whose product must not explode."""
    submodel = split(imdb_bilstm(), "low-rank:0.25,keep=0", (256,), TRAINING)
    factors = {f"lstm.{side}.weight_hh_l0_reverse" for side in "uv"}
    assert factors <= {entry.name for entry in submodel.program.tensors}


def test_binary_cross_entropy_and_its_gradient(seed: int) -> None:
    order = torch.Generator().manual_seed(seed)
    drawn = 3 * torch.randn(20, 1, generator=order, dtype=torch.float64)
    z = torch.cat((drawn, torch.tensor([[0.0], [0.0], [80.0], [80.0], [-80.0], [-80.0]])))
    y = torch.cat((torch.randint(2, (20,), generator=order), torch.tensor([0, 1] * 3)))
    gradient, loss = grad_and_value(lambda logits: binary_cross_entropy(logits, y))(z)
    wide = z.clone().requires_grad_()
    expected = nn.functional.binary_cross_entropy_with_logits(wide[:, 0], y.double())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, wide.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spec", half_quick(["full", "slice:hidden"]))
def test_a_bundle_trains_on_whole_numbers_as_torch_does(
    spec: str, tmp_path: Path, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Bag()
    source = from_model(model)
    submodel = split(model, spec, (LENGTH,), TRAINING)
    export(submodel.program, submodel.cut(source), tmp_path / "bundle", base=source.fingerprint())
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_bytes())
    assert (manifest["sample_dtype"], manifest["sample_limit"]) == ("int64", WORDS)

    x, y = reviews(8, seed)
    np.savez(tmp_path / "local.npz", x=x.astype(np.int32), y=y)
    train_bundle(tmp_path / "bundle", str(tmp_path / "local.npz"), tmp_path / "update", threads=1)
    update = load_file(tmp_path / "update" / TENSORS)

    model.double()
    if spec != "full":
        model.embedding.requires_grad_(False)
    logits = model(torch.from_numpy(x))[:, 0]
    nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(y).double()).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert update.keys() == trained.keys()
    assert submodel.counts.exchanged == sum(p.numel() for p in trained.values())
    for name, value in trained.items():
        assert value.grad is not None
        expected = (value - RATE * value.grad).detach().numpy()
        np.testing.assert_allclose(update[name], expected, rtol=1e-5, atol=1e-6)


def test_held_out_reviews(tmp_path: Path, seed: int) -> None:
    x, y = reviews(5, seed)
    np.savez(tmp_path / "held_out.npz", x=x, y=y)
    came = read_samples(tmp_path / "held_out.npz", (LENGTH,))
    np.testing.assert_array_equal(came[0], x)


def test_recording_leaves_torchs_own_lstm_as_it_was() -> None:
    before = decompositions.select_one_layer_lstm_function
    with pytest.raises(ModelError):
        capture(nn.LSTM(3, 2), (5, 4))
    assert decompositions.select_one_layer_lstm_function is before


def test_accuracy_of_a_single_logit(seed: int) -> None:
    federation = Federation(f"{__name__}:Bag", (LENGTH,), TRAINING, seed=seed % 1000)
    x, y = reviews(40, seed)
    accuracy, loss = federation.evaluate(x, y)
    with torch.no_grad():
        chance = torch.sigmoid(federation.module(torch.from_numpy(x)))[:, 0].double().numpy()
    assert accuracy == np.mean((chance > 0.5) == (y == 1))
    assert loss == pytest.approx(-np.log(np.where(y == 1, chance, 1 - chance)).mean(), rel=1e-5)
    with refused("data.label-out-of-range", label=2, highest=1):
        federation.evaluate(x, np.where(np.arange(40) == 0, 2, 0))
    with refused("model.forward-fails", shape=[7]):
        federation.evaluate(x.astype(np.float32), y)
