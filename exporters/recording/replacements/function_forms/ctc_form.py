"""`ctc_loss` of torch as operators that both formats have."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exporters.programs.training.ctc import UNREACHED, ctc_losses


def ctc_loss(
    _: Any,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`.

    The targets may have a row for each sample, or all may follow each other in one axis.
    """
    scores = log_probs.transpose(0, 1) if log_probs.dim() == 3 else log_probs.unsqueeze(0)
    steps, lengths = (torch.as_tensor(n).view(-1) for n in (input_lengths, target_lengths))
    reach = torch.arange(scores.shape[1])
    if targets.shape[-1] == 0:  # no sample has a label
        targets = functional.pad(targets, (0, 1))
    if targets.dim() == 1 and log_probs.dim() == 3:
        # No sample has more labels than steps, or its loss is infinite.
        places = (lengths.cumsum(0) - lengths).unsqueeze(1) + reach
        targets = targets[places.clamp(max=targets.shape[0] - 1)]
    losses = ctc_losses(scores, targets.view(scores.shape[0], -1), lengths, steps, blank)
    # PyTorch's gradient is that of logits: it includes the softmax that normalizes them.
    probable = (scores.exp().sum(2) * (reach < steps.unsqueeze(1))).sum(1)
    losses = losses + probable - probable.detach()
    losses = torch.where(losses < -UNREACHED / 2, losses, 0.0 if zero_infinity else math.inf)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)
