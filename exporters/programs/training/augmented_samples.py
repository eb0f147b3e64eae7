"""Changes samples at random in a training step, by a seed that the device passes to the step.

Like the masks of dropout, the random numbers are hashes of the seed, so that all runtimes make the
same changes. This module uses only operators that every runtime has. For example, it computes a
shift as a product with a matrix of zeros and ones.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exporters.programs.seeded_random import random_integers, uniform_numbers
from exporters.programs.training.augmentation import Augmentation

FIRST_SITE = 2**20
"""Number of the first draw. The numbers of dropouts start at 1 and are smaller."""
SITES = 2
"""How many draws an augmentation may use."""


def augmented(x: Tensor, augmentations: Sequence[Augmentation], seed: Tensor) -> Tensor:
    """Change each sample of the batch `x` by all `augmentations`, in order."""
    for number, given in enumerate(augmentations):
        x = changed(x, given, seed, FIRST_SITE + SITES * number)
    return x


def changed(x: Tensor, given: Augmentation, seed: Tensor, site: int) -> Tensor:
    """Change each sample of `x` by one augmentation, by random draws `site` and `site` + 1."""
    if given.kind in ("flip", "flip-vertical"):
        axis = -1 if given.kind == "flip" else -2
        return torch.where(whole_numbers(x, 2, seed, site) == 1, x.flip([axis]), x)
    if given.kind == "noise":
        u, v = (uniform_numbers(x.shape, seed, n) for n in (site, site + 1))
        # The transformation of Box and Muller. u is never 0.
        normal = torch.sqrt(-2 * torch.log(u)) * torch.cos(2 * math.pi * v)
        return x + (given.amount * normal).to(x.dtype)
    amount = int(given.amount)
    if given.kind == "mask":
        axis = 2 if given.axis == "last" else 1
        steps = torch.arange(x.shape[axis]).view([-1 if a == axis else 1 for a in range(x.dim())])
        start = whole_numbers(x, x.shape[axis], seed, site)
        length = whole_numbers(x, amount + 1, seed, site + 1)
        kept = (steps < start) | (steps >= start + length)
        return torch.where(kept, x, 0.0)
    axes = [2, 3] if x.dim() == 4 else [2 if given.axis == "last" else 1]
    for number, axis in enumerate(axes):
        x = shifted(x, axis, whole_numbers(x, 2 * amount + 1, seed, site + number) - amount)
    return x


def whole_numbers(x: Tensor, count: int, seed: Tensor, site: int) -> Tensor:
    """A whole number from 0 to `count` - 1 for each sample of `x`, with as many axes as `x`."""
    return random_integers((x.shape[0], *[1] * (x.dim() - 1)), seed, site) % count


def shifted(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """Move each sample by `places` elements along `axis`, and fill the gap with zeros."""
    size = x.shape[axis]
    steps = torch.arange(size)
    offsets = steps - steps.unsqueeze(1)  # (size, size): column - row
    last = x.movedim(axis, -1)
    # (batch, 1, ..., size, size): row i has a 1 in column i + places.
    selected = offsets == places.reshape([-1] + [1] * max(last.dim() - 1, 2))
    rows = last.unsqueeze(1) if last.dim() == 2 else last
    moved = rows @ selected.to(x.dtype).transpose(-1, -2)
    return (moved.squeeze(1) if last.dim() == 2 else moved).movedim(-1, axis)
