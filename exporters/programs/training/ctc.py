"""Connectionist temporal classification (CTC, Graves et al. 2006), in unrolled steps."""

import torch
from torch import Tensor
from torch.nn import functional

UNREACHED = -1e30
"""The logarithm of a probability of 0, small enough that adding to it changes nothing."""


def ctc_losses(
    scores: Tensor, labels: Tensor, lengths: Tensor, steps: Tensor | None = None, blank: int = 0
) -> Tensor:
    """The negative log-likelihood of each sample's labels. Above -UNREACHED / 2 if impossible.

    Computes the logarithms of the forward variables (eq. 6 of the paper).

    Args:
        scores: Logarithms of the probabilities of the classes, (batch, t, n).
        labels: Classes, (batch, s).
        lengths: The number of labels of each sample that count, (batch,).
        steps: The number of steps of each sample that count, (batch,). None means all steps.
        blank: The class that stands for no label.
    """
    batch, width = labels.shape
    counted = torch.arange(width) < lengths[:, None]
    # Blanks stand before, between and after the labels. Positions after the last are not reached.
    spoken = torch.where(counted, labels, blank)
    blanks = torch.zeros_like(spoken) + blank
    written = torch.stack((blanks, spoken), 2).reshape(batch, 2 * width)
    written = torch.cat((written, blanks[:, :1]), 1)
    picked = (written[:, :, None] == torch.arange(scores.shape[2])).to(scores.dtype)
    scores = scores @ picked.transpose(1, 2)
    # A label may follow another one without a blank between them if the two differ.
    other = (spoken != spoken.roll(1, 1)).to(scores.dtype)
    other = torch.stack((torch.zeros_like(other), other), 2).reshape(batch, 2 * width)[:, 2:]
    skipping = functional.pad((1 - other) * UNREACHED, (0, 1), value=UNREACHED)
    positions = torch.arange(2 * width + 1)
    alpha = scores[:, 0] + torch.where(positions < 2, 0.0, UNREACHED).to(scores.dtype)
    for step in range(1, scores.shape[1]):
        ahead = torch.stack(
            (
                alpha,
                functional.pad(alpha[:, :-1], (1, 0), value=UNREACHED),
                functional.pad(alpha[:, :-2] + skipping, (2, 0), value=UNREACHED),
            ),
            2,
        )
        moved = scores[:, step] + torch.logsumexp(ahead, 2)
        alpha = moved if steps is None else torch.where(step < steps[:, None], moved, alpha)
    last = 2 * lengths[:, None]
    final = (positions == last) | (positions == last - 1)
    return -torch.logsumexp(torch.where(final, alpha, UNREACHED), 1)
