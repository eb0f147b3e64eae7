"""Finds the lines that limit the number of samples while a model is recorded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exporters.programs import source_lines
from exporters.programs.recorded_graph import MINIMUM_BATCH
from exporters.programs.torch_internals import replaced
from profiles.errors import ModelError

BATCHES = (*range(MINIMUM_BATCH, 34), 997, 100_003)
"""Numbers of samples that every recording must serve."""
REMEDIES = (
    (
        r"^assert\b.*%",
        "Write x.shape[0], and do not branch on it: leave the check out. A queue of fixed length "
        "takes every batch by self.queue.copy_(torch.cat([keys.T, self.queue], 1)[:, :n]).",
    ),
    (
        r"\b(chunk|split|tensor_split)\(",
        "Do not divide a batch into parts. A device's batch is small, so a ghost batch norm is a "
        "batch norm of the whole batch: self.bn(x).",
    ),
    (
        r"\b(np|numpy)\.|\.numpy\(",
        "A recording does not follow NumPy: compute with torch, as in torch.zeros(x.shape[0], 8).",
    ),
    (
        r"\btopk\(",
        "The number that topk chooses must be fixed: choose within a sample, as in x.topk(4, 1).",
    ),
    (
        r"\]\s*\*|\*\s*\[",
        "Write x.expand(n, ...) or x.repeat(n, ...) in place of a list of copies.",
    ),
    (
        r"\bfor\b|\brange\(",
        "Compute all samples at once: operators have a batch axis. Write x.expand(n, ...) for "
        "copies of one tensor.",
    ),
    (
        r"\b(view|reshape|unflatten)\(",
        "Write -1 for the batch in reshape and view, and make no groups of samples. To put another "
        "axis before the batch, use permute: view would mix the samples.",
    ),
)
"""Maps a text in the line of the model to the remedy."""
OTHERWISE = (
    "In reshape and view, write -1 for the batch. Elsewhere, write x.shape[0], and do not branch "
    "on it or loop over it."
)
BRANCH = r"\b(if|while|assert|min|max)\b|[<>]"
NO_BRANCH = "Do not branch on x.shape[0]."
NO_CACHE = (
    "A tensor with a fixed number of samples, such as a cache of keys and values, does not fit "
    "every batch: leave the cache out, or make the tensor in forward, as in "
    "torch.zeros(x.shape[0], 8)."
)


class FixedSizes:
    """Context that finds the first condition on the number of samples that excludes some batches.

    Attributes:
        line: The user's line with this condition. Empty if there was none.
        undecided: The line of the first condition that torch could not decide for all batches, even
            if every batch meets it. Empty if there was none.
    """

    def __init__(self) -> None:
        self.line, self.undecided = "", ""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Find the conditions that torch sets while it records."""
        log = ShapeEnv._log_guard

        def noting(env: Any, prefix: str, condition: Any, *more: Any, **named: Any) -> None:
            if not self.line and is_limiting(condition):
                self.line = source_lines.running_line()
            self.undecided = self.undecided or source_lines.running_line()
            log(env, prefix, condition, *more, **named)

        with replaced([(ShapeEnv, "_log_guard", noting)]):
            yield


def is_limiting(condition: Any) -> bool:
    """Whether the sympy `condition` on one symbol, the number of samples, fails for some batch."""
    symbols = list(condition.free_symbols)
    return len(symbols) == 1 and any(
        condition.subs(symbols[0], batch) == False  # noqa: E712 (sympy's own false)
        for batch in BATCHES
    )


def fixed_batch_error(reason: str, line: str) -> ModelError:
    """The error for a model that accepts only some batch sizes.

    Args:
        reason: Torch's message.
        line: The user's line that limits the number of samples. Empty if unknown.
    """
    place, code = source_lines.parenthesized(line), line.partition(": ")[2]
    remedy = next((text for found, text in REMEDIES if re.search(found, code)), "")
    limit = re.search(r"\.size\(\)\[0\] <= (\d+)", reason)
    if limit is not None:
        return ModelError(
            "The model computes differently for batches of more than {limit} samples{place}; one "
            "recording must serve all batch sizes. {remedy}",
            code="model.fixed-batch",
            limit=int(limit[1]),
            place=place,
            remedy=remedy or (NO_BRANCH if re.search(BRANCH, code) or not code else NO_CACHE),
        )
    return ModelError(
        "The model can be recorded only for some batch sizes: its code fixes or reads the number "
        "of samples{place}. {remedy}",
        code="model.fixed-batch",
        place=place,
        remedy=remedy or OTHERWISE,
    )


def shape_remedy(reason: str) -> str:
    """The remedy for torch's error `reason` about sizes that do not fit. Empty if none is known.

    The text continues `reason`. In `reason`, the number of samples is called `batch`.
    """
    view = re.search(r"shape '\[(.*?)\]' is invalid for input of size", reason)
    if view is not None and re.search(r"-1|batch", view[1]):
        return (
            ". The sizes of this reshape fit another shape of samples: change --input-shape, or "
            "compute the sizes from x.shape."
        )
    if view is not None:
        return ". Write -1 for the batch in reshape and view."
    if re.search(r"\(batch\).* must match the size|must match the size .*\(batch\)", reason):
        return (
            ". A tensor that the model keeps cannot have a fixed number of samples: make it in "
            "forward, as in torch.zeros(x.shape[0], 8)."
        )
    return ""
