"""Parameters that a model itself changes before it uses them, such as weights with a limited norm.

In PyTorch, such a change has no gradient. The gradient is taken with respect to the changed value,
and the optimizer's step starts from the changed value. So a recording has two graphs: the first
computes the changed parameters, and the model's graph reads them. See
`recording/parameter_writes.py`.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.func import functional_call
from torch.fx import GraphModule

from exporters.programs.recorded_graph import attributes_read

WRITES = "changes of parameters"
"""The key of the first graph in the `meta` of the second."""


def writes_of(graph: GraphModule) -> GraphModule | None:
    """The graph of the changes that the model of `graph` makes first. None if there are none."""
    writes: GraphModule | None = graph.meta.get(WRITES)
    return writes


def names_of_changed(graph: GraphModule) -> set[str]:
    """The names of the parameters that the model of `graph` changes before it uses them."""
    writes = writes_of(graph)
    return set() if writes is None else set(writes.graph.output_node().args[0])  # type: ignore[arg-type]


def changed_parameters(
    writes: GraphModule | None, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Run `writes` on `tensors`, given by their names in the model.

    Returns the new values of the changed parameters; empty if `writes` is None.
    """
    if writes is None:
        return {}
    read = {name: tensors[name] for name in attributes_read(writes) if name in tensors}
    values: dict[str, Tensor] = functional_call(writes, read, ())
    return values
