"""Masks that gradients of activations are multiplied by, such as 1 where x > 0, in one operator."""

import math
from typing import NamedTuple

import onnx_ir as ir

SLOPES = {"Greater": 1.0, "Less": -1.0}
"""Comparisons, and whether their mask rises or falls where x reaches the limit."""
LARGEST = 127
"""The largest exponent of a float32."""
LEAST_LIMIT = 2.0**-100
"""Between limits that are smaller, but not 0, there are less than 1 / slope."""
NEARLY_ZERO = -(2.0**-100)
"""The offset for the limit 0. OpenVINO takes an offset of 0 for one that is not given, 0.5. This
one changes no mask: 0 gets less than 0, and the least number that is not subnormal still 1."""


class Mask(NamedTuple):
    """1 where `sign` x > `sign` limit, else 0."""

    x: ir.Value
    limit: float
    sign: float

    @property
    def slope(self) -> float:
        """A power of two that takes the distance from the limit to the next number above 1.

        Products with it are exact, and its product with the limit is finite.
        """
        return self.sign * 2.0 ** (LARGEST - max(math.frexp(self.limit)[1], 0))


def mask_in_one_pass(graph: ir.Graph) -> None:
    """Compute masks of float32 numbers as hard sigmoids, instead of comparing and casting.

    A hard sigmoid is min(max(slope x - slope limit, 0), 1). With a slope that is steep enough it is
    0 or 1. It takes one pass over memory instead of two, and all threads: ONNX Runtime casts with
    one. Only subnormal x beside the limit 0 have a mask between 0 and 1, and NaN has NaN.
    """
    for node in list(graph):
        mask = mask_of(node)
        if mask is None:
            continue
        result, slope = node.outputs[0], mask.slope
        options = {"alpha": slope, "beta": -slope * mask.limit or NEARLY_ZERO}
        steep = ir.node("HardSigmoid", [mask.x], options)
        graph.insert_before(node, steep)
        made = steep.outputs[0]
        made.shape, made.type = result.shape, result.type
        result.replace_all_uses_with(made, replace_graph_outputs=True)
        made.name, result.name = result.name, None
        graph.remove(node, safe=True)


def mask_of(cast: ir.Node) -> Mask | None:
    """The mask that `cast` makes of a comparison with a constant number, else None."""
    if cast.op_type != "Cast" or cast.attributes["to"].as_int() != ir.DataType.FLOAT:
        return None
    given = cast.inputs[0]
    comparison = None if given is None else given.producer()
    if comparison is None or comparison.op_type not in SLOPES:
        return None
    x, limit = comparison.inputs
    known = None if limit is None else ir.convenience.get_const_tensor(limit)
    if x is None or x.dtype != ir.DataType.FLOAT or known is None or known.size != 1:
        return None
    if x.shape is None or x.shape != cast.outputs[0].shape:
        return None
    number = float(known.numpy().item())
    if not math.isfinite(number) or 0 < abs(number) < LEAST_LIMIT:
        return None
    return Mask(x, number, SLOPES[comparison.op_type])
