"""The labels for which a recorded loss is compared with the user's function."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import edgetailor as et
from exporters.objectives import own_loss_check
from exporters.objectives.own_loss import own_objective
from exporters.objectives.own_loss_check import check_own_loss
from exporters.recording.model_output import output_form
from refusals import refused

LABELS = torch.tensor([[1.0, 0, 2], [0, 3, 0], [2, 0, 1]])


@et.loss(et.classes(4, 3))
def spoken(scores: Tensor, labels: Tensor) -> Tensor:
    steps, counted = torch.full((scores.shape[0],), 6), (labels > 0).sum(1)
    scores = scores.transpose(0, 1).log_softmax(2)
    return functional.ctc_loss(scores, labels, steps, counted, zero_infinity=True)


@et.loss(et.classes(4, 3))
def placed(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores[:, :3].transpose(1, 2), labels)


@pytest.mark.parametrize(("loss", "padded"), [("spoken", True), ("placed", False)])
def test_zeros_come_last_for_ctc_alone(
    loss: str, padded: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    output, reference = torch.randn(3, 6, 4), f"{__name__}:{loss}"
    outputs = output_form(output, 3, own_loss=True)
    goal, seen = own_objective(reference, outputs), list[Tensor]()
    monkeypatch.setattr(own_loss_check, "random_labels", lambda *given, **more: LABELS.clone())

    def noted(output: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        return goal.loss(output, labels)

    check_own_loss(replace(goal, loss=noted), reference, outputs, output)
    assert torch.equal(seen[0], LABELS.sort(1, descending=True).values if padded else LABELS)
    if not padded:  # a recording that is wrong for such labels alone

        def wrong(output: Tensor, labels: Tensor) -> Tensor:
            return goal.loss(output, labels) + (labels[:, 0] == 0).sum()

        with refused("loss.recording-differs"):
            check_own_loss(replace(goal, loss=wrong), reference, outputs, output)
