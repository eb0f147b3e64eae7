"""Saves torch.onnx computations whose results are known before the translation of a graph.

The replaced functions are private to torch. If a version of torch does not have them, it computes
everything as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from onnx.defs import OpSchema, get_schema
from onnx_ir.schemas import OpSignature
from torch.fx import Node

from exporters.programs.torch_internals import replaced

try:
    from torch.onnx._internal.exporter import _fx_passes
    from torch.onnx._internal.fx.passes import type_promotion
except ImportError:
    _fx_passes = type_promotion = None  # type: ignore[assignment]

signature_of_schema = OpSignature.from_op_schema


@contextmanager
def shortcuts() -> Iterator[None]:
    """Speed up torch.onnx for traced graphs: a translation takes less than half of the time.

    These graphs have only core operators, so torch.onnx needs no table of decompositions. Their
    nodes store example values, so torch.onnx does not have to run the nodes to find types. The
    signature of each ONNX operator is computed only once in a process.
    """
    functions: list[tuple[Any, str, Any]] = [(OpSignature, "from_op_schema", known_signature)]
    if type_promotion is not None:
        interpreter = type_promotion._TypePromotionInterpreter
        functions += [
            (_fx_passes, "decompose_with_registry", undecomposed),
            (interpreter, "run_node", known_value(interpreter.run_node)),
        ]
    with replaced(functions):
        yield


def undecomposed(program: Any, registry: object) -> Any:
    """Return `program` unchanged, because it has only core operators."""
    return program


def known_value(run_node: Callable[[Any, Node], Any]) -> Callable[[Any, Node], Any]:
    """Replace `run_node`, which inserts the conversions that a node needs and then runs it.

    The returned function inserts the same conversions, but does not run the node: the value of the
    node, with type and shape, is known from tracing. Nodes without such a value run as before.
    """

    def known(interpreter: Any, node: Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return run_node(interpreter, node)
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule:
            with interpreter._set_current_node(node):
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]

    return known


@cache
def signature_of(name: str, domain: str, version: int) -> OpSignature:
    """The signature of an ONNX operator, as `OpSignature.from_op_schema` computes it."""
    return signature_of_schema(get_schema(name, version, domain))


def known_signature(schema: OpSchema) -> OpSignature:
    """Replace `OpSignature.from_op_schema`, which is slow."""
    return signature_of(schema.name, schema.domain, schema.since_version)
