"""Fourier transforms as real matrix products: the same results and gradients as torch's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from exporters.recording.capture import capture
from exporters.recording.replacements.complex_numbers.complex_context import ComplexPairs
from exporters.recording.replacements.complex_numbers.fourier import FOURIER
from exporters.recurrence.replacements import Replacements
from parameters import quarter_quick, some_long
from refusals import refused

Compute = Callable[[Tensor], Tensor]
WEIGHTS = torch.arange(24.0).view(3, 4, 2).sin()
WINDOW = torch.hann_window(8)


def spectral_convolution(x: Tensor) -> Tensor:
    """The layer of a Fourier neural operator, with weights as pairs of real numbers."""
    weight = torch.view_as_complex(WEIGHTS.to(x))
    frequencies = torch.fft.rfft(x)
    out = torch.zeros(*frequencies.shape, dtype=x.dtype.to_complex())
    out[..., :4] = torch.einsum("bim,im->bim", frequencies[..., :4], weight)
    return torch.fft.irfft(out, n=x.size(-1))


def autocorrelation(x: Tensor) -> Tensor:
    q, k = torch.fft.rfft(x, dim=-1), torch.fft.rfft(x.tanh(), dim=-1)
    return torch.fft.irfft(q * torch.conj(k), dim=-1)


def long_convolution(x: Tensor) -> Tensor:
    """The layer S4D: a kernel of complex exponentials, and a convolution with it by transforms."""
    n = x.shape[-1]
    a = -torch.exp(x[0, :, :4]) + 1j * x[0, :, 4:]
    waves = torch.exp(a.unsqueeze(-1) * torch.arange(n))
    c = torch.view_as_complex(WEIGHTS.to(x)) * (torch.exp(a / 4) - 1.0) / a
    kernel = 2 * torch.einsum("hn, hnl -> hl", c, waves).real
    return torch.fft.irfft(torch.fft.rfft(x, n=2 * n) * torch.fft.rfft(kernel, n=2 * n))[..., :n]


def several(x: Tensor) -> Tensor:
    """Products of matrices in several ways."""
    z = torch.fft.rfft(x) / 8
    pairs = [z @ z.mT, z @ z.mH, torch.matmul(z, z.adjoint()), torch.inner(z, z[0])]
    w = torch.view_as_complex(WEIGHTS.to(x))
    pairs += [F.linear(z[..., :4], w, w[:, 0]), torch.tensordot(z[..., :4], w, ([2], [1]))]
    pairs += [torch.einsum("bij,bkj,kl->bil", z, z, w[:, :3]), torch.einsum("bij->bi", z)[:, None]]
    return torch.cat([torch.view_as_real(pair).flatten(1) for pair in pairs], 1)


def in_place(x: Tensor) -> Tensor:
    z = torch.fft.rfft(x)
    z *= 2
    z.mul_(1j).add_(x[..., :5])
    z[:, 0] = 1j
    return z.masked_fill(x[..., :5] > 1, 3).imag


TRANSFORMS: dict[str, Compute] = {
    "imaginary unit": lambda x: torch.exp(-x.square() + 1j * x).real + (1j / (x.exp() - 2j)).imag,
    "arithmetic with the unit": lambda x: ((1j - x) * (x + 1j) / 2j - torch.mul(x, 1j)).abs(),
    "long convolution": long_convolution,
    "products": several,
    "product of vectors": lambda x: torch.vdot(*(torch.fft.rfft(x[0, :2]) / 8)).abs() * x,
    "writes": in_place,
    "types": lambda x: (x.to(x.dtype.to_complex()) * 2j).imag + (x.cdouble() + 1j).to(x.dtype),
    "kinds of zeros": lambda x: (
        (
            (torch.zeros_like(x, dtype=torch.cfloat) + torch.ones(8, dtype=torch.cfloat)) * (x - 1j)
            + torch.full((8,), 2j) * (x + 0j).new_zeros(8)
        ).imag
    ),
    "constant": lambda x: (torch.tensor([1j, 2, 3, 4, 5]) * torch.fft.rfft(x)).imag,
    "waves": lambda x: (torch.sin(x + 0.5j * x) * (x - 1j * x.cos()).cos()).imag,
    "hyperbolic": lambda x: (torch.sinh(x + 1j) * torch.cosh(x * (1 - 1j))).real,
    "activations": lambda x: (torch.tanh(x + 0.3j * x) * torch.sigmoid(x * (1 - 0.5j))).imag,
    # Without "+ x" the gradient may be nothing but rounding errors.
    "activation of large numbers": lambda x: torch.tanh(200 * (x + 1j)).real + x,
    "roots": lambda x: ((x.exp() + 1j * x).sqrt() + (3 + 1j * x) ** 0.5 - (x - 3j).log()).imag,
    "power of a number": lambda x: (2 ** (x * 1j) + (x.exp() + 1) ** (0.5j * x)).real,
    "directions": lambda x: torch.sgn(x + 1j).real + (x + 2j).norm(dim=-1, keepdim=True),
    "chosen": lambda x: (
        torch.where(x > 0, x * 1j, x + 1j).imag + torch.where(x > 0, x * 2j, 0).abs()
    ),
    "deviations": lambda x: (x + 1j * x.cos()).std(-1) * (x * (1 + 1j)).var(2),
    "product of a row": lambda x: ((x + 2j) / 3)[..., :3].prod(-1).real,
    "joined": lambda x: torch.hstack([x * 1j, torch.fft.fft(x), x]).imag,
    "between": lambda x: torch.lerp(torch.fft.rfft(x), torch.fft.rfft(x.sin()), 0.3).imag,
    "repeated": lambda x: (
        (x * 1j).repeat_interleave(2, 1).tile(1, 1, 2).imag[:, :, : len(x[0] * 1j)]
    ),
    "magnitude": lambda x: torch.fft.rfft(x).abs(),
    "power": lambda x: torch.fft.rfft(x, norm="ortho").abs() ** 2,
    "phase": lambda x: torch.fft.rfft(x)[..., 1:3].angle(),
    "real part": lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real,
    "odd length": lambda x: torch.fft.irfft(torch.fft.rfft(x[..., :7]) * 2, n=7),
    "padded": lambda x: torch.fft.irfft(torch.fft.rfft(x, n=12), n=10, norm="forward"),
    "there and back": lambda x: torch.fft.ifft(torch.fft.fft(x) * torch.complex(x, x.cos())).real,
    "two axes": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * x.mean((1, 2), keepdim=True)),
    "all axes": lambda x: torch.view_as_real(torch.fft.fftn(x, dim=(1, 2))).flatten(2),
    "shifted": lambda x: torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1)).imag,
    "rotated": lambda x: (torch.fft.rfft(x) * torch.polar(x[..., :5].exp(), x[..., :5])).real,
    "difference": lambda x: abs(1 - torch.fft.rfft(x).transpose(1, 2) / 3).mean(1),
    "quotient": lambda x: (torch.fft.rfft(x) / (torch.fft.rfft(x.exp()) + 9)).abs(),
    "quotient of a number": lambda x: (2 / (torch.fft.rfft(x) + 9j)).imag,
    "quotient of a tensor": lambda x: (x[..., :5] / (torch.fft.rfft(x) + 9)).real,
    "quotient by numbers": lambda x: (torch.div(torch.fft.rfft(x), 3 - 4j) / 2).real,
    "reciprocal": lambda x: (torch.fft.rfft(x) + 9).reciprocal().imag,
    "powers": lambda x: ((torch.fft.rfft(x) / 8) ** 3 + torch.pow(torch.fft.rfft(x) / 8, 2)).real,
    "negative power": lambda x: ((torch.fft.rfft(x) + 9j) ** -2).imag,
    "no power": lambda x: (torch.fft.rfft(x) ** 0).real * x[..., :5],
    "difference from a tensor": lambda x: (x[..., :5] - torch.fft.rfft(x)).imag,
    "filled": lambda x: torch.view_as_real(F.pad(torch.fft.rfft(x), (1, 2), value=3)).flatten(2),
    "filled with zeros": lambda x: F.pad(torch.fft.rfft(x), (0, 1)).imag,
    "reflected": lambda x: F.pad(torch.fft.rfft(x), (2, 1), mode="replicate").imag,
    "sizes of the last axes": lambda x: torch.fft.fftn(x, s=(5,)).imag,
    "sizes of two axes": lambda x: torch.fft.irfftn(torch.fft.rfftn(x, s=(4, 6)), s=(3, 5)),
    "autocorrelation": autocorrelation,
    "spectral convolution": spectral_convolution,
    "spectrogram": lambda x: torch.stft(
        x.flatten(1), 8, 2, window=WINDOW.to(x), return_complex=True
    ).abs(),
    "short window": lambda x: torch.stft(
        x.flatten(1), 8, 4, 6, WINDOW[:6].to(x), center=False, normalized=True, return_complex=True
    ).abs(),
    "spectrogram and back": lambda x: torch.istft(
        torch.stft(x.flatten(1), 8, 2, window=WINDOW.to(x), return_complex=True) * (2 + 1j),
        *(8, 2),
        window=WINDOW.to(x),
        length=26,
    ),
    "short window and back": lambda x: torch.istft(
        torch.stft(
            x.flatten(1), 8, 2, 6, WINDOW[:6].to(x) + 1, normalized=True, return_complex=True
        )
        ** 2,
        *(8, 2, 6, WINDOW[:6].to(x) + 1),
        normalized=True,
    ),
    "both sides": lambda x: torch.view_as_real(
        torch.stft(x.flatten(1), 8, 8, window=WINDOW.to(x), onesided=False, return_complex=True)
    ),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_results_and_gradients_are_torchs(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for context in (Replacements({}), ComplexPairs(FOURIER)):
        with context:
            y = TRANSFORMS[name](x)
            torch.manual_seed(seed)
            (gradient,) = torch.autograd.grad((y * torch.randn(y.shape)).sum(), x)
            results.append((y.detach(), gradient))
    for expected, actual in zip(*results, strict=True):
        # The gradient of a magnitude near zero multiplies rounding errors.
        assert (actual - expected).norm() <= 1e-9 * (1 + expected.norm())


class Model(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.compute = nn.Linear(8, 8), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.first(x))


RECORDED_ELSEWHERE = (
    *("magnitude", "power", "real part", "odd length", "there and back", "spectrogram"),
    *("sizes of the last axes", "sizes of two axes", "reciprocal", "no power", "negative power"),
    *("quotient of a number", "quotient of a tensor", "quotient by numbers", "filled with zeros"),
    "difference from a tensor",
)
"""The replaced functions of these are in other rows, or in those of test_operator_support.py."""


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", quarter_quick(some_long(TRANSFORMS, *RECORDED_ELSEWHERE)))
def test_models_are_recorded(name: str) -> None:
    captured = capture(Model(TRANSFORMS[name]), (3, 8))
    values = [node.meta.get("val") for node in captured.training.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)


def test_another_function_of_complex_numbers_is_refused_with_its_line() -> None:
    with refused("model.complex-numbers", "test_fourier.py, line", operator="acos"):
        capture(Model(lambda x: torch.acos(torch.fft.rfft(x)).real), (3, 8))


class Rotary(nn.Module):
    """Rotations by a complex table that the model keeps."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        turns = torch.polar(torch.ones(5, 4), torch.arange(5).unsqueeze(1) * torch.rand(4))
        if kept == "attribute":
            self.turns = turns
        else:
            self.register_buffer("turns", turns, persistent=kept == "buffer")

    def forward(self, x: Tensor) -> Tensor:
        q = torch.view_as_complex(self.first(x).reshape(*x.shape[:-1], -1, 2))
        turns = self.turns[: x.shape[1]].view(1, x.shape[1], 4)
        return self.last(torch.view_as_real(q * turns + turns * q.conj()).flatten(2).mean(1))


@pytest.mark.parametrize("kept", ["attribute", "buffer", "buffer that is not saved"])
def test_a_complex_table_that_the_model_keeps_is_a_constant(kept: str) -> None:
    captured = capture(Rotary(kept), (3, 8))
    for graph in (captured.training, captured.inference):
        values = [node.meta.get("val") for node in graph.graph.nodes]
        assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
