"""The strength of a submodel relative to the global model: gamma of FedHM eq. 2."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from profiles.errors import SpecError
from toolkit.families import family_named
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Shapes, shapes_of
from toolkit.submodels.tensor_slices import slice_size


def strength(submodel: str, table: Sequence[TensorEntry], shapes: Shapes) -> float:
    """The strength of an update, in (0, 1]. `submodel` is its spec, `table` lists its tensors.

    Some families define a strength for each size. In other families the strength is the share of
    the global model that the update contains (1 for `full`). For a composed spec, like
    `slice:0.42+low-rank:0.25`, the strengths are multiplied. `shapes` come from `trainable`. Raises
    SpecError for a malformed spec.
    """
    specs = parse_spec(submodel).nested()
    known = [family_named(spec.family).strength(spec) for spec in specs]
    gamma = math.prod(stated for stated in known if stated is not None)
    return gamma * share(table, shapes) if None in known else gamma


def most_strength(submodel: str) -> float:
    """An upper bound of the strength of the spec `submodel`, for any model.

    If a size in the spec is wrong, the result is 1, because `split` reports the error. Raises
    SpecError for a malformed spec.
    """
    specs = [(family_named(spec.family), spec) for spec in parse_spec(submodel).nested()]
    try:
        return math.prod(family.most_strength(spec) for family, spec in specs)
    except SpecError:
        return 1.0


def trainable(tensors: Mapping[str, Tensor]) -> Shapes:
    """Shapes of the global `tensors` that updates may contain. Integer counters are not trained."""
    return shapes_of({name: t for name, t in tensors.items() if t.is_floating_point()})


def share(table: Sequence[TensorEntry], shapes: Shapes) -> float:
    """The share of the global model's numbers that an update contains.

    Factors count as the tensor that they stand for. Buffers count too, because a state dict does
    not distinguish them from parameters.
    """
    held = {e.stands_for: slice_size(e, shapes[e.stands_for]) for e in table if e.stands_for}
    return sum(held.values()) / sum(map(math.prod, shapes.values()))
