"""From a program's function to one flat graph of forward operators.

Loss, gradient and optimizer are traced together; every operator that exists only for training is
replaced by its decomposition on the way. The batch stays open: a batch of any size runs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from device_agent.manifest import Port
from exporters.decompositions import table
from exporters.program import ProgramSignature
from profiles.errors import EdgeTailorError, ExportError

EXAMPLE_BATCH = 3
DTYPES = {"float32": torch.float32, "int64": torch.int64}


def trace(signature: ProgramSignature) -> GraphModule:
    """Trace `signature` into a graph whose inputs and outputs are its ports, in order.

    Raises ExportError naming the operator where one has no forward form, or where the model's
    code depends on the numbers that it is given.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = fake_inputs(signature.inputs, mode)

    def flat(*tensors: Tensor) -> list[Tensor]:
        named = {port.name: t for port, t in zip(signature.inputs, tensors, strict=True)}
        results = signature.function(named)
        return [results[port.name] for port in signature.outputs]

    try:
        with mode, enable_python_dispatcher():
            graph = make_fx(
                functionalize(flat), decomposition_table=table(), _allow_non_fake_inputs=True
            )(*inputs)
    except EdgeTailorError:
        raise
    except Exception as error:  # torch raises whatever the traced code raises
        reason = str(error).strip().split("\n")[0]
        raise ExportError(f"Signature {signature.name!r} cannot be traced: {reason}") from error
    graph.graph.eliminate_dead_code()
    graph.recompile()
    check_forward_only(graph, signature.name)
    return graph


def fake_inputs(ports: tuple[Port, ...], mode: FakeTensorMode) -> list[Tensor]:
    """Tensors without data for `ports`; the batch is one unknown shared by all of them."""
    batch = open_batch(mode)
    with mode:
        return [
            torch.empty(
                [batch if size is None else size for size in port.shape], dtype=DTYPES[port.dtype]
            )
            for port in ports
        ]


def open_batch(mode: FakeTensorMode) -> torch.SymInt | int:
    """An unknown size at least two."""
    example = mode.from_tensor(
        torch.empty(EXAMPLE_BATCH),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
        source=ConstantSource("batch"),
    )
    return example.shape[0]


def check_forward_only(graph: GraphModule, signature: str) -> None:
    """Raise ExportError for operators that no inference runtime has."""
    for name in operators(graph):
        if "backward" in name or name.endswith("_"):
            raise ExportError(
                f"Signature {signature!r} needs the operator {name}, which has no forward form "
                "here yet: add one under exporters/decompositions/, or use another layer."
            )


def operators(graph: GraphModule) -> Iterator[str]:
    """Names of the ATen operators in `graph`, one for each node."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node.target._schema.name
