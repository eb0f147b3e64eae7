"""Functions that are recorded as other operators: the same results and gradients as PyTorch's."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from between_layers import Between, Compute
from exporters.recording.capture import capture
from exporters.recording.replacements.complex_numbers.fourier import FOURIER
from exporters.recording.replacements.custom_gradients import own_gradients, recorded_functions
from exporters.recording.replacements.function_forms.recorded_forms import FORMS as FORMS_OF_TORCH
from exporters.recurrence.replacements import Replacements
from parameters import half_quick, quarter_quick
from refusals import refused


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


def grouped(
    h: Tensor, kernels: Tensor, shape: tuple[int, int, int], groups: int = 2, **options: Any
) -> Tensor:
    """Convolve each sample (8,), as two channels (2, 2), with its own kernels of this shape."""
    n = h.shape[0]
    image, weight = h.reshape(1, n * 2, 2, 2), kernels.reshape(-1, *shape)
    y = functional.conv2d(image, weight, groups=n * groups, **options)
    return y.reshape(n, -1).sum(1, keepdim=True).sin() * h


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
    "write of values by a constant mask": lambda h: written(
        h, (..., torch.arange(8) > 4), h[:, :3].sin()
    ),
    "copied": lambda h: h.index_copy(1, torch.tensor([0, 2]), h[:, 4:6] * 2),
    "filled": lambda h: h.index_fill(-1, torch.tensor([0, -2]), 0.5),
    "taken along": lambda h: torch.take_along_dim(h, h.argsort(1), 1),
    "taken by constants": lambda h: h + h.take_along_dim(torch.tensor([[0]]), dim=1),
    "logits": lambda h: torch.logit(h.sigmoid(), eps=0.1),
    "copies joined": lambda h: h * torch.cat([torch.linspace(-1, 1, 8)[None]] * h.size(0)),
    "copies stacked": lambda h: (
        h + torch.stack([torch.arange(8.0), h[0]] * h.size(0), dim=1).view(8, -1, 2)[..., 0].t()
    ),
    "repeated each": lambda h: h.repeat_interleave(torch.tensor([2, 0, 1, 1, 1, 1, 1, 1]), 1),
    "a constant's number": lambda h: h * torch.tensor([1, 2, 3]).tolist()[1],
    "a number with a fraction": lambda h: h * torch.tensor(0.5).item(),
    "kernels of each sample": lambda h: grouped(h, h.tanh(), (1, 2, 2), padding=1),
    "kernels over both channels": lambda h: grouped(h, h.cos(), (2, 1, 2), groups=1, stride=2),
    "kernels and biases of each sample": lambda h: grouped(
        h, h.sin(), (1, 1, 2), padding=(1, 2), dilation=2, bias=h[:, 4:].flatten()
    ),
    "copies by NumPy": lambda h: (
        h * torch.LongTensor(np.tile(np.arange(1, 9), [h.shape[0], 1])).to(h.device)
    ),
    "repeated by NumPy": lambda h: (
        h * torch.from_numpy(np.repeat(np.arange(8.0)[None], h.shape[0], axis=0)).float()
    ),
    "zeros by NumPy": lambda h: h + torch.from_numpy(np.zeros((h.shape[0], 8), np.float32)),
    "ones by NumPy": lambda h: h + torch.FloatTensor(np.ones([h.size(0), 1])),
    "numbers by NumPy": lambda h: h * torch.from_numpy(np.arange(h.shape[0]))[:, None].float(),
    "filled by NumPy": lambda h: h * torch.tensor(np.full((h.shape[0], 8), 0.5)).float(),
    "first sample": lambda h: h + h[0].sin() + h[-1].cos(),
    "chosen booleans": lambda h: h * torch.where(h > 0, h > 0.5, h < -0.5),
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
    "lower triangular system": lambda h: (
        torch.linalg.solve_triangular(torch.eye(8) + h.T[:, :1].tanh() * h[0], h.T, upper=False).T
    ),
    "upper triangular system": lambda h: torch.linalg.solve_triangular(
        h.T @ h, h, upper=True, left=False, unitriangular=True
    ),
    "normal densities": lambda h: (
        h
        * torch.distributions.MultivariateNormal(
            torch.zeros(8), scale_tril=torch.eye(8) + torch.tril(h[0].tanh() * h[0][:, None], -1)
        )
        .log_prob(h)
        .unsqueeze(1)
    ),
    "filled diagonal": lambda h: (h @ h.T).fill_diagonal_(-9.0).softmax(1) @ h,
    "mask without its diagonal": lambda h: (
        (h @ h.T * torch.ones(h.shape[0], h.shape[0], dtype=torch.bool).fill_diagonal_(False)) @ h
    ),
    "margins of several classes": lambda h: (
        h
        * functional.multilabel_margin_loss(
            h, torch.where(h > 0, h.argsort(1), -1), reduction="none"
        ).unsqueeze(1)
    ),
    "margins of one class": lambda h: (
        h * nn.MultiLabelMarginLoss()(h[0], torch.tensor([3, 3, -1, 0, 0, 0, 0, 0]))
    ),
    "differences": lambda h: h * torch.gradient(h, spacing=0.5, dim=1)[0],
    "differences along two axes": lambda h: sum(
        torch.gradient(h.view(-1, 2, 4), spacing=(1.0, 0.1), dim=(1, -1))
    ).flatten(1),
    "close numbers": lambda h: h * torch.isclose(h, h.round(), atol=0.2),
    "infinite numbers are not close": lambda h: (
        h * torch.isclose(h, h / 0, rtol=0.1) + h * (h / 0).isclose(h.relu() / 0, equal_nan=True)
    ),
    "copied signs": lambda h: torch.copysign(h, h - 0.1) + h.copysign(-1.0) * torch.sgn(h),
    "gamma function in two dimensions": lambda h: h * torch.mvlgamma(h.exp() + 2, 2),
    "powers of a vector": lambda h: h @ torch.vander(torch.arange(8) / 8, increasing=True),
    "descending powers": lambda h: h + torch.vander(torch.arange(8) / 8, 3).sum(1),
    "powers of each number": lambda h: h + torch.linalg.vander(h, N=3).sum(-1),
    "mean slopes": lambda h: functional.rrelu(h, 0.1, 0.5),
    "shifted bits": lambda h: (
        h * ((10 * h).long() >> 2) + h * torch.bitwise_left_shift((3 * h).long(), 3)
    ),
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


def test_no_operator_of_a_margin_loss_is_left() -> None:
    """Tracing gives that operator a form with uninitialised numbers."""
    graph = capture(Between(FORMS["margins of several classes"]), (6,)).training
    assert "multilabel_margin" not in str(graph.graph)


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


class Here(Between):
    """A model of this module: a recording replaces functions in the modules of models."""


def test_the_length_of_a_batch_is_a_size_in_the_modules_of_the_model() -> None:
    builtin = len
    capture(Here(lambda h: h.view(len(h), -1), only_training=False), (6,))
    capture(Here(lambda h: h.view(int(h.size(0)), -1), only_training=False), (6,))
    assert len is builtin
    with refused("model.fixed-batch") as caught:
        capture(Here(lambda h: h.view(h.__len__(), -1), only_training=False), (6,))
    assert "h.view(h.__len__(), -1)" in str(caught.value)
    with refused("model.fixed-batch"):
        capture(Here(lambda h: torch.stack([h[n] for n in range(len(h))])), (6,))
    capture(Here(lambda h: h.view(h.shape[0], -1), only_training=False), (6,))  # the remedy


class Clipped(torch.autograd.Function):
    """The identity of small numbers, whose gradient is one for large numbers, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-4, 4)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_a_gradient_of_ones_own_for_large_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Between(Clipped.apply), 20 * torch.randn(5, 6)
    graph = capture(model, (6,)).training
    (own,) = torch.autograd.grad(model(x).sum(), [model.first.weight])
    (recorded,) = torch.autograd.grad(graph(x).sum(), [graph.get_parameter("first.weight")])
    torch.testing.assert_close(recorded, own)


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
