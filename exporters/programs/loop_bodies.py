"""The bodies of a traced graph's loops as graphs of their own, for writers to lower."""

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
"""What the names of bodies begin with whose loops go from the last step to the first."""


class Body(NamedTuple):
    """The step of a loop, and whether the loop goes from the last step to the first."""

    graph: GraphModule
    backward: bool


def stored(module: GraphModule, name: str) -> Tensor | Body:
    """What a `get_attr` node of `module` reads: a tensor, or the body of a loop."""
    if name in dict(module.named_children()):
        return Body(cast(GraphModule, module.get_submodule(name)), name.startswith(BACKWARD))
    return attribute(module, name)


def to_scans(module: GraphModule, forms: Decompositions | None = None) -> None:
    """Put PyTorch's `scan` in the place of each `edgetailor::loop` of `module`.

    Afterwards: no `edgetailor::loop`, and no loop computes an output that nothing reads. PyTorch's
    scan goes from the first step to the last only; the names of bodies say which loops do not. A
    writer's own `forms` come ahead of the table that all share.
    """
    module.graph.eliminate_dead_code()
    for number, node in enumerate(module.graph.find_nodes(op="call_function", target=loop)):
        *_, reverse = node.args
        replace(module, node, f"{BACKWARD if reverse else 'step'}_{number}", forms or {})
    module.recompile()


def replace(module: GraphModule, node: Node, name: str, forms: Decompositions) -> None:
    """Put a scan in the place of the loop `node`, with its body as the submodule `name`."""
    arguments: Any = node.args
    step_name, states, inputs, constants, _ = arguments
    step = STEPS[step_name]
    users: list[tuple[Node, Any]] = [(user, user.args[1]) for user in node.users]
    kept = sorted({*range(step.states), *(place for _, place in users)})
    values = [
        *(state.meta["val"] for state in states),
        *(x.meta["val"][0] for x in inputs),
        *(constant.meta["val"] for constant in constants),
    ]
    setattr(module, name, body(step, values, kept, forms))
    graph = module.graph
    with graph.inserting_before(node):
        submodule = graph.get_attr(name)
        made = graph.call_function(scan, (submodule, states, inputs, constants))
    made.meta = {**node.meta, "val": [node.meta["val"][place] for place in kept]}
    for user, place in users:
        user.args = (made, kept.index(place))
    graph.erase_node(node)


def body(
    step: Step, values: Sequence[FakeTensor], kept: Sequence[int], forms: Decompositions
) -> GraphModule:
    """`step` as a graph from tensors like `values` to those of its results that are `kept`."""
    mode = values[0].fake_mode

    def chosen(*arguments: Tensor) -> list[Tensor]:
        results = step.function(*arguments)
        return [results[place] for place in kept]

    with mode:
        graph = make_fx(chosen, decomposition_table={**table(), **forms})(*values)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
