"""From a program's function to one flat graph of forward operators.

Loss, gradient and optimizer are traced together; every operator that exists only for training is
replaced by its decomposition on the way. The batch stays open: a batch of any size runs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from device_agent.formats.manifest import Port
from exporters.decompositions import table
from exporters.decompositions.decomposition import Decompositions
from exporters.programs import source_lines
from exporters.programs.composite_operators import Composites
from exporters.programs.coverage import advice
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.program import ProgramSignature
from exporters.recurrence.recurrent_layers import OpenRecurrence
from profiles.errors import EdgeTailorError, ExportError

EXAMPLE_BATCH = 3
TRAINING_ONLY = ("aten::_native_batch_norm_legit", "aten::as_strided_scatter")
DTYPES = {"float32": torch.float32, "int64": torch.int64}


def trace(signature: ProgramSignature, forms: Decompositions | None = None) -> GraphModule:
    """Trace `signature` into a graph whose inputs and outputs are its ports, in order.

    A writer's own `forms` come ahead of the table that all share.

    Raises ExportError naming the operator where one has no forward form, or where the model's
    code depends on the numbers that it is given.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    batch = open_batch(mode)
    inputs = fake_inputs(signature.inputs, mode, batch)

    def flat(*tensors: Tensor) -> list[Tensor]:
        named = {port.name: t for port, t in zip(signature.inputs, tensors, strict=True)}
        results = signature.function(named)
        return [results[port.name] for port in signature.outputs]

    try:
        with mode, enable_python_dispatcher(), OpenLinear(), OpenRecurrence(), Composites():
            graph = make_fx(
                functionalize(flat),
                decomposition_table={**table(), **(forms or {})},
                _allow_non_fake_inputs=True,
            )(*inputs)
    except EdgeTailorError:
        raise
    except Exception as error:  # torch raises whatever the traced code raises
        raise_if_interrupted(error)
        reason = source_lines.first_line(error)
        raise ExportError(f"Signature {signature.name!r} cannot be traced: {reason}") from error
    if batch.node.expr.is_number:
        raise ExportError(
            f"Signature {signature.name!r} fixes the batch at the {EXAMPLE_BATCH} samples it was "
            "traced with: the model's code asks how many samples there are."
        )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    check_forward_only(graph, signature)
    return graph


class OpenLinear(TorchFunctionMode):
    """Adds the bias of a linear layer over sequences apart from the product.

    ATen's own fused path compares the batch with the example's and so fixes it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace biased linear layers on more than two axes; leave the rest."""
        if func in (torch.nn.functional.linear, torch.ops.aten.linear.default):
            return linear(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def linear(product: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear layer by `product`, with the bias apart where there are more than two axes."""
    if bias is None or input.dim() <= 2:
        return product(input, weight, bias)
    return product(input, weight) + bias


def fake_inputs(ports: tuple[Port, ...], mode: FakeTensorMode, batch: SymInt) -> list[Tensor]:
    """Tensors without data for `ports`, all of the one unknown `batch`."""
    with mode:
        return [
            torch.empty(
                [batch if size is None else size for size in port.shape], dtype=DTYPES[port.dtype]
            )
            for port in ports
        ]


def open_batch(mode: FakeTensorMode) -> SymInt:
    """An unknown size at least two."""
    example = mode.from_tensor(
        torch.empty(EXAMPLE_BATCH),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
        source=ConstantSource("batch"),
    )
    batch: SymInt = example.shape[0]  # type: ignore[assignment]
    return batch


def check_forward_only(graph: GraphModule, signature: ProgramSignature) -> None:
    """Raise ExportError for operators that no inference runtime has."""
    for name in operators(graph):
        if "backward" in name or name.endswith("_") or name in TRAINING_ONLY:
            place = source_lines.of_operator(signature.source, name)
            raise ExportError(
                f"Signature {signature.name!r} needs the operator {name}{place}, which has no "
                f"forward form: {advice(name)}"
            )


def operators(graph: GraphModule) -> Iterator[str]:
    """Names of the ATen operators in `graph`, one for each node."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node.target._schema.name
