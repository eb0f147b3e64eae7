"""Functions that are recorded as other operators: the same results and gradients as PyTorch's."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from exporters.programs.dropout import SeededBernoulli, uniform_numbers
from exporters.recording.capture import capture
from exporters.recording.replacements.custom_gradients import own_gradients, recorded_functions
from exporters.recording.replacements.fourier import FOURIER
from exporters.recording.replacements.recorded_forms import FORMS as FORMS_OF_TORCH
from exporters.recording.replacements.uniform_draws import uniform_draws
from exporters.recurrence.replacements import Replacements
from parameters import half_quick, quarter_quick
from refusals import refused

Compute = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Two linear layers, and what a model computes between them."""

    def __init__(self, compute: Compute, only_training: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.compute, self.only_training = compute, only_training

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.compute(h) if self.training or not self.only_training else h)


class Cell(nn.Module):
    """A cell in a loop over time."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state[0] if isinstance(state, tuple) else state


# Capture compares the results and gradients of a recording with those of the model itself.
FORMS: dict[str, Compute] = {
    "product of a row": lambda h: h * h.prod(1, keepdim=True),
    "product of a row of odd length": lambda h: h * torch.prod(h[:, 1:], dim=-1)[:, None],
    "product with a zero": lambda h: h * torch.cat([h, 0 * h[:, :1]], 1).prod(1, True),
    "largest in any order": lambda h: h + h.topk(3, sorted=False)[0].sum(1, keepdim=True),
    "smallest": lambda h: h + torch.topk(h, k=2, dim=1, largest=False).values.sum(1)[:, None],
    "halves of a batch": lambda h: torch.cat(torch.cat([h, h], 0).split(h.size(0)), 1)[:, :8],
    "chunks of a batch": lambda h: torch.cat(torch.cat([h, h], 0).chunk(2), 1)[:, :8],
    "counts": lambda h: h + torch.bincount(torch.tensor([0, 1, 1, 2]), minlength=8),
    "masked write": lambda h: written(h, h > 0, 0),
    "write of infinite numbers": lambda h: written(h, h.isinf(), torch.tensor(1.0)),
    "write of listed columns": lambda h: written(h, (slice(None), [0, -2]), 0.5),
    "write of columns": lambda h: written(h, (slice(None), torch.tensor([0, 2])), h[:, 4:6] * 2),
    "write by a constant mask": lambda h: written(h, (slice(None), torch.arange(8) > 3), 0),
    "copied": lambda h: h.index_copy(1, torch.tensor([0, 2]), h[:, 4:6] * 2),
    "filled": lambda h: h.index_fill(-1, torch.tensor([0, -2]), 0.5),
    "taken along": lambda h: torch.take_along_dim(h, h.argsort(1), 1),
    "taken by constants": lambda h: h + h.take_along_dim(torch.tensor([[0]]), dim=1),
    "logits": lambda h: torch.logit(h.sigmoid(), eps=0.1),
    "repeated each": lambda h: h.repeat_interleave(torch.tensor([2, 0, 1, 1, 1, 1, 1, 1]), 1),
    "a constant's number": lambda h: h * torch.tensor([1, 2, 3]).tolist()[1],
    "a number with a fraction": lambda h: h * torch.tensor(0.5).item(),
    "quantized": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 2, -5, 5),
    "pairs": lambda h: h + h[:, torch.tril_indices(4, 4, -1)[0]].sum(1, keepdim=True),
    "densities": lambda h: h * functional.gaussian_nll_loss(h, h.tanh(), var=h[:, 0].exp()),
    "densities of small variances": lambda h: functional.gaussian_nll_loss(
        h, h.sin(), h.abs(), full=True, eps=0.5, reduction="none"
    ),
    "densities of one variance": lambda h: h * functional.gaussian_nll_loss(h, 0 * h, 2.0),
    "gamma functions": lambda h: h + torch.lgamma((4 * h).exp()) + (3 * h).exp().digamma(),
    "counts of events": lambda h: (
        h * torch.distributions.Poisson(h.exp()).log_prob(torch.arange(0.0, 80, 10))
    ),
    "shares": lambda h: (
        h * torch.distributions.Beta(h.exp(), (2 * h).exp()).log_prob(h.sigmoid()).sum()
    ),
    "windows": lambda h: h * torch.kaiser_window(8) * torch.hamming_window(8, periodic=False),
    "bins": lambda h: h * torch.searchsorted(torch.linspace(-1, 1, 5), h),
    "bins of each row": lambda h: h * torch.searchsorted(h.sort(1)[0], h * 0.9, right=True),
    "largest so far": lambda h: h + torch.cummax(h, 1).values,
    "largest so far, equal ones": lambda h: h.round().cummax(dim=-1)[0] * h,
    "place of the smallest so far": lambda h: h * h.cummin(1).indices + h.cummin(1).values,
    "smallest so far of booleans": lambda h: h * torch.cummin(h > -1, 1).values,
    "combinations": lambda h: h + torch.combinations(h[0], 3)[:8, 1],
    "repeated elements": lambda h: h[:, torch.combinations(torch.arange(4), 2, True)[:8, 1]],
    "covariances": lambda h: h @ torch.cov(h.T) + h[0].cov(),
    "weighted covariances": lambda h: (
        h
        @ torch.cov(
            torch.arange(24.0).view(8, 3).sin(),
            fweights=torch.tensor([1, 2, 3]),
            aweights=torch.tensor([0.5, 1.0, 2.0]),
        )
    ),
    "correlations": lambda h: h @ h.T.corrcoef(),
    "writes through .to": lambda h: writes_through_to(h),
    "true up to here": lambda h: h * torch.cumprod(h > -1, dim=1),
    "products of whole numbers": lambda h: h * (h > -1).int().cumprod(1),
    "counts of int32": lambda h: h + torch.tensor([0, 1, 1]).int().bincount(minlength=8),
}
NAMED: dict[str, Compute] = {
    "topk": lambda h: h + torch.topk(input=h, k=2, dim=1).values.sum(1, keepdim=True),
    "chunk": lambda h: torch.cat(torch.chunk(input=h, chunks=2, dim=1)[::-1], 1),
    "unbind": lambda h: h + torch.stack(torch.unbind(input=h, dim=1)[::-1], 1),
    "prod": lambda h: h + torch.prod(input=h, axis=1, keepdims=True),
    "cumprod": lambda h: torch.cumprod(input=h, axis=1),
    "cummax": lambda h: h + torch.cummax(input=h, dim=1).values,
    "cummin": lambda h: h + torch.cummin(input=h, dim=1).values,
    "median": lambda h: h + torch.median(input=h, dim=1, keepdim=True).values,
    "renorm": lambda h: torch.renorm(h, p=2, dim=1, maxnorm=1) + h.renorm(1, 0, 0.5),
    "power in place": lambda h: (2 * h).pow_(2).add_(h),
    "kthvalue": lambda h: h + torch.kthvalue(input=h, k=2, dim=1, keepdim=True).values,
    "logit": lambda h: torch.logit(input=h.sigmoid(), eps=0.1),
    "index_fill": lambda h: torch.index_fill(input=h, dim=1, index=torch.tensor([1]), value=0.5),
    "index_copy": lambda h: torch.index_copy(
        input=h, dim=1, index=torch.tensor([1]), source=h[:, :1]
    ),
    "take_along_dim": lambda h: torch.take_along_dim(input=h, indices=h.argsort(1), dim=1),
    "bincount": lambda h: h + torch.bincount(input=torch.tensor([0, 1, 1]), minlength=8),
    "searchsorted": lambda h: (
        h * torch.searchsorted(sorted_sequence=torch.linspace(-1, 1, 5), input=h)
    ),
    "one_hot": lambda h: h + functional.one_hot(input=h.argmax(1), num_classes=8),
    "fake_quantize": lambda h: torch.fake_quantize_per_tensor_affine(
        h, scale=0.1, zero_point=2, quant_min=-5, quant_max=5
    ),
    "rfft": lambda h: h + torch.fft.rfft(input=h, dim=1).abs().mean(1, keepdim=True),
    "fft2": lambda h: h + torch.fft.fft2(input=h[:, None]).real[:, 0],
    "view_as_complex": lambda h: (
        h + torch.view_as_complex(input=h.unflatten(1, (4, 2))).abs().sum(1, keepdim=True)
    ),
    "polar": lambda h: h * torch.polar(abs=h, angle=h).real,
    "cell": lambda h: torch.gru_cell(
        input=h, hx=h, w_ih=torch.ones(24, 8), w_hh=torch.eye(8).repeat(3, 1)
    ),
}
"""Functions whose arguments are all named as torch names them."""


@pytest.mark.parametrize("name", NAMED)
def test_arguments_may_be_named(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    h, results = torch.randn(4, 8), []
    for context in (Replacements({}), Replacements(FORMS_OF_TORCH | FOURIER)):
        with context:
            results.append(NAMED[name](h))
    torch.testing.assert_close(*results)


RANDOM = {
    "rand": lambda h: torch.rand_like(input=h),
    "randn": lambda h: torch.randn_like(input=h),
    "randint": lambda h: torch.randint_like(input=h, low=1, high=5),
    "bernoulli": lambda h: torch.bernoulli(input=h.sigmoid()),
}


@pytest.mark.parametrize("name", RANDOM)
def test_arguments_of_draws_may_be_named(name: str) -> None:
    with uniform_draws(), SeededBernoulli(1):
        assert RANDOM[name](torch.zeros(4, 8)).shape == (4, 8)


def written(h: Tensor, index: Any, value: Any) -> Tensor:
    h = h.clone()
    h[index] = value
    return h


def writes_through_to(h: Tensor) -> Tensor:
    out = torch.zeros(h.shape[0], 2, 4).to(h.device)
    for column in range(2):
        out[:, column, :] = h[:, column * 4 : column * 4 + 4] * 2
    return out.permute(0, 2, 1).flatten(1)


@pytest.mark.parametrize("name", quarter_quick(FORMS))
def test_a_form_computes_the_same(name: str) -> None:
    capture(Between(FORMS[name], only_training=False), (6,))


@pytest.mark.parametrize(
    "cell",
    half_quick(
        [
            nn.LSTMCell(4, 5),
            nn.LSTMCell(4, 5, bias=False),
            nn.GRUCell(4, 5),
            nn.RNNCell(4, 5),
            nn.RNNCell(4, 5, bias=False, nonlinearity="relu"),
        ]
    ),
    ids=str,
)
def test_cells_are_recorded_in_loops(cell: nn.RNNCellBase) -> None:
    capture(Cell(cell), (3, 4))


class Bags(nn.Module):
    """Bags of ids, with a weight of each id if `weighted`."""

    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(7, 4, **options), nn.Linear(4, 3)
        self.weights = nn.Embedding(7, 1) if weighted else None

    def forward(self, ids: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights(ids).squeeze(-1)
        return self.last(self.bags(ids, per_sample_weights=weights))


BAGS: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("sum", "mean", "max")},
    **{f"{mode} with padding": {"mode": mode, "padding_idx": 2} for mode in ("sum", "mean", "max")},
    "last id as padding": {"padding_idx": -1},
    "weighted": {"mode": "sum", "weighted": True},
    "weighted with padding": {"mode": "sum", "weighted": True, "padding_idx": 0},
}


@pytest.mark.parametrize("name", half_quick(BAGS))
def test_bags_of_one_size_are_recorded(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Bags(**BAGS[name])
    captured = capture(model, (5,))
    assert captured.sample_limit == 7
    ids = torch.tensor([[2] * 5, [6] * 5, [0] * 5, [3] * 5, [2, 3, 3, 0, 6], [1, 2, 2, 6, 3]])
    results = []
    for context in (Replacements({}), Replacements(FORMS_OF_TORCH)):
        with context:
            y = model(ids)
            gradients = torch.autograd.grad(y.sin().sum(), list(model.parameters()))
        results.append((y.detach(), *gradients))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}]
)
def test_a_bag_with_another_gradient_is_refused_with_the_line(option: dict[str, Any]) -> None:
    with refused("model.embedding-bag", option=next(iter(option))) as caught:
        capture(Bags(mode="sum", **option), (5,))
    assert "test_recorded_forms.py, line" in str(caught.value)
    instead = {name: None if name == "max_norm" else False for name in option}
    assert all(f"Set {name}={value}." in str(caught.value) for name, value in instead.items())
    capture(Bags(mode="sum", **instead), (5,))  # the remedy


DRAWS: dict[str, Compute] = {
    "randn of a shape": lambda h: h + torch.randn(h.shape) * 0.1,
    "randn of sizes": lambda h: h + torch.randn(h.size(0), 8, device=h.device),
    "randn of a named size": lambda h: h + torch.randn(size=(h.size(0), 8)),
    "rand like": lambda h: h * torch.rand_like(h),
    "normal in place": lambda h: h + torch.empty_like(h).normal_(0, 0.1),
    "normal around": lambda h: torch.normal(h, 0.1),
    "uniform in place": lambda h: h + torch.zeros_like(h).uniform_(-0.1, 0.1),
    "gumbel softmax": lambda h: functional.gumbel_softmax(h, tau=0.5, hard=True),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "branches": lambda h: h * torch.empty(h.shape[0], 1).bernoulli_(0.8) / 0.8,
    "reparameterised": lambda h: torch.distributions.Normal(h, h.exp()).rsample(),
    "integers": lambda h: h * torch.randint(1, 5, (h.size(0), 1)),
    "masked tokens": lambda h: h * (torch.rand(h.size(0), 8).argsort(1) < 4),
    "permuted features": lambda h: h[:, torch.randperm(8)],
    "alpha dropout": lambda h: functional.alpha_dropout(h, 0.3, training=True),
    "feature alpha dropout": lambda h: functional.feature_alpha_dropout(
        h.view(-1, 4, 2), 0.3, training=True
    ).flatten(1),
}


@pytest.mark.parametrize("name", half_quick(DRAWS))
def test_draws_repeat_with_the_seed(name: str) -> None:
    model = Between(DRAWS[name])
    capture(model, (6,))  # compares outputs and gradients of model and recording for one seed
    x, results = torch.randn(4, 6), []
    for seed in (1, 1, 2):
        with SeededBernoulli(seed), uniform_draws():
            results.append(model(x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_alpha_dropout_maps_numbers_as_pytorch(share: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(200, 50, dtype=torch.float64)
    own = functional.alpha_dropout(x, share, training=True)
    dropped = own == own.flatten().mode().values  # one value for all of them
    (slope, offset) = np.polyfit(x[~dropped].numpy(), own[~dropped].numpy(), 1)
    with SeededBernoulli(seed % (2**31 - 1)), uniform_draws():
        ours = functional.alpha_dropout(x, share, training=True)
        channels = functional.feature_alpha_dropout(x[:, :, None].expand(-1, -1, 3), share, True)
    gone = ours == ours.flatten().mode().values
    torch.testing.assert_close(ours[gone], own[dropped][0].expand(int(gone.sum())))
    torch.testing.assert_close(ours[~gone], x[~gone] * slope + offset)
    assert abs(float(gone.double().mean()) - share) <= 5 * math.sqrt(share * (1 - share) / 10_000)
    assert torch.equal(channels, channels[:, :, :1].expand_as(channels))


def test_draws_have_their_distribution(seed: int) -> None:
    """Means, deviations and correlations within five deviations of their own."""
    n = 40_000
    with SeededBernoulli(seed % (2**31 - 1)), uniform_draws():
        normal, other, uniform = torch.randn(n // 100, 100), torch.randn(n), torch.rand(n)
        integers, waits = torch.randint(3, 7, (n,)), torch.empty(n).exponential_(2.0)
        order = torch.randperm(50)
    normal = normal.flatten()
    for values, mean, variance in (
        (normal, 0.0, 1.0),
        (normal**2, 1.0, 2.0),
        (normal**4, 3.0, 96.0),
        (normal * other, 0.0, 1.0),
        (normal * normal.roll(1), 0.0, 1.0),
        (normal * normal.roll(100), 0.0, 1.0),
        (uniform, 0.5, 1 / 12),
        (integers.double(), 4.5, 1.25),
        (waits, 0.5, 0.25),
    ):
        assert abs(float(values.double().mean()) - mean) <= 5 * math.sqrt(variance / n)
    assert sorted(order.tolist()) == list(range(50))
    assert set(integers.tolist()) == {3, 4, 5, 6}


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one bound": lambda like: torch.randint(3, like.shape) + 7,
    "two bounds": lambda like: torch.randint(7, 10, like.shape),
    "a named bound": lambda like: torch.randint(7, high=10, size=like.shape),
    "named bounds": lambda like: torch.randint(low=7, high=10, size=like.shape),
    "like a tensor": lambda like: torch.randint_like(like, 7, 10),
    "like a tensor, a named bound": lambda like: torch.randint_like(like, 7, high=10),
    "like a tensor, one named bound": lambda like: torch.randint_like(like, high=3) + 7,
    "single numbers": lambda like: torch.stack([torch.randint(7, 10, size=()) for _ in like]),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_drawn_between_their_bounds(name: str) -> None:
    for context in (uniform_draws(), Replacements({})):
        with context, SeededBernoulli(1):
            drawn = INTEGERS[name](torch.zeros(200))
        assert set(drawn.tolist()) == {7, 8, 9}


def test_uniform_numbers_are_exact_in_float32_and_never_the_ends(seed: int) -> None:
    drawn = uniform_numbers((1000, 100), torch.tensor(seed % (2**31 - 1)), 1)
    assert drawn.dtype == torch.float32
    assert torch.equal((drawn * 2**24).double(), drawn.double() * 2**24)
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1


def test_dropout_of_predictions_is_refused() -> None:
    def compute(h: Tensor) -> Tensor:
        return functional.dropout(h, 0.5)

    with refused("model.random-numbers", operator="aten.dropout.default") as caught:
        capture(Between(compute, only_training=False), (6,))
    assert "training=self.training" in str(caught.value)
    capture(Between(compute), (6,))  # the remedy


@pytest.mark.parametrize(
    "compute",
    [
        lambda h: torch.stack([row * 2 for row in h]),
        lambda h: torch.stack([h[row] * 2 for row in range(h.shape[0])]),
        lambda h: h.view(h.size(0).__int__(), -1),
    ],
    ids=["rows", "numbers of rows", "integer"],
)
def test_code_that_fixes_the_batch_is_refused_with_its_line(compute: Compute) -> None:
    with refused("model.fixed-batch") as caught:
        capture(Between(compute, only_training=False), (6,))
    assert "test_recorded_forms.py, line" in str(caught.value)


@pytest.mark.parametrize(
    ("compute", "instead", "words"),
    [
        (
            lambda h: h * functional.one_hot(h.argmax(1)).sum(),
            lambda h: h * functional.one_hot(h.argmax(1), 8),
            "Pass the number of classes",
        ),
        (
            lambda h: h * float(np.mean(h.detach().numpy())),
            lambda h: h * h.detach().mean(),
            "Compute with torch",
        ),
    ],
    ids=["one-hot", "numpy"],
)
def test_code_that_reads_values_is_refused_with_a_remedy(
    compute: Compute, instead: Compute, words: str
) -> None:
    with refused("model.data-dependent-code") as caught:
        capture(Between(compute, only_training=False), (6,))
    assert words in str(caught.value)
    assert "test_recorded_forms.py, line" in str(caught.value)
    capture(Between(instead, only_training=False), (6,))


def test_the_length_of_a_batch_is_a_size_in_the_modules_of_the_model() -> None:
    builtin = len
    capture(Between(lambda h: h.view(len(h), -1), only_training=False), (6,))
    capture(Between(lambda h: h.view(int(h.size(0)), -1), only_training=False), (6,))
    assert len is builtin
    with refused("model.fixed-batch") as caught:
        capture(Between(lambda h: h.view(h.__len__(), -1), only_training=False), (6,))
    assert "h.view(h.__len__(), -1)" in str(caught.value)
    with refused("model.fixed-batch"):
        capture(Between(lambda h: torch.stack([h[n] for n in range(len(h))])), (6,))
    capture(Between(lambda h: h.view(h.shape[0], -1), only_training=False), (6,))  # the remedy


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_another_thread_may_call_functions_while_a_model_is_recorded() -> None:
    with own_gradients() as calls, recorded_functions(), ThreadPoolExecutor(1) as pool:
        y = pool.submit(Doubled.apply, torch.ones(3)).result()
    assert y.tolist() == [2, 2, 2]
    assert not calls
