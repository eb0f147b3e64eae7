"""The network with fewer channels: which are dropped, the edited graphs, their smaller tensors."""

from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor
from torch.fx import GraphModule

from exporters.programs import source_lines
from exporters.programs.capture import recorded
from exporters.programs.captured import Captured
from exporters.programs.recorded_graph import attribute, attributes_read, module_of
from profiles.errors import SpecError
from toolkit.channels.channel_tracking import follow
from toolkit.channels.channel_units import Kept
from toolkit.channels.operator_call import Followed, Layer, Need
from toolkit.submodels.tensor_slices import Ranges, take_slice


@dataclass(frozen=True)
class Narrowed:
    """A model with fewer channels. `parts` has only those tensors that became smaller."""

    captured: Captured
    parts: dict[str, Ranges]
    layers: dict[str, Layer]
    kept: Kept


def narrow(captured: Captured, ratio: Fraction) -> Narrowed:
    """Keep the leading ceil(ratio * n) of every n channels of `captured`, whose graphs are edited.

    Raises SpecError where channels cannot be followed, or where all would be kept.
    """
    followed = follow(captured)
    kept = followed.units.kept(ratio)
    for need in followed.needs:
        if not need.met(kept):
            raise SpecError(refusal(need))
    check_smaller(followed, kept, ratio)
    for edit in followed.edits:
        edit(kept)
    parts = {
        name: tuple(kept.ranges(axis) for axis in axes)
        for name, axes in followed.tensors.items()
        if not all(kept.all(axis) for axis in axes)
    }

    def smaller(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: take_slice(t, parts[n]) if n in parts else t for n, t in tensors.items()}

    tensors = smaller(captured.tensors)
    small = replace(
        captured,
        training=rebuilt(captured.training, tensors, captured),
        inference=rebuilt(captured.inference, tensors, captured),
        parameters=smaller(captured.parameters),
        frozen=smaller(captured.frozen),
        buffers=smaller(captured.buffers),
    )
    return Narrowed(small, parts, followed.layers, kept)


def refusal(need: Need) -> str:
    """Why a model cannot be narrowed."""
    module = module_of(need.node)
    where = f" in {module!r}" if module else ""
    line = source_lines.bracketed(source_lines.line_of(need.node))
    return (
        f"the channels cannot be followed through {need.node.target}{where}: {need.reason}{line}; "
        "use slice or low-rank for this model, or replace the operator."
    )


def check_smaller(followed: Followed, kept: Kept, ratio: Fraction) -> None:
    """Raise SpecError where `ratio` is below 1 but drops no channel."""
    groups = followed.units.groups()
    largest = max(map(len, groups), default=1)
    if largest == 1 and ratio < 1:
        raise SpecError("no layer of this model has channels to drop between input and classes.")
    if ratio < 1 and kept.units.all():
        raise SpecError(
            f"every layer would keep all its channels; the ratio must be at most "
            f"{(largest - 1) / largest:.4g}, or 1."
        )


def rebuilt(graph: GraphModule, tensors: dict[str, Tensor], captured: Captured) -> GraphModule:
    """`graph` recorded anew over `tensors`, for the samples that `captured` takes."""
    root = {
        name: tensors[name] if name in tensors else attribute(graph, name)
        for name in attributes_read(graph)
    }
    return recorded(GraphModule(root, graph.graph), captured.sample_shape, captured.sample_dtype)
