"""Traces a signature's function into one flat graph of forward operators.

Loss, gradient and optimizer are traced together. Decompositions replace every operator that exists
only for training. The batch size stays symbolic, so that the graph runs for any batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_aggregate

from device_agent.formats.manifest import Port
from exporters.decompositions import table
from exporters.decompositions.decomposition import Decompositions
from exporters.programs import source_lines
from exporters.programs.changed_parameters import writes_of
from exporters.programs.composite_operators import COMPOSITES
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.operator_support import find_unsupported, suggest_alternative
from exporters.programs.program import ProgramSignature
from exporters.programs.torch_internals import TRACING, LazyGraphModule, lean_tracing
from exporters.recurrence.recurrent_layers import LOOPS
from exporters.recurrence.replacements import Replacements
from profiles.errors import EdgeTailorError, ExportError

EXAMPLE_BATCH = 3
# Training-only operators whose names do not contain "backward".
TRAINING_OPERATORS = ("aten::_native_batch_norm_legit", "aten::as_strided_scatter")
DTYPES = {"float32": torch.float32, "int64": torch.int64}


class Place(NamedTuple):
    """The tensor of a runtime's graph that has the value of a node.

    Attributes:
        name: The tensor's name for `TracedGraph.values`.
        axes: Axis `a` of the node's value is axis `axes[a]` of the tensor. None if both have the
            same axes. If the tensor has size one along an axis, the node's value may repeat the
            tensor along this axis.
    """

    name: str
    axes: tuple[int, ...] | None = None


ExposedValues = Callable[[bytes, Mapping[str, np.ndarray], Sequence[str]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class TracedGraph:
    """The graph that a writer lowered. Verification compares it with the written file.

    Attributes:
        module: The traced graph in float64, after the passes that shorten it. It has the inputs and
            outputs of the signature, in order.
        places: Maps the name of a node of `module` to the runtime's tensor with the node's value.
            If the writer merged a node with other nodes, it is missing here.
        forms: The decompositions with which the graph was traced.
        values: A function that runs a TFLite file. It takes the file's content, the inputs and the
            names of the wanted values, and returns these values by name. None for ONNX.
    """

    module: GraphModule
    places: Mapping[str, Place]
    forms: Decompositions
    values: ExposedValues | None = None


def trace(signature: ProgramSignature, decompositions: Decompositions | None = None) -> GraphModule:
    """Trace `signature` into a graph whose inputs and outputs are its ports, in order.

    Args:
        signature: The function to trace.
        decompositions: The writer's own decompositions. These take precedence over the shared
            table.

    Returns:
        A graph of forward operators, for any batch of at least two samples.

    Raises:
        ExportError: An operator cannot be computed by forward operators, the code depends on the
            values of its inputs, or the code fixes the batch size.
    """
    graph = flat_graph(signature, {**table(), **(decompositions or {})})
    check_forward_only(graph, signature)
    return graph


def trace_for_torch(signature: ProgramSignature, device: str = "cpu") -> GraphModule:
    """Trace `signature` like `trace`, but keep the gradient operators that are fast in PyTorch.

    The graph takes its inputs on `device`.
    """
    graph = flat_graph(signature, {})
    views_to_reshapes(graph.graph)
    for node in graph.graph.nodes:  # for example, `arange` over the classes
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
    graph.recompile()
    return graph.to(device)


def views_to_reshapes(graph: Graph) -> None:
    """Let `graph` run with any memory layout: torch may use other layouts than the trace."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default


def flat_graph(signature: ProgramSignature, forms: Decompositions) -> GraphModule:
    """Trace `signature` only with the decompositions `forms`. Raises ExportError like `trace`.

    Signatures that share a trace (see `JointTrace`) get the same graphs as from separate traces.
    Even the names of the nodes are equal, because torch names nodes in the order of the
    computation.
    """
    if signature.joint is None or signature.function not in signature.joint.functions:
        return traced_alone(signature, forms)
    joint, waiting = signature.joint.signature, signature.joint.waiting
    for number, (known, graph) in enumerate(waiting):
        if known == forms:
            del waiting[number]
            return part_of(graph, joint, signature)
    try:
        graph = traced_alone(joint, forms)
    except ExportError:  # the message must name the signature that cannot be traced
        return traced_alone(signature, forms)
    waiting.append((forms, graph))
    return part_of(graph, joint, signature)


def part_of(
    whole: GraphModule, joint: ProgramSignature, signature: ProgramSignature
) -> GraphModule:
    """Copy the part of `whole` that `signature` needs. `whole` is the graph of `joint`."""
    graph, copies = Graph(), dict[Node, Node]()
    results: Any = graph.graph_copy(whole.graph, copies)
    inputs, outputs = ([port.name for port in ports] for ports in (joint.inputs, joint.outputs))
    graph.output([results[outputs.index(port.name)] for port in signature.outputs])
    graph.eliminate_dead_code()
    read = {port.name for port in signature.inputs}
    for name, node in zip(inputs, whole.graph.find_nodes(op="placeholder"), strict=True):
        if name not in read:
            graph.erase_node(copies[node])
    return LazyGraphModule(whole, graph)


def autograd_graph(signature: ProgramSignature) -> GraphModule:
    """Trace `signature` into the operators that PyTorch's autograd runs.

    Raises ExportError like `trace`.
    """
    return traced_alone(signature, {}, LINEAR)


def traced_alone(
    signature: ProgramSignature,
    forms: Decompositions,
    replacements: Mapping[object, Callable[..., Any]] | None = None,
) -> GraphModule:
    """Trace `signature` without other signatures. Raises ExportError like `trace`.

    `replacements` are functions of torch that are traced in another form. The default is
    REPLACEMENTS.
    """
    replaced = REPLACEMENTS if replacements is None else replacements
    # Constants of the recorded graph are real tensors: allow them among the fake ones.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    batch = symbolic_batch(mode)
    inputs = fake_inputs(signature.inputs, mode, batch)

    def flat(*tensors: Tensor) -> list[Tensor]:
        named = {port.name: t for port, t in zip(signature.inputs, tensors, strict=True)}
        results = signature.function(named)
        return [results[port.name] for port in signature.outputs]

    def in_proxies(function: Callable[..., list[Tensor]]) -> GraphModule:
        traced = make_fx(
            function, decomposition_table=forms, _allow_non_fake_inputs=True, **TRACING
        )
        return traced(*inputs)

    try:
        with mode, enable_python_dispatcher(), Replacements(replaced), lean_tracing():
            graph = in_proxies(functionalize(flat))
            # Some of PyTorch's decompositions write in place themselves.
            if any(name.endswith("_") for name in operators(graph)):
                graph = in_proxies(functionalize(graph))
    except EdgeTailorError:
        raise
    except Exception as error:  # the traced code may raise any error
        raise_if_interrupted(error)
        raise_for_operator(signature, error)
        reason = source_lines.first_line(error)
        raise ExportError(
            "Signature {signature!r} cannot be traced: {reason}",
            code="export.cannot-trace",
            signature=signature.name,
            reason=reason,
        ) from error
    # A branch on the batch size makes torch replace the symbol by the example's size.
    if batch.node.expr.is_number:
        raise ExportError(
            "Signature {signature!r} works only for batches of {batch} samples, because the "
            "model's code reads the number of samples. Do not branch on len(x) or x.shape[0].",
            code="export.fixed-batch",
            signature=signature.name,
            batch=EXAMPLE_BATCH,
        )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def unfused_linear(linear: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Call `linear`; add the bias separately if the input has more than two axes.

    ATen's fused operator compares the batch size with the size of the example. With this operator,
    the graph would run only for this batch size.
    """
    if bias is None or input.dim() <= 2:
        return linear(input, weight, bias)
    return linear(input, weight) + bias


LINEAR = {
    torch.nn.functional.linear: unfused_linear,
    torch.ops.aten.linear.default: unfused_linear,
}
REPLACEMENTS = {**LINEAR, **LOOPS, **COMPOSITES}
"""Functions of torch that are traced in another form, with these forms."""


def fake_inputs(ports: tuple[Port, ...], mode: FakeTensorMode, batch: SymInt) -> list[Tensor]:
    """Tensors without data for `ports`, all with the same symbolic `batch` size."""
    with mode:
        return [
            torch.empty(
                [batch if size is None else size for size in port.shape], dtype=DTYPES[port.dtype]
            )
            for port in ports
        ]


def symbolic_batch(mode: FakeTensorMode) -> SymInt:
    """A symbolic size of at least two."""
    example = mode.from_tensor(
        torch.empty(EXAMPLE_BATCH),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
        source=ConstantSource("batch"),
    )
    batch: SymInt = example.shape[0]  # type: ignore[assignment]
    return batch


def check_forward_only(graph: GraphModule, signature: ProgramSignature) -> None:
    """Raise ExportError for operators that inference runtimes do not have."""
    for name in operators(graph):
        # A trailing underscore marks in-place operators that functionalize could not remove.
        in_place = name.endswith("_") and not name.endswith("__")  # not `__rshift__`
        if "backward" in name or in_place or name in TRAINING_OPERATORS:
            raise unsupported(signature, name)


def raise_for_operator(signature: ProgramSignature, error: Exception) -> None:
    """If an operator of the model cannot be exported, raise ExportError with its name.

    PyTorch's own `error` does not name a line of the model.
    """
    for name in operators(signature.source) if signature.source is not None else ():
        if find_unsupported(name):
            raise unsupported(signature, name) from error


def unsupported(signature: ProgramSignature, name: str) -> ExportError:
    """The error for the operator `name`, which inference runtimes do not have."""
    place = source_lines.place_of_operator(signature.source, name)
    return ExportError(
        "Signature {signature!r} needs the operator {operator}{place}, which cannot be "
        "exported: {alternative}",
        code="export.unsupported-operator",
        operator=name,
        signature=signature.name,
        place=place,
        alternative=suggest_alternative(name),
    )


def operators(graph: GraphModule) -> Iterator[str]:
    """List the operators of `graph`, including the operators of its changes of parameters.

    Args:
        graph: A recorded or traced graph.

    Yields:
        Names like aten::convolution, one for each node that calls an operator.
    """
    for part in filter(None, (graph, writes_of(graph))):
        for node in part.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                yield node.target._schema.name


def in_double_precision(module: GraphModule) -> GraphModule:
    """Copy a traced graph in float64, without its example values."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.meta = {}
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), double_type)
    views_to_reshapes(graph)
    return LazyGraphModule(module, graph)


def double_type(argument: Any) -> Any:
    """Return float64 for float32, and any other argument unchanged."""
    return torch.float64 if argument is torch.float32 else argument
