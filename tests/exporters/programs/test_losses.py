"""Losses, their gradients and the count of correct samples, compared with torch."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from exporters.programs.losses import (
    OBJECTIVES,
    count_correct_classes,
    count_correct_signs,
    objective,
)
from refusals import refused

SAMPLES = 13
WIDTHS = {"cross-entropy": 5, "binary-cross-entropy": 1, "mse": 3}


def labels(loss: str) -> torch.Tensor:
    if loss == "mse":
        return torch.randn(SAMPLES, WIDTHS[loss], dtype=torch.float64)
    return torch.randint(max(2, WIDTHS[loss]), (SAMPLES,))


def torchs(loss: str, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if loss == "mse":
        return functional.mse_loss(output, target)
    if loss == "cross-entropy":
        return functional.cross_entropy(output, target)
    return functional.binary_cross_entropy_with_logits(output[:, 0], target.double())


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_values_and_gradients_equal_torchs(loss: str, seed: int) -> None:
    torch.manual_seed(seed)
    output = 3 * torch.randn(SAMPLES, WIDTHS[loss], dtype=torch.float64)
    target = labels(loss)
    found = []
    for measure in (objective(loss, WIDTHS[loss]).loss, lambda o, t: torchs(loss, o, t)):
        leaf = output.clone().requires_grad_()
        value = measure(leaf, target)
        (gradient,) = torch.autograd.grad(value, leaf)
        found.append((value.detach(), gradient))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_count_of_correct_classes_equals_argmax(seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Small integers, so that many logits are equal; argmax takes the first.
    logits = draw.integers(-2, 3, (400, 6)).astype(np.float32)
    y = draw.integers(6, size=400)
    actual = count_correct_classes(torch.from_numpy(logits), torch.from_numpy(y))
    assert actual.dtype == torch.float32
    assert float(actual) == np.count_nonzero(logits.argmax(1) == y)


def test_nan_outputs_are_never_correct() -> None:
    y = torch.arange(4)
    assert float(count_correct_classes(torch.full((4, 4), torch.nan), y)) == 0


def test_correct_signs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.integers(-2, 3, 400).astype(np.float32)
    y = draw.integers(2, size=400)
    actual = count_correct_signs(torch.from_numpy(logits[:, None]), torch.from_numpy(y))
    assert float(actual) == np.count_nonzero((logits > 0) == y)


def test_cross_entropy_of_one_output_is_binary() -> None:
    assert objective("cross-entropy", 1) is objective("binary-cross-entropy", 1)
    assert objective("cross-entropy", 2) is not objective("cross-entropy", 1)


def test_labels_are_classes_or_for_regression_numbers() -> None:
    classes, numbers = (objective(loss, 3).labels(3) for loss in ("cross-entropy", "mse"))
    assert (classes.dtype, classes.shape) == ("int64", (None,))
    assert (numbers.dtype, numbers.shape) == ("float32", (None, 3))


def test_a_loss_that_does_not_fit_the_output() -> None:
    with refused("model.loss-mismatch", loss="binary-cross-entropy", outputs=10):
        objective("binary-cross-entropy", 10)
