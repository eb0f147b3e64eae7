"""How strong a device's submodel is beside the global model: gamma of FedHM eq. 2."""

import math
from collections.abc import Callable, Mapping, Sequence

from device_agent.manifest import TensorEntry
from toolkit.parts import numbers_held
from toolkit.spec import Spec, parse_spec
from toolkit.submodel import Shapes

EXPLICIT: Mapping[str, Callable[[Spec], float]] = {
    "low-rank": lambda spec: spec.number("rank ratio", 0, 1, "low-rank:0.25"),
    "width": lambda spec: spec.number("width ratio", 0, 1, "width:0.5"),
    # Factors of a rate below 1 have more numbers than the tensor, and are no stronger than it.
    "cp": lambda spec: 1 / max(1.0, spec.number("compression rate", 0, math.inf, "cp:2.0")),
}
"""Families whose size says the strength."""


def strength(submodel: str, table: Sequence[TensorEntry], shapes: Shapes) -> float:
    """Strength in (0, 1] of an update of `submodel` (a spec) whose tensors `table` describes.

    Rank or width ratio, or one over the compression rate, where the family has one; otherwise the
    share of the global model that the update stands for (1 for `full`). A composed spec, like
    `slice:0.42+low-rank:0.25`, has the product over its families. Raises SpecError for a spec that
    cannot be read.
    """
    specs = [parse_spec(text) for text in submodel.split("+")]
    explicit = [spec for spec in specs if spec.family in EXPLICIT]
    gamma = math.prod(EXPLICIT[spec.family](spec) for spec in explicit)
    return gamma if len(explicit) == len(specs) else gamma * share(table, shapes)


def share(table: Sequence[TensorEntry], shapes: Shapes) -> float:
    """Share of the global model's numbers that an update stands for.

    Factors stand for all of their tensor. Buffers count on both sides: a state dict does not tell
    them from parameters.
    """
    held = {e.stands_for: numbers_held(e, shapes[e.stands_for]) for e in table if e.stands_for}
    return sum(held.values()) / sum(map(math.prod, shapes.values()))
