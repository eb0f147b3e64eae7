"""Losses, their gradients and the count of correct labels, compared with torch and numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from device_agent.formats.label_rule import IGNORED, LabelRule, count_labels
from exporters.objectives.objective import objective
from exporters.programs.training.losses import binary_cross_entropy, class_count
from refusals import refused

SAMPLES = 13
SHAPES = {
    "cross-entropy": [(5,), (4, 3), (7, 2), (3, 4, 2), (2, 3, 2, 2)],
    "binary-cross-entropy": [(1,), (4, 1), (1, 4, 2)],
    "mse": [(3,), (), (1,), (4, 3), (2, 3, 4)],
}
"""Shapes of the output of one sample."""
CASES = [(loss, shape) for loss, shapes in SHAPES.items() for shape in shapes]
PER_POSITION = [(loss, shape) for loss, shape in CASES if loss != "mse" and len(shape) > 1]


def labels(loss: str, shape: tuple[int, ...]) -> Tensor:
    """Random labels; with several a sample, a quarter is ignored."""
    rule = objective(loss, shape).labels
    size = (SAMPLES, *(rule.shape or ()))
    if loss == "mse":
        return torch.randn(size, dtype=torch.float64)
    y = torch.randint(max(2, class_count(shape)), size)
    return y if y.dim() == 1 else torch.where(torch.rand(size) < 0.25, IGNORED, y)


def classes_second(output: Tensor) -> Tensor:
    """Logits as PyTorch's losses want them: (batch, n, ...)."""
    return output.movedim(-1, 1) if output.dim() == 3 else output


def torchs(loss: str, output: Tensor, target: Tensor) -> Tensor:
    if loss == "mse":
        return functional.mse_loss(output, target)
    logits = classes_second(output)
    if logits.shape[1] > 1:
        return functional.cross_entropy(logits, target, ignore_index=-100)
    counted = target != -100
    z, y = logits.squeeze(1)[counted], target[counted].double()
    return functional.binary_cross_entropy_with_logits(z, y)


def value_and_gradient(measure: object, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = output.clone().requires_grad_()
    value = measure(leaf, target)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize(("loss", "shape"), CASES)
def test_values_and_gradients_equal_torchs(loss: str, shape: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    output = 3 * torch.randn(SAMPLES, *shape, dtype=torch.float64)
    target = labels(loss, shape)
    came = value_and_gradient(objective(loss, shape).loss, output, target)
    expected = value_and_gradient(lambda o, t: torchs(loss, o, t), output, target)
    torch.testing.assert_close(came, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("loss", "shape"), PER_POSITION)
def test_without_labels_loss_and_gradient_are_zero(loss: str, shape: tuple[int, ...]) -> None:
    output = torch.randn(SAMPLES, *shape, dtype=torch.float64)
    goal = objective(loss, shape)
    target = torch.full((SAMPLES, *(goal.labels.shape or ())), IGNORED)
    value, gradient = value_and_gradient(goal.loss, output, target)
    assert value == 0
    assert not gradient.any()
    assert goal.correct is not None
    assert goal.correct(output, target) == 0


@pytest.mark.parametrize(("loss", "shape"), [case for case in CASES if case[0] != "mse"])
def test_count_of_correct_labels_equals_argmax(
    loss: str, shape: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    # Small integers, so that many logits are equal; argmax takes the first.
    output = torch.randint(-2, 3, (SAMPLES, *shape)).float()
    target = labels(loss, shape)
    correct = objective(loss, shape).correct
    assert correct is not None
    logits = classes_second(output).numpy()
    chosen = logits.argmax(1) if logits.shape[1] > 1 else logits[:, 0] > 0
    assert correct(output, target).dtype == torch.float32
    assert float(correct(output, target)) == np.count_nonzero(chosen == target.numpy())


@pytest.mark.parametrize(("steps", "classes"), [(9, 4), (6, 2), (1, 3)])
def test_ctc_equals_torchs(steps: int, classes: int, seed: int) -> None:
    """Among the samples: no labels, equal neighbours, and more labels than the steps can write."""
    torch.manual_seed(seed)
    output = 3 * torch.randn(SAMPLES, steps, classes, dtype=torch.float64)
    lengths = torch.randint(steps + 1, (SAMPLES,))
    lengths[:2] = torch.tensor([0, (steps + 1) // 2])
    target = torch.randint(1, classes, (SAMPLES, steps))

    def expected(output: Tensor, target: Tensor) -> Tensor:
        scores = output.log_softmax(2).transpose(0, 1)
        full = torch.full((SAMPLES,), steps)
        losses = functional.ctc_loss(
            scores, target, full, lengths, reduction="none", zero_infinity=True
        )
        return losses[lengths > 0].sum() / lengths.sum()

    oracle = value_and_gradient(expected, output, target)
    target[torch.arange(steps) >= lengths[:, None]] = IGNORED
    goal = objective("ctc", (steps, classes))
    assert goal.labels == LabelRule(classes, (steps,), sequence=True)
    assert goal.correct is None
    assert oracle[1].any()
    came = value_and_gradient(goal.loss, output, target)
    torch.testing.assert_close(came, oracle, rtol=1e-10, atol=1e-12)


def test_nan_outputs_are_never_correct() -> None:
    correct = objective("cross-entropy", (4,)).correct
    assert correct is not None
    assert float(correct(torch.full((4, 4), torch.nan), torch.arange(4))) == 0


def test_cross_entropy_of_one_output_is_binary() -> None:
    binary = binary_cross_entropy
    assert objective("cross-entropy", (1,)).loss is binary
    assert objective("cross-entropy", (1, 8, 8)).loss is binary
    assert objective("cross-entropy", (2,)).loss is not binary


@pytest.mark.parametrize(
    ("loss", "shape", "rule"),
    [
        ("cross-entropy", (3,), LabelRule(3)),
        ("cross-entropy", (1,), LabelRule(1)),
        ("cross-entropy", (7, 3), LabelRule(3, (7,))),
        ("cross-entropy", (3, 8, 9), LabelRule(3, (8, 9))),
        ("mse", (3,), LabelRule(None, (3,), "float32")),
        ("mse", (3, 8, 9), LabelRule(None, (3, 8, 9), "float32")),
        ("mse", (), LabelRule(None, (), "float32")),
    ],
)
def test_labels_of_an_output(loss: str, shape: tuple[int, ...], rule: LabelRule) -> None:
    assert objective(loss, shape).labels == rule


def test_losses_that_do_not_fit_the_output() -> None:
    for loss, shape in (("dice", (5,)), ("cosine", (5, 2)), ("contrastive", ())):
        with refused("model.loss-mismatch", loss=loss, shape=list(shape)):
            objective(loss, shape)
    for loss in ("cross-entropy,weights=1/2", "cross-entropy,smoothing=0.1"):
        with refused("model.loss-mismatch", loss=loss):
            objective(loss, (1,) if "smoothing" in loss else (3,))
    for shape in ((5,), (8, 1), (3, 4, 5)):
        with refused("model.loss-mismatch", loss="ctc", shape=list(shape)):
            objective("ctc", shape)
    with refused("model.loss-mismatch", loss="cross-entropy", shape=[]):
        objective("cross-entropy", ())
    assert objective("binary-cross-entropy", ()).labels.shape == ()


def test_numbers_and_classes_are_counted_apart() -> None:
    assert count_labels(np.array([[0, -100], [3, 1]])) == 3
    assert count_labels(np.full((4, 2), -100, np.float32)) == 4
