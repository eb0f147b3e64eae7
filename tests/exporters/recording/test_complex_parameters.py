"""Complex parameters are pairs of real numbers, and train as PyTorch trains complex numbers."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.replacements.complex_numbers.complex_parameters import with_real_parameters
from toolkit.submodels import global_model
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.model_loading import load_global

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
}


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, and its parameter again in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(5, dtype=torch.complex64), requires_grad=False)
        self.several = nn.ParameterList([self.weight, nn.Parameter(torch.randn(5) + 1j)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.first(x)) * self.weight + self.frozen
        for factors in self.several:
            waves = waves * factors / self.weight.abs().mean()
        return self.last(torch.fft.irfft(waves))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Spectral()


def model() -> nn.Module:
    return Spectral()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pairs_train_as_complex_numbers(optimizer: str, seed: int) -> None:
    plain, pairs = model_of(seed), with_real_parameters(model_of(seed))
    both = [(m, OPTIMIZERS[optimizer](m)) for m in (plain, pairs)]
    for _ in range(5):
        x = torch.randn(4, 8)
        for trained, steps in both:
            steps.zero_grad()
            trained(x).square().mean().backward()
            steps.step()
    for name, value in plain.state_dict().items():
        expected = torch.view_as_real(value) if value.is_complex() else value
        torch.testing.assert_close(pairs.state_dict()[name], expected)


def test_a_parameter_of_several_modules_stays_one(seed: int) -> None:
    pairs = with_real_parameters(model_of(seed))
    by_name = dict(pairs.named_parameters(remove_duplicate=False))
    assert by_name["weight"] is by_name["several.0"]
    assert not by_name["frozen"].requires_grad
    x = torch.randn(2, 8)
    torch.testing.assert_close(copy.deepcopy(pairs)(x), model_of(seed)(x))


def test_weights_files_may_have_complex_numbers(seed: int, tmp_path: Path) -> None:
    """Those of a plain model are read, and those of the global model go back into it."""
    plain, file = model_of(seed), tmp_path / "weights.safetensors"
    file.write_bytes(GlobalModel(plain.state_dict()).save())
    loaded, state = load_global(f"{__name__}:model", file)
    x = torch.randn(2, 8)
    torch.testing.assert_close(loaded(x), plain(x))
    assert not any(value.is_complex() for value in state.tensors.values())
    other = model_of(seed + 1)
    global_model.from_bytes(state.save(), "file").load_into(other)
    torch.testing.assert_close(other(x), plain(x))
