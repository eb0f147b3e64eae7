"""TFLite graphs that contain their weights. Values that depend only on constants are precomputed.

With constant weights, a convolution is a single operator, and XNNPACK (LiteRT's fast library) runs
it fastest. The scale and shift of a batch norm become part of the convolution's weights. A ReLU
becomes part of the operator before it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from exporters.tflite.flatbuffer import TYPES, Size, Subgraph, Tensor, open_size

COMPUTED: dict[str, Callable[..., np.ndarray]] = {
    "ADD": np.add,
    "SUB": np.subtract,
    "MUL": np.multiply,
    "DIV": np.divide,
    "RSQRT": lambda x: np.float32(1) / np.sqrt(x),
    "RESHAPE": lambda x, shape: x.reshape(shape),
    "TRANSPOSE": lambda x, axes: x.transpose(axes),
}
"""Operators of constants that are computed in advance."""

CONVOLUTION = schema.BuiltinOperator.CONV_2D
DEPTHWISE = schema.BuiltinOperator.DEPTHWISE_CONV_2D
DENSE = schema.BuiltinOperator.FULLY_CONNECTED
CHANNEL_AXIS = {CONVOLUTION: 0, DEPTHWISE: 3, DENSE: 0}
"""The axis of the output channels in the weights."""
ACTIVATIONS = {
    schema.BuiltinOperator.RELU: schema.ActivationFunctionType.RELU,
    schema.BuiltinOperator.RELU6: schema.ActivationFunctionType.RELU6,
}
ACTIVATED = {*CHANNEL_AXIS, schema.BuiltinOperator.ADD}
"""Operators whose options have an activation function."""


class FoldingSubgraph(Subgraph):
    """A subgraph that computes operators on constants, instead of storing these operators."""

    def several(
        self,
        code: str,
        inputs: Sequence[Tensor],
        results: Sequence[tuple[str, Sequence[Size]]],
        options: str | None = None,
        **settings: object,
    ) -> list[Tensor]:
        """See Subgraph."""
        values = [self.value(tensor) for tensor in inputs]
        if code in COMPUTED and "copy" not in settings:
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                dtype, shape = results[0]
                result = COMPUTED[code](*known).astype(dtype)
                return [
                    self.constant(np.ascontiguousarray(result.reshape([int(n) for n in shape])))
                ]
        return super().several(code, inputs, results, options, **settings)

    def value(self, tensor: Tensor) -> np.ndarray | None:
        """The numbers of a constant. None for other tensors."""
        return array(self, tensor.index)


def array(graph: Subgraph, index: int) -> np.ndarray | None:
    """The numbers of the constant at `index`. None if this tensor is computed or an input."""
    data, shape = graph.data[index], graph.shapes[index]
    if data is None or any(open_size(size) for size in shape):
        return None
    (dtype,) = (name for name, kind in TYPES.items() if kind == graph.tensors[index].type)
    return np.frombuffer(data, dtype).reshape([int(size) for size in shape])


@dataclass
class Merging:
    """Merges an operator into its predecessor, if nothing else reads the predecessor's result."""

    graph: Subgraph

    def __post_init__(self) -> None:
        self.readers = Counter(
            int(index) for _, operator in self.graph.operators for index in operator.inputs
        )
        self.readers.update(tensor.index for tensor in self.graph.outputs.values())
        self.writers: dict[int, tuple[int, Any]] = {}

    def run(self) -> None:
        """Merge all operators that can be merged."""
        kept = []
        for code, operator in self.graph.operators:
            if not self.merged(code, operator):
                kept.append((code, operator))
                for index in operator.outputs:
                    self.writers[int(index)] = (code, operator)
        self.graph.operators[:] = kept

    def merged(self, code: int, operator: Any) -> bool:
        """Whether `operator` became a part of the operator that writes its input."""
        for place, index in enumerate(operator.inputs):
            before = self.writers.get(int(index))
            if before is None or self.readers[int(index)] != 1:
                continue
            if before[0] in ACTIVATED and code in ACTIVATIONS and plain(before[1]):
                before[1].builtinOptions.fusedActivationFunction = ACTIVATIONS[code]
            elif not self.scaled(code, operator, 1 - place, before):
                continue
            before[1].outputs = operator.outputs
            self.writers[int(operator.outputs[0])] = before
            return True
        return False

    def scaled(self, code: int, operator: Any, other: int, before: tuple[int, Any]) -> bool:
        """Merge a product or sum with constants (one for each channel) into weights and bias."""
        product = code == schema.BuiltinOperator.MUL
        if before[0] not in CHANNEL_AXIS or not plain(before[1]) or len(operator.inputs) != 2:
            return False
        if not product and code != schema.BuiltinOperator.ADD:
            return False
        numbers = array(self.graph, int(operator.inputs[other]))
        weights = array(self.graph, int(before[1].inputs[1]))
        bias = array(self.graph, int(before[1].inputs[2]))
        if numbers is None or weights is None or bias is None:
            return False
        if numbers.size not in (1, bias.size) or (numbers.size > 1 and numbers.shape[-1] == 1):
            return False
        each = np.broadcast_to(numbers.reshape(-1), bias.shape)
        if product:
            axes = [1] * weights.ndim
            axes[CHANNEL_AXIS[before[0]]] = -1
            new = [weights * each.reshape(axes), bias * each]
        else:
            new = [weights, bias + each]
        given = [self.graph.constant(np.ascontiguousarray(value)).index for value in new]
        before[1].inputs = np.asarray([before[1].inputs[0], *given], np.int32)
        return True


def plain(operator: Any) -> bool:
    """Whether `operator` has no activation function."""
    return not operator.builtinOptions.fusedActivationFunction


def merge_operators(graph: Subgraph) -> None:
    """Merge batch norms, biases and activation functions into the operators before them."""
    Merging(graph).run()
