"""Cutting an LSTM along time: its first steps are recorded, and the rest is trained.

In Table 1 of EmbracingFL, the weakest clients leave out the first half of the words. The recording
of one sample is one row. The row contains the hidden and cell state of the forward direction after
the first steps, then the inputs of the remaining steps. The trained part splits the row again and
continues from that state. A backward direction starts at the last step and stops where the
recording starts, so that it never reads the first steps.
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
from toolkit.cutting.cut_points import Cutter
from toolkit.cutting.graph_edit import GraphEditor
from toolkit.submodels.capacity import count_elements, lstm_nodes, recurrent_steps

aten = torch.ops.aten
STATES = (1, 2)
"""Indices of the hidden and the cell state among the results of an LSTM; 0 is the sequence."""
TO_THE_END = 2**31 - 1
"""The end of a slice that covers the rest of an axis."""


@dataclass(frozen=True)
class TimeCut:
    """A model cut within its LSTM.

    Attributes:
        module: Name of the LSTM.
        ahead: Position of the operator before the LSTM; -1 if the LSTM takes the samples.
        record: The graph from the value of that operator to the recording.
        trained: The training graph from the recording to the output.
        predicting: The inference graph from the recording to the output.
    """

    module: str
    ahead: int
    record: GraphModule
    trained: GraphModule
    predicting: GraphModule


def cut_along_time(cutter: Cutter, within: Callable[[str], bool], skip: int, spec: str) -> TimeCut:
    """Cut one LSTM of a model after its first steps.

    Args:
        cutter: The model to cut.
        within: Tells whether a module name belongs to the LSTM to cut.
        skip: How many steps are recorded.
        spec: The spec, for messages.

    Raises:
        SpecError: If there is not exactly one such LSTM, or it cannot be cut there.
    """
    graph = cutter.captured.training
    named = [node for node in lstm_nodes(graph) if within(module_of(node))]
    if len(named) != 1:
        names = [module_of(node) for node in lstm_nodes(graph)]
        raise SpecError(
            "{spec!r}: skip= needs the name of one LSTM of the model, as in slice:NAME,skip=2. "
            "The model's LSTMs: {known}.",
            code="spec.unknown-lstm",
            spec=spec,
            lstms=names,
            known=", ".join(names) or "none",
        )
    lstm = named[0]
    check_time_cut(cutter, lstm, skip, spec)
    position = cutter.training.position
    ahead = position[lstm.args[0]]  # type: ignore[index]
    with lstm_shapes_only():
        return TimeCut(
            module=module_of(lstm),
            ahead=ahead,
            record=make_recording_graph(cutter.frozen(ahead, position[lstm]), skip),
            trained=make_resuming_graph(cutter.trained(ahead), skip),
            predicting=make_resuming_graph(cutter.predicting(ahead), skip),
        )


def check_time_cut(cutter: Cutter, lstm: Node, skip: int, spec: str) -> None:
    """Raise SpecError unless `lstm` can be cut after its first `skip` steps."""
    source, layers, bidirectional, batch_first = (lstm.args[i] for i in (0, 4, 7, 8))
    assert isinstance(source, Node)
    if not batch_first or cutter.training.sample_axis(source) != 0:
        raise SpecError(
            "{spec!r}: the LSTM must take (batch, steps, features). Set batch_first=True.",
            code="spec.impossible-time-cut",
            spec=spec,
        )
    if bidirectional and layers != 1:
        raise SpecError(
            "{spec!r}: a bidirectional LSTM of {layers} layers cannot be cut along time. Its "
            "second layer needs the backward direction of the first layer over all steps.",
            code="spec.impossible-time-cut",
            spec=spec,
            layers=layers,
        )
    if not 1 <= skip < recurrent_steps(lstm):
        raise SpecError(
            "{spec!r}: skip must be from 1 to {highest}; the LSTM takes {steps} steps.",
            code="spec.invalid-option",
            spec=spec,
            option="skip",
            value=str(skip),
            highest=recurrent_steps(lstm) - 1,
            steps=recurrent_steps(lstm),
        )
    if not is_only_value_needed(cutter, source, lstm):
        raise SpecError(
            "{spec!r}: later layers read values that bypass the LSTM. Such a model cannot be cut "
            "along time.",
            code="spec.impossible-time-cut",
            spec=spec,
        )
    for result in lstm.users:
        if result.args[1] == 0 and not all(selects_last_step(user) for user in result.users):
            raise SpecError(
                "{spec!r}: the model reads the output of the LSTM at every step. Only a model that "
                "reads the LSTM's last output or states can be cut along time.",
                code="spec.impossible-time-cut",
                spec=spec,
            )


def is_only_value_needed(cutter: Cutter, source: Node, lstm: Node) -> bool:
    """Whether `lstm` alone reads `source`, and nothing else computed so far is needed later."""
    flow = cutter.training
    users = [user for user in source.users if source in flow.values_read(user)]
    return cutter.crossing(flow.position[source]) == (source,) and users == [lstm]


def selects_last_step(node: Node) -> bool:
    """Whether `node` only selects the last step of (batch, steps, features)."""
    if node.target is aten.slice.Tensor and node.args[1] == 0:  # y[:, -1] starts with y[:].
        return all(selects_last_step(user) for user in node.users)
    return node.target is aten.select.int and tuple(node.args[1:]) == (1, -1)


def make_recording_graph(part: GraphModule, skip: int) -> GraphModule:
    """Edit `part` into a graph from (batch, steps, features) to the recording (batch, n).

    An LSTM is the only operator of `part`.
    """
    source, lstm = input_node(part), next(lstm_nodes(part))
    layers, end = layer_count(lstm), recurrent_steps(lstm)
    part.graph.erase_node(part.graph.find_nodes(op="output")[0])
    edit = GraphEditor(part.graph, source)
    with part.graph.inserting_before(lstm):
        first = edit.add(aten.slice.Tensor, source, 1, 0, skip)
        begin = [edit.add(aten.slice.Tensor, state, 0, 0, layers) for state in initial_states(lstm)]
    parameters = lstm.args[2]
    assert isinstance(parameters, list | tuple)
    # The backward direction, the second half of the parameters, is not needed for the first steps.
    own = parameters[: len(parameters) // 2] if lstm.args[7] else parameters
    lstm.args = (first, begin, own, *lstm.args[3:7], False, lstm.args[8])
    edit.update_shape(lstm)
    pieces = [edit.add(operator.getitem, lstm, index) for index in STATES]
    pieces = [edit.add(aten.transpose.int, piece, 0, 1) for piece in pieces]
    pieces.append(edit.add(aten.slice.Tensor, source, 1, skip, end))
    rows = [edit.add(aten.reshape.default, p, [-1, count_elements(p, 1)]) for p in pieces]
    part.graph.output(edit.add(aten.cat.default, rows, 1))
    return clean_up(part)


def make_resuming_graph(part: GraphModule, skip: int) -> GraphModule:
    """Edit `part`, which starts with an LSTM, into a graph from the recording to the output."""
    source, lstm = input_node(part), next(lstm_nodes(part))
    layers, remaining = layer_count(lstm), recurrent_steps(lstm) - skip
    features = int(source.meta["val"].shape[2])
    widths = [layers * int(state.meta["val"].shape[2]) for state in initial_states(lstm)]
    bounds = [0, *accumulate((*widths, remaining * features))]
    edit = GraphEditor(part.graph, source)
    source.meta["val"] = edit.empty_rows(bounds[-1])
    with part.graph.inserting_before(lstm):
        *rows, inputs = (edit.add(aten.slice.Tensor, source, 1, a, b) for a, b in pairwise(bounds))
        begin = []
        for row, state in zip(rows, initial_states(lstm), strict=True):
            units = int(state.meta["val"].shape[2])
            stacked = edit.add(aten.reshape.default, row, [-1, layers, units])
            known = edit.add(aten.transpose.int, stacked, 0, 1)
            backward = edit.add(aten.slice.Tensor, state, 0, layers, TO_THE_END)
            begin.append(edit.add(aten.cat.default, [known, backward], 0))
        sequence = edit.add(aten.reshape.default, inputs, [-1, remaining, features])
    lstm.args = (sequence, begin, *lstm.args[2:])
    edit.update_shape(lstm)
    # The sequence is shorter now; slices of it are the only other values that depend on its length.
    changed = list(lstm.users)
    for node in changed:
        edit.update_shape(node)
        changed += [user for user in node.users if user.target is aten.slice.Tensor]
    return clean_up(part)


def clean_up(part: GraphModule) -> GraphModule:
    """Remove from `part` the operators that nothing reads, and return `part`."""
    part.graph.eliminate_dead_code(is_impure_node=is_impure)
    part.graph.lint()
    part.recompile()
    return part


def initial_states(lstm: Node) -> list[Node]:
    """The initial hidden and cell state of `lstm`: (layers * directions, batch, n)."""
    states = lstm.args[1]
    assert isinstance(states, list | tuple)
    return [state for state in states if isinstance(state, Node)]


def layer_count(lstm: Node) -> int:
    """The number of layers of `lstm`."""
    assert isinstance(lstm.args[4], int)
    return lstm.args[4]
