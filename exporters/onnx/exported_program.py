"""Makes the exported program that torch.onnx reads from a traced graph, without tracing again.

`torch.export` would run the whole graph once more to find out what the traced graph already says:
the shape of each value, and which of them depend on the batch size.
"""

from typing import cast

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_structure
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from exporters.programs.loop_bodies import to_scans
from exporters.programs.recorded_graph import MINIMUM_BATCH, attribute


class Decomposed(ExportedProgram):
    """A program that holds core operators only, so that decomposing it changes nothing.

    torch.onnx would trace the whole graph twice to find that out.
    """

    def run_decompositions(self, *args: object, **kwargs: object) -> ExportedProgram:
        """The program itself."""
        return self


def exported(graph: GraphModule) -> ExportedProgram:
    """Turn a traced graph into an exported program for any batch.

    Args:
        graph: A traced graph; `exporters.programs.tracing.trace` makes it. It is changed.

    Returns:
        A program whose inputs and outputs are those of the graph, in order. Decomposing it does
        nothing.
    """
    to_scans(graph)
    inputs = graph.graph.find_nodes(op="placeholder")
    constants = constants_as_inputs(graph, inputs[0])
    outputs = graph.graph.output_node()
    results = tuple(cast(list[Node], outputs.args[0]))
    outputs.args = (results,)
    graph.recompile()
    return Decomposed(
        root=graph,
        graph=graph.graph,
        graph_signature=ExportGraphSignature(
            [
                *(
                    InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
                    for name, node in constants.items()
                ),
                *(
                    InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)
                    for node in inputs
                ),
            ],
            [
                OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None)
                for node in results
            ],
        ),
        state_dict={},
        range_constraints={
            symbol: ValueRanges(MINIMUM_BATCH, int_oo)
            for node in inputs
            for size in node.meta["val"].shape
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        },
        module_call_graph=[
            ModuleCallEntry(
                "",
                ModuleCallSignature(
                    inputs=[],
                    outputs=[],
                    in_spec=tree_structure((tuple(inputs), {})),
                    out_spec=tree_structure(results),
                ),
            )
        ],
        constants={name: attribute(graph, name).detach() for name in constants},
    )


def constants_as_inputs(graph: GraphModule, first: Node) -> dict[str, Node]:
    """Replace the tensors that `graph` holds by inputs before its `first`; give them by name."""
    bodies = dict(graph.named_children())
    mode = first.meta["val"].fake_mode
    lifted: dict[str, Node] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in bodies:
            continue
        if name not in lifted:
            with graph.graph.inserting_before(first):
                lifted[name] = graph.graph.placeholder(name.replace(".", "_"))
            lifted[name].meta["val"] = mode.from_tensor(attribute(graph, name), static_shapes=True)
        node.replace_all_uses_with(lifted[name])
        graph.graph.erase_node(node)
    return lifted
