"""Cutting an LSTM along time: its first steps are recorded, the rest is trained.

EmbracingFL's weakest clients of Table 1 leave out the first half of the words. What is recorded for
one sample is one row: the forward direction's state behind the first steps, hidden and cell, and
the inputs of the steps that follow. The trained part takes it apart again and goes on from that
state. The backward direction, where there is one, begins at the end and stops where the recording
begins; it never sees the first steps.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.fx import GraphModule, Node

from exporters.programs.recorded_graph import input_node, is_impure, module_of
from exporters.recurrence.lstm_recording import lstm_shapes_only
from profiles.errors import SpecError
from toolkit.submodels.capacity import elements, lstm_nodes, recurrent_steps
from toolkit.submodels.cut_points import Cutter, is_recordable, steps
from toolkit.submodels.graph_edit import GraphEditor

aten = torch.ops.aten
STATES = (1, 2)
"""Places of the hidden and the cell state among an LSTM's results; its sequence is at 0."""
BEYOND = 2**31 - 1
"""Where a slice that goes to the end ends."""


@dataclass(frozen=True)
class TimeCut:
    """A model cut within its LSTM.

    `ahead` is the place of the operator that feeds the LSTM (-1: the samples themselves), `record`
    goes from there to the recording, `trained` and `predicting` from the recording to the end.
    """

    module: str
    ahead: int
    record: GraphModule
    trained: GraphModule
    predicting: GraphModule


def time_cut(cutter: Cutter, within: Callable[[str], bool], skip: int, spec: str) -> TimeCut:
    """Cut the LSTM whose module's name `within` accepts behind its first `skip` steps.

    Raises SpecError beginning with `spec` where there is no such LSTM or it cannot be cut so.
    """
    graph = cutter.captured.training
    found = [node for node in lstm_nodes(graph) if within(module_of(node))]
    if len(found) != 1:
        names = ", ".join(module_of(node) for node in lstm_nodes(graph)) or "none"
        raise SpecError(
            f"{spec!r}: `skip` needs the name of one LSTM of the model; its LSTMs: {names}."
        )
    lstm = found[0]
    check(cutter, lstm, skip, spec)
    ordered = steps(graph)
    ahead = ordered.index(lstm.args[0]) if lstm.args[0] in ordered else -1  # type: ignore[arg-type]
    with lstm_shapes_only():
        return TimeCut(
            module=module_of(lstm),
            ahead=ahead,
            record=recording(cutter.frozen(ahead, ordered.index(lstm)), skip),
            trained=resumed(cutter.trained(ahead), skip),
            predicting=resumed(cutter.predicting(ahead), skip),
        )


def check(cutter: Cutter, lstm: Node, skip: int, spec: str) -> None:
    """Raise SpecError unless `lstm` can be cut behind its first `skip` steps."""
    graph = cutter.captured.training
    source, layers, bidirectional, batch_first = (lstm.args[i] for i in (0, 4, 7, 8))
    assert isinstance(source, Node)
    if not batch_first or not is_recordable(graph, source):
        raise SpecError(f"{spec!r}: the LSTM must take (batch, steps, features): batch_first=True.")
    if bidirectional and layers != 1:
        raise SpecError(
            f"{spec!r}: an LSTM of {layers} layers and both directions cannot be cut along time: "
            "its second layer needs the first one's backward direction over all steps."
        )
    if not 1 <= skip < recurrent_steps(lstm):
        raise SpecError(
            f"{spec!r}: skip must be from 1 to {recurrent_steps(lstm) - 1}; the LSTM goes "
            f"{recurrent_steps(lstm)} steps."
        )
    if not crosses_alone(cutter, source, lstm):
        raise SpecError(f"{spec!r}: ahead of the LSTM more than its input is needed later.")
    for result in lstm.users:
        if result.args[1] == 0 and not all(is_last(user) for user in result.users):
            raise SpecError(
                f"{spec!r}: what follows the LSTM reads its output of every step; only a model "
                "that reads its last output or states can be cut along time."
            )


def crosses_alone(cutter: Cutter, source: Node, lstm: Node) -> bool:
    """Whether `source` is used by `lstm` alone and is all that is needed from there on."""
    graph = cutter.captured.training
    ordered = steps(graph)
    place = ordered.index(source) if source in ordered else -1
    earlier = {input_node(graph), *ordered[: place + 1]}
    return all(
        other is source and user is lstm
        for user in ordered[place + 1 :]
        for other in user.all_input_nodes
        if other in earlier
    )


def is_last(node: Node) -> bool:
    """Whether `node` only leads to the last step of (batch, steps, features)."""
    if node.target is aten.slice.Tensor and node.args[1] == 0:  # y[:, -1] begins with y[:]
        return all(is_last(user) for user in node.users)
    return node.target is aten.select.int and tuple(node.args[1:]) == (1, -1)


def recording(part: GraphModule, skip: int) -> GraphModule:
    """`part`, an LSTM alone, as its input (batch, steps, features) -> the recording (batch, n)."""
    source, lstm = input_node(part), next(lstm_nodes(part))
    layers, end = layers_of(lstm), recurrent_steps(lstm)
    part.graph.erase_node(part.graph.find_nodes(op="output")[0])
    edit = GraphEditor(part.graph, source)
    with part.graph.inserting_before(lstm):
        first = edit.add(aten.slice.Tensor, source, 1, 0, skip)
        begin = [edit.add(aten.slice.Tensor, state, 0, 0, layers) for state in states(lstm)]
    parameters = lstm.args[2]
    assert isinstance(parameters, list | tuple)
    own = parameters[: len(parameters) // 2] if lstm.args[7] else parameters
    lstm.args = (first, begin, own, *lstm.args[3:7], False, lstm.args[8])
    edit.update_shape(lstm)
    pieces = [edit.add(operator.getitem, lstm, place) for place in STATES]
    pieces = [edit.add(aten.transpose.int, piece, 0, 1) for piece in pieces]
    pieces.append(edit.add(aten.slice.Tensor, source, 1, skip, end))
    rows = [edit.add(aten.reshape.default, p, [-1, elements(p, 1)]) for p in pieces]
    part.graph.output(edit.add(aten.cat.default, rows, 1))
    return finished(part)


def resumed(part: GraphModule, skip: int) -> GraphModule:
    """`part`, which begins with an LSTM, as the recording -> its output."""
    source, lstm = input_node(part), next(lstm_nodes(part))
    layers, remaining = layers_of(lstm), recurrent_steps(lstm) - skip
    features = int(source.meta["val"].shape[2])
    widths = [layers * int(state.meta["val"].shape[2]) for state in states(lstm)]
    bounds = [0, *accumulate((*widths, remaining * features))]
    edit = GraphEditor(part.graph, source)
    source.meta["val"] = edit.empty_rows(bounds[-1])
    with part.graph.inserting_before(lstm):
        *rows, inputs = (edit.add(aten.slice.Tensor, source, 1, a, b) for a, b in pairwise(bounds))
        begin = []
        for row, state in zip(rows, states(lstm), strict=True):
            units = int(state.meta["val"].shape[2])
            stacked = edit.add(aten.reshape.default, row, [-1, layers, units])
            known = edit.add(aten.transpose.int, stacked, 0, 1)
            backward = edit.add(aten.slice.Tensor, state, 0, layers, BEYOND)
            begin.append(edit.add(aten.cat.default, [known, backward], 0))
        sequence = edit.add(aten.reshape.default, inputs, [-1, remaining, features])
    lstm.args = (sequence, begin, *lstm.args[2:])
    edit.update_shape(lstm)
    changed = list(lstm.users)
    for node in changed:
        edit.update_shape(node)
        changed += [user for user in node.users if user.target is aten.slice.Tensor]
    return finished(part)


def finished(part: GraphModule) -> GraphModule:
    """`part` without what nothing reads any more."""
    part.graph.eliminate_dead_code(is_impure_node=is_impure)
    part.graph.lint()
    part.recompile()
    return part


def states(lstm: Node) -> list[Node]:
    """What the hidden and the cell state of `lstm` begin as: (layers * directions, batch, n)."""
    found = lstm.args[1]
    assert isinstance(found, list | tuple)
    return [state for state in found if isinstance(state, Node)]


def layers_of(lstm: Node) -> int:
    """Layers of `lstm`."""
    assert isinstance(lstm.args[4], int)
    return lstm.args[4]
