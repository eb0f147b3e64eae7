"""Choosing the cut point that a spec asks for: by module or by largest capacity."""

import math
from bisect import bisect_left
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal

from profiles.errors import SpecError
from toolkit.cutting.cut_points import CutPoint, Cutter, smallest_recording
from toolkit.submodels.spec import Spec, as_number
from toolkit.submodels.spec_form import Number

CAPACITY = Number("capacity", "slice:0.42", 1)

Load = Callable[[CutPoint], int]
"""Trained parameters plus activations of the slice after a cut point."""


def choose_cut(cutter: Cutter, spec: Spec, batch: int, load: Load | None = None) -> CutPoint:
    """Return the cut point that `spec` asks for.

    Args:
        cutter: The model to cut.
        spec: A spec of `slice`, with a size.
        batch: Samples in a batch.
        load: Computes the load of a slice; needed if a second family exchanges layers of the slice.

    Raises:
        SpecError: If there is no such cut point; the message names what is possible.
    """
    if not cutter.points:
        raise SpecError(
            "{spec!r}: this model cannot be cut. At each possible cut there is one of these "
            "obstacles: one of the two parts has no parameters of its own, both use the same batch "
            "norm, or the second part needs a value that has no axis for the samples.",
            code="spec.no-cut-point",
            spec=str(spec),
        )
    size = str(spec.size)
    value = as_number(size)
    # nn.Sequential names its modules by numbers, so a whole number may be a module's name. A number
    # with a decimal point is a capacity.
    is_capacity = value is not None and "." in size and 0 < value <= 1
    is_module = any(is_within(point.module, size) for point in cutter.points)
    if (is_module and not is_capacity) or value is None:
        return cut_at_module(cutter, spec, batch)
    return cut_by_capacity(cutter, spec, batch, load)


def cut_at_module(cutter: Cutter, spec: Spec, batch: int) -> CutPoint:
    """The cut point before the module that `spec` names, as in `slice:MODULE`."""
    points = cutter.points_by_module(batch)
    inside = [name for name in points if is_within(name, str(spec.size))]
    if not inside:
        raise SpecError(
            "{spec!r}: the model cannot be cut there. Use one of {cut_points}.",
            code="spec.unknown-cut-point",
            spec=str(spec),
            cut_points=list(points),
        )
    return points[inside[0]]


def is_within(module: str, name: str) -> bool:
    """Whether `module` is the module `name` or inside it."""
    return module == name or module.startswith(f"{name}.")


def cut_by_capacity(cutter: Cutter, spec: Spec, batch: int, load: Load | None) -> CutPoint:
    """Return the cut point of the largest slice within the capacity of `spec`.

    If several cut points give the same slice, the one with the smallest recording is returned.
    """
    limit = CAPACITY.read(spec)
    full = cutter.load(cutter.captured.training, batch)
    loads = cutter.loads(batch)

    def own(point: CutPoint) -> int:
        return loads[point.position]

    counted = load or own
    # Take one point for each slice, because counting with exchanged layers is slow.
    slices = list({own(point): point for point in cutter.points}.values())
    # A later slice is a part of an earlier one, so loads only fall and bisection is possible. If
    # the inner family keeps first layers dense (`keep`), loads may rise somewhere. The bisection
    # may then miss the largest slice, but the slice that it returns is within the limit.
    first = bisect_left(slices, True, key=lambda point: counted(point) / full <= limit)
    if first == len(slices):
        smallest = round_up(counted(slices[-1]) / full)
        raise SpecError(
            "{spec!r}: the smallest slice of this model has capacity {smallest}. Allow at least "
            "that.",
            code="spec.capacity-too-small",
            spec=str(spec),
            smallest_capacity=float(smallest),
            smallest=smallest,
        )
    best = own(slices[first])
    # Operators without parameters and activations, such as a pooling, can be on either side.
    # Recording after a pooling takes less space.
    return smallest_recording(point for point in cutter.points if own(point) == best)


def round_up(capacity: float) -> str:
    """`capacity` rounded up to three decimals or two digits, whichever is more precise."""
    decimals = max(3, 1 - math.floor(math.log10(capacity)))
    step = Decimal(1).scaleb(-decimals)
    return f"{Decimal(capacity).quantize(step, ROUND_CEILING):f}"
