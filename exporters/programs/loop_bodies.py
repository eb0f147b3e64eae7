"""Turns the loops of a traced graph into scans whose bodies are graphs that writers can lower."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from exporters.decompositions import table
from exporters.decompositions.decomposition import Decompositions
from exporters.programs.recorded_graph import attribute
from exporters.recurrence.loop_operator import STEPS, Step, loop

scan = torch.ops.higher_order.scan
BACKWARD = "from_the_last"
"""Prefix of the names of bodies whose loops run from the last step to the first."""


class Body(NamedTuple):
    """The graph of a loop's step, and whether the loop runs from the last step to the first."""

    graph: GraphModule
    backward: bool


def stored(module: GraphModule, name: str) -> Tensor | Body:
    """Return the tensor or the loop body that a `get_attr` node reads.

    Args:
        module: A traced graph after `to_scans`.
        name: Target of the `get_attr` node.

    Returns:
        A tensor, or the body of a loop.
    """
    if name in dict(module.named_children()):
        return Body(cast(GraphModule, module.get_submodule(name)), name.startswith(BACKWARD))
    return attribute(module, name)


def to_scans(module: GraphModule, decompositions: Decompositions | None = None) -> None:
    """Replace each `edgetailor::loop` of `module` by PyTorch's `scan`, in place.

    After this, `module` has no `edgetailor::loop`, and no loop computes an output that nothing
    reads. PyTorch's scan can only run from the first step to the last. If a loop must run from the
    last step to the first, the name of its body has the prefix `BACKWARD`.

    Args:
        module: A traced graph.
        decompositions: The writer's own decompositions. These take precedence over the shared
            table.
    """
    # Otherwise unused nodes would count as readers of a loop's outputs.
    module.graph.eliminate_dead_code()
    for number, node in enumerate(module.graph.find_nodes(op="call_function", target=loop)):
        *_, reverse = node.args
        name = f"{BACKWARD if reverse else 'step'}_{number}"
        replace_loop(module, node, name, decompositions or {})
    module.recompile()


def replace_loop(
    module: GraphModule, node: Node, name: str, decompositions: Decompositions
) -> None:
    """Replace the loop `node` by a scan, with the loop's body as the submodule `name`."""
    arguments: Any = node.args
    step_name, states, inputs, constants, _ = arguments
    step = STEPS[step_name]
    # All users of a loop are getitem nodes; their second argument is the position of the result.
    users: list[tuple[Node, Any]] = [(user, user.args[1]) for user in node.users]
    # The next step needs all new states. An output is needed only if a node reads it.
    kept = sorted({*range(step.states), *(index for _, index in users)})
    values = [
        *(state.meta["val"] for state in states),
        *(x.meta["val"][0] for x in inputs),
        *(constant.meta["val"] for constant in constants),
    ]
    setattr(module, name, trace_body(step, values, kept, decompositions))
    graph = module.graph
    with graph.inserting_before(node):
        submodule = graph.get_attr(name)
        loop = graph.call_function(scan, (submodule, states, inputs, constants))
    loop.meta = {**node.meta, "val": [node.meta["val"][index] for index in kept]}
    for user, index in users:
        user.args = (loop, kept.index(index))
    graph.erase_node(node)


def trace_body(
    step: Step, values: Sequence[FakeTensor], kept: Sequence[int], decompositions: Decompositions
) -> GraphModule:
    """Trace `step` for arguments like `values`. The graph has the results at the indices `kept`."""
    mode = values[0].fake_mode

    def chosen(*arguments: Tensor) -> list[Tensor]:
        results = step.function(*arguments)
        return [results[index] for index in kept]

    with mode:
        graph = make_fx(chosen, decomposition_table={**table(), **decompositions})(*values)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
