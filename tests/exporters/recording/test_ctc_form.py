"""CTC in a model or in a loss of one's own: the same as torch's in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from exporters.recording.replacements.function_forms.ctc_form import ctc_loss
from exporters.recurrence.replacements import Replacements

STEPS, CLASSES, ROWS, WIDTH = 9, 5, 6, 4
REPLACED: Any = {functional.ctc_loss: ctc_loss}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("form", ["rows", "one row", "one sample", "unnormalized"])
def test_values_and_gradients_are_torchs(form: str, reduction: str, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(STEPS, ROWS, CLASSES, dtype=torch.float64)
    steps, lengths = torch.randint(6, STEPS + 1, (ROWS,)), torch.randint(WIDTH + 1, (ROWS,))
    targets = torch.randint(CLASSES - 1, (ROWS, WIDTH))  # the last class is the blank
    targets[0, 1] = targets[0, 0]
    if form == "one row":
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    if form == "one sample":
        logits, steps, lengths = logits[:, 0], steps[:1], lengths[:1]
        targets = targets[0, : lengths[0]]

    def loss(x: Tensor) -> Tensor:
        scores = x if form == "unnormalized" else x.log_softmax(-1)
        value: Tensor = functional.ctc_loss(
            scores, targets, steps, lengths, CLASSES - 1, reduction, zero_infinity=True
        )
        return value.sum()

    found = []
    for replacements in ({}, REPLACED):
        x = logits.clone().requires_grad_()
        with Replacements(replacements):
            value = loss(x)
        found.append((value.detach(), torch.autograd.grad(value, x)[0]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 0), (0,)])
def test_no_sample_has_a_label(shape: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    scores = torch.randn(3, 2, CLASSES).log_softmax(2)
    targets = torch.ones(shape, dtype=torch.int64)
    given = scores, targets, torch.tensor([3, 2]), torch.tensor([0, 0])
    expected = functional.ctc_loss(*given, reduction="none")
    torch.testing.assert_close(ctc_loss(None, *given, reduction="none"), expected)


def test_too_few_steps_are_infinite_or_zero(seed: int) -> None:
    torch.manual_seed(seed)
    scores = torch.randn(3, 2, CLASSES).log_softmax(2)
    given = scores, torch.ones(2, 4, dtype=torch.int64), torch.tensor([3, 3]), torch.tensor([4, 1])
    for zero in (False, True):
        expected = functional.ctc_loss(*given, reduction="none", zero_infinity=zero)
        found = ctc_loss(None, *given, reduction="none", zero_infinity=zero)
        torch.testing.assert_close(found, expected)
