"""Rows of the classifier: each belongs to one class, and an update may have only some of them.

With a masked loss, a row gets no gradient on devices whose samples do not have its class. Therefore
HeteroFL averages each row over the devices that have samples of its class.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace
from torch import Tensor
from torch.fx import GraphModule, Node

from device_agent.formats.manifest import PREDICT, TensorEntry
from exporters.programs.recorded_graph import output_node
from toolkit.submodels.submodel import Ranges, Submodel
from toolkit.submodels.tensor_slices import TensorSlice, take_slice

FIRST_FACTOR = "0"
"""The label of the CP factor that has a row for each row of the weight."""

WEIGHTED = ("linear", "conv1d", "conv2d", "conv3d")


def mark_class_rows(submodel: Submodel) -> Submodel:
    """If the loss of `submodel` is masked, mark its tensors that have a row for every class."""
    program = submodel.program
    ports = [port for signature in program.signatures for port in signature.inputs]
    if not any(port.kind == "classes" for port in ports):
        return submodel
    (source,) = (s.source for s in program.signatures if s.name == PREDICT)
    assert source is not None
    head = classifier_tensors(source)

    def is_by_class(entry: TensorEntry) -> bool:
        return (
            entry.role == "parameter"
            and bool({entry.name, entry.stands_for} & head)
            and entry.factor in (None, FIRST_FACTOR)
            and entry.shape[0] == program.classes
        )

    tensors = tuple(replace(e, by_class=True) if is_by_class(e) else e for e in program.tensors)
    return dataclasses.replace(submodel, program=dataclasses.replace(program, tensors=tensors))


def classifier_tensors(graph: GraphModule) -> set[str]:
    """Names of the weight and the bias of the output layer.

    Leaves out a tensor that another operator also reads. The result is empty if there is no output
    layer with such tensors.
    """
    node: object = output_node(graph)
    while isinstance(node, Node) and node.op == "call_function":
        name = str(node.target).split(".")[1] if "." in str(node.target) else ""
        if name in WEIGHTED:
            own = (read for read in node.args[1:3] if isinstance(read, Node))
            # If another operator also reads the rows (a tied embedding), a row does not belong to
            # one class.
            return {str(n.target) for n in own if n.op == "get_attr" and len(n.users) == 1}
        # Reshaping and elementwise operators do not mix the rows.
        computed = [read for read in node.all_input_nodes if read.op == "call_function"]
        node = computed[0] if len(computed) == 1 else None
    return set()


def own_rows(
    table: Sequence[TensorEntry],
    tensors: Mapping[str, Tensor],
    classes: Collection[int] | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[TensorEntry, ...], dict[str, Tensor]]:
    """Remove rows of classes from an update if its device has no samples of these classes.

    Args:
        table: The entries of the update.
        tensors: Its tensors by name.
        classes: The classes that the device has samples of; None keeps everything.
        shapes: The shapes of the global tensors.

    Returns:
        The entries and tensors that are left.
    """
    marked = {e.stands_for or "" for e in table if e.by_class}
    if classes is None or not marked:
        return tuple(table), dict(tensors)
    rows = ranges_of(classes)
    entries, left = [], dict(tensors)
    for entry in table:
        if entry.stands_for in marked:
            whole = shapes[entry.stands_for or ""]
            part = entry.part or tuple(((0, size),) for size in whole)
            if entry.by_class:
                left[entry.name] = take_slice(tensors[entry.name], rows_of(entry.shape, rows))
            shape = tuple(left[entry.name].shape)
            entry = replace(entry, part=(rows, *part[1:]), shape=shape)
        entries.append(entry)
    return tuple(entries), left


def row_places(
    table: Sequence[TensorEntry], classes: Collection[int] | None
) -> dict[str, TensorSlice]:
    """For each tensor with a row for every class, find the rows that a device trained.

    Maps the name of the tensor to the slice with the rows of `classes`. Empty if `classes` is None.
    """
    if classes is None:
        return {}
    rows = ranges_of(classes)
    return {e.name: TensorSlice(e.shape, rows_of(e.shape, rows)) for e in table if e.by_class}


def rows_of(shape: Sequence[int], rows: tuple[tuple[int, int], ...]) -> Ranges:
    """The ranges that select `rows` of a tensor of `shape`."""
    return (rows, *(((0, size),) for size in shape[1:]))


def ranges_of(classes: Collection[int]) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) that contain exactly the numbers in `classes`."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(classes):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)
