"""What a run of a graph consists of, as far as its time goes: operations of a few kinds.

A kind is work that one rate describes; `KINDS` says which operator is of which. The calibration
times operations on the device, the planner's predictions read them off graphs: both describe an
operation by `sizes`, from the shapes of its inputs and outputs alone.
"""

import math
from collections.abc import Sequence

import msgspec

Shape = Sequence[int]
Shapes = Sequence[Shape]

PRODUCTS = ("convolution", "transposed", "product", "accumulated")
"""Kinds whose amount is multiply-accumulates; for others it is numbers."""
LOOP = "loop"
FREE = "view"
"""Operators that only look at their input in another way."""

OPERATORS = {
    "convolution": ("Conv",),
    "transposed": ("ConvTranspose",),
    "product": ("MatMul", "Gemm"),
    "arithmetic": ("Add", "Sub", "Mul", "Sum", "Mod", "BitShift"),
    "division": ("Div",),
    "extreme": ("Max", "Min"),
    "comparison": ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "And", "Or", "Xor"),
    "unary": (
        *("Relu", "Neg", "Abs", "Cast", "Not", "Identity", "Clip", "Sign", "Floor", "Ceil"),
        *("Round", "LeakyRelu", "PRelu", "HardSigmoid", "HardSwish", "ThresholdedRelu", "IsNaN"),
    ),
    "root": ("Sqrt", "Reciprocal"),
    "power": ("Pow",),
    "exponential": ("Exp", "Log", "Softmax", "LogSoftmax", "Softplus", "Elu", "Celu", "Selu"),
    "sigmoid": ("Sigmoid", "Tanh", "Erf", "Softsign", "Sin", "Cos", "Gelu"),
    "selection": ("Where",),
    "normalisation": ("BatchNormalization", "InstanceNormalization", "LayerNormalization"),
    "reduction": (
        *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"),
        *("ArgMax", "ArgMin", "CumSum", "GlobalAveragePool", "AveragePool", "MaxPool"),
    ),
    "transposition": ("Transpose",),
    "padding": ("Pad",),
    "cutting": ("Slice", "Split", "Gather", "GatherElements", "GatherND"),
    "joining": ("Concat", "ScatterND", "ScatterElements", "DepthToSpace", "SpaceToDepth"),
    "expansion": ("Expand", "Tile", "ConstantOfShape", "Range", "OneHot", "EyeLike"),
    FREE: ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Shape", "Size"),
    LOOP: ("Scan", "Loop"),
}
KINDS = {operator: kind for kind, operators in OPERATORS.items() for operator in operators}
OTHER = "selection"
"""What an operator without a kind is taken for: the slowest pass over numbers."""


class Operation(msgspec.Struct, frozen=True):
    """Work of one `kind` and `sizes`, done `count` times in a run."""

    kind: str
    sizes: tuple[int, ...]
    count: int = 1


def amount(kind: str, sizes: Sequence[int]) -> int:
    """Multiply-accumulates of a product, numbers gone over by others."""
    return math.prod(sizes) if kind in PRODUCTS else sizes[0]


def sizes_of(kind: str, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """What the time of an operation of `kind` depends on.

    Convolutions: (images * groups, filters, places, channels, places of the kernel), of one group.
    Products: (matrices, rows, columns, length). Broadcasts: (numbers, length of a run). Reductions:
    (numbers read, numbers written). All others: (numbers,).
    """
    numbers = max(math.prod(shape) for shape in (*inputs[:1], *outputs[:1]))
    match kind:
        case "convolution":
            image, kernel, output = inputs[0], inputs[1], outputs[0]
            groups = image[1] // kernel[1]
            filters = kernel[0] // groups
            count = image[0] * groups
            return (count, filters, math.prod(output[2:]), kernel[1], math.prod(kernel[2:]))
        case "transposed":
            image, kernel, output = inputs[0], inputs[1], outputs[0]
            groups = output[1] // kernel[1]
            channels = kernel[0] // groups
            count = image[0] * groups
            return (count, kernel[1], math.prod(image[2:]), channels, math.prod(kernel[2:]))
        case "product" | "accumulated":
            return product_sizes(inputs[0], inputs[1], outputs[0])
        case "broadcast":
            small = min(inputs[:2], key=math.prod)
            return (math.prod(outputs[0]), run_length(small, outputs[0]))
        case "reduction":
            return (math.prod(inputs[0]), math.prod(outputs[0]))
        case "cutting" | "joining" | "padding" | "expansion":
            return (math.prod(outputs[0]),)
    return (numbers,)


def product_sizes(left: Shape, right: Shape, result: Shape) -> tuple[int, ...]:
    """(matrices, rows, columns, length) of a matrix product."""
    columns = result[-1] if len(right) > 1 else 1
    rows = result[-2] if len(result) > 1 else 1
    matrices = math.prod(result[:-2])
    length = math.prod(left) // max(1, math.prod(left[:-2]) * rows) if len(left) > 1 else left[0]
    if len(right) <= 2:
        # One matrix for all: their rows are one matrix's.
        return (1, matrices * rows, columns, length)
    return (matrices, rows, columns, length)


def run_length(small: Shape, result: Shape) -> int:
    """How many numbers in a row meet the same number of `small`, or a row of its own."""
    sizes = [1] * (len(result) - len(small)) + list(small)
    run = 1
    repeated = None
    for own, whole in zip(reversed(sizes), reversed(result), strict=True):
        if whole == 1:
            continue
        if repeated is None:
            repeated = own == 1
        if (own == 1) != repeated:
            break
        run *= whole
    return run


def kind_of(operator: str, inputs: Shapes, outputs: Shapes) -> str:
    """The kind of an operator with tensors of these shapes.

    Accumulated are products that are added to a matrix, like a gradient to the momentum.
    """
    kind = KINDS.get(operator, OTHER)
    if operator == "Gemm" and len(inputs) > 2 and math.prod(inputs[2]) == math.prod(outputs[0]):
        return "accumulated"
    if kind in ("arithmetic", "division", "extreme", "comparison") and len(inputs) > 1:
        sizes = [math.prod(shape) for shape in inputs[:2]]
        if min(sizes) == 1 < max(sizes):
            return "scaling" if kind == "arithmetic" else kind
        if kind == "arithmetic" and math.prod(outputs[0]) > min(sizes):
            return "broadcast"
    return kind


class SignatureWork(msgspec.Struct, frozen=True, kw_only=True):
    """One graph of a bundle: what a run of it does, `times` for each batch, and needs.

    `nodes` of the graph, `ports` its inputs and outputs together. Bytes of one run: `state` the
    inputs that are tensors of the device's state, `inputs` all, `outputs`, and what the runtime's
    `arena` takes for the tensors between them.
    """

    name: str
    times: int = 1
    operations: tuple[Operation, ...]
    nodes: int
    ports: int
    state: int
    inputs: int
    outputs: int
    arena: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """All that a submodel has a device do for one batch, and what is sent in a round, in bytes.

    Stages of the multi-step forward pass are `recording`, one open at a time; the signatures of
    `training` are open together and share `state` (bytes), in which a personal model counts twice:
    as it was before the round, too.
    """

    recording: tuple[SignatureWork, ...]
    training: tuple[SignatureWork, ...]
    state: int
    down: int
    up: int
