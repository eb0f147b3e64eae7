"""Moves a model's writes into its own parameters out of the model's graph.

The writes must come before all uses, and may read only parameters and constants. So a step can
compute the changed parameters first; see `programs/changed_parameters.py`.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from exporters.programs import source_lines
from exporters.programs.changed_parameters import WRITES
from exporters.programs.recorded_graph import is_impure, keeps_new_value, names_of_kept_values
from exporters.recording.graph_checks import draws
from profiles.errors import ModelError

aten = torch.ops.aten


def take_out_writes(graph: GraphModule, trained: Collection[str]) -> None:
    """Move the writes into the parameters in `trained` from `graph` to a separate graph.

    Raises:
        ModelError: A new value depends on samples, on random numbers or on a tensor that changes in
            each step. Or the model reads a parameter before the last write into it.
    """
    nodes = graph.graph.nodes
    stores = {
        n: n.args[0] for n in nodes if keeps_new_value(n) and str(n.args[0].target) in trained
    }
    if not stores:
        return
    changing = {*names_of_kept_values(graph), *running_statistics(graph)} - set(trained)
    computing = set[Node]()
    for store, written in stores.items():
        own = sources_of(store.args[1])
        if any(n.op == "placeholder" or draws(n) or str(n.target) in changing for n in own):
            raise ModelError(
                "The model computes its parameter {tensor!r} from samples, random numbers or "
                "averages{place}. A new value of a parameter may depend only on parameters and "
                "constants, as in weight.data.clamp_(-1, 1). An average must not be trained: set "
                "requires_grad_(False). If the first batch sets the parameter, run the model once "
                "on real samples in the function that makes the model. Use a bool, not a float, to "
                "record that the parameter is set. If it is an embedding, remove max_norm.",
                code="model.writes-own-tensor",
                tensor=str(written.target),
                place=source_lines.place_of_node(store),
            )
        computing |= own
    values = {store: last_value(store) for store in stores}
    dependent = set(stores.values())
    for node in (n for n in nodes if n in computing):
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    for node in dependent.difference(values.values()):
        for user in node.users.keys() - computing - stores.keys():
            raise ModelError(
                "The model changes a parameter, but it also uses the value from before the change, "
                "or a copy of the parameter{place}. Change the parameter before all uses, and then "
                "use the parameter itself. If a layer that changes its weight is used twice, let "
                "it compute with a changed copy, as in F.linear(x, weight.clamp(-1, 1)).",
                code="model.writes-own-tensor",
                place=source_lines.place_of_node(user),
            )
    graph.meta[WRITES] = graph_of_writes(graph, stores, computing)
    for store, written in stores.items():
        values[store].replace_all_uses_with(
            written, delete_user_cb=lambda user: user not in computing
        )
        graph.graph.erase_node(store)
    graph.graph.eliminate_dead_code(is_impure_node=is_impure)
    graph.graph.lint()
    graph.recompile()


def graph_of_writes(
    graph: GraphModule, stores: dict[Node, Node], computing: Collection[Node]
) -> GraphModule:
    """A graph without input that returns the stored values by the names of the parameters."""
    writes, twins = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node in computing:
            twins[node] = writes.node_copy(node, twins.__getitem__)
    writes.output({str(w.target): twins[s.args[1]] for s, w in stores.items()})  # type: ignore[index]
    return GraphModule(graph, writes)


def last_value(store: Node) -> Node:
    """The value that the nodes after the write read. `store` saves it without its gradient."""
    value = store.args[1]
    assert isinstance(value, Node)
    detached = value.target is aten.detach.default
    return value.args[0] if detached else value  # type: ignore[return-value]


def sources_of(value: object) -> set[Node]:
    """The node `value`, and all nodes on which it depends."""
    found, ahead = set[Node](), [value]
    while ahead:
        node = ahead.pop()
        if isinstance(node, Node) and node not in found:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return found


def running_statistics(graph: GraphModule) -> set[str]:
    """The names of the statistics that the batch norms of `graph` may update."""
    norms = graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    return {str(read.target) for norm in norms for read in norm.args[3:5] if read is not None}


def check_attributes(changed: Mapping[str, Tensor]) -> None:
    """Raise ModelError if `forward` has stored a tensor as an attribute of a parameter.

    Binarized networks store the unchanged weight in this way. A recording would lose this tensor.
    """
    for name, parameter in changed.items():
        for attribute, value in vars(parameter).items():
            if isinstance(value, Tensor):
                raise ModelError(
                    "The model changes its parameter {tensor!r} and keeps a tensor as the "
                    "attribute {attribute!r} of this parameter. A device does not have this "
                    "attribute. Register the tensor as a buffer, or compute with a changed copy of "
                    "the parameter.",
                    code="model.writes-own-tensor",
                    tensor=name,
                    attribute=attribute,
                )
