"""Lists the submodels that a plan considers: families in sizes that differ clearly."""

from collections.abc import Iterator

from torch import nn

from exporters.objectives.loss_text import is_own
from exporters.recording.capture import capture
from profiles.errors import ModelError, SpecError
from toolkit.cutting.cut_points import CutPoint, Cutter

RATIOS = (0.5, 0.25, 0.125)
"""The rank ratios of FedHM."""
WIDTHS = (0.75, 0.5, 0.25, 0.125)
RATES = (2.0, 4.0, 8.0)
"""Compression rates of CP factors; TDPFed uses 2."""
INSIDE = 0.25
"""The rank ratio of low-rank layers inside a slice."""
APART = 0.85
"""A slice is considered if its load is at most this share of the previous slice's load."""


def specs(model: nn.Module, sample_shape: tuple[int, ...], batch: int, loss: str) -> Iterator[str]:
    """List the specs that a plan considers. Some of them can be impossible for the model.

    Args:
        model: The whole model.
        sample_shape: Shape of one sample, without the batch.
        batch: Samples in a batch.
        loss: The loss that the devices minimise.

    Yields:
        The specs, family by family.
    """
    yield "full"
    yield from (f"low-rank:{ratio:g}" for ratio in RATIOS)
    yield from (f"width:{ratio:g}" for ratio in WIDTHS)
    cuts = [f"slice:{point.module}" for point in useful_cuts(model, sample_shape, batch, loss)]
    yield from cuts
    # Every second cut: each candidate costs an export, and neighbours differ little.
    yield from (f"{cut}+low-rank:{INSIDE:g}" for cut in cuts[::2])
    yield from (f"cp:{rate:g}" for rate in RATES)
    yield "pfedme"


def useful_cuts(
    model: nn.Module, sample_shape: tuple[int, ...], batch: int, loss: str
) -> Iterator[CutPoint]:
    """Yield cut points whose slices differ clearly; none if the model cannot be cut."""
    try:
        cutter = Cutter(capture(model, sample_shape, is_own(loss)))
    except (ModelError, SpecError):
        return
    last = float(cutter.load(cutter.captured.training, batch))
    loads = cutter.loads(batch)
    for point in cutter.points_by_module(batch).values():
        load = loads[point.position]
        if load <= APART * last:
            last = load
            yield point
