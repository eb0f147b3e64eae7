"""Describes the work of one run of a graph as operations of a few kinds.

`KINDS` gives the kind of each operator. Operations of one kind share one rule for their time. The
calibration times operations on the device, and the planner finds operations in graphs. Both
describe an operation by `sizes`, which are computed from the shapes of its inputs and outputs.
"""

import math
from collections.abc import Sequence

import msgspec

Shape = Sequence[int]
Shapes = Sequence[Shape]

PRODUCTS = ("convolution", "transposed", "product", "accumulated", "blocked")
"""Kinds whose work is counted in multiply-accumulates. For other kinds, numbers are counted."""
LOOP = "loop"
FREE = "view"
"""The kind of operators that give their input another shape and compute nothing."""
AT_BEST = "at-best"
"""The kind of operation in a lower bound of the time. Its size is a number of multiply-accumulates.
Each of them takes the shortest time that the calibration has for a multiply-accumulate."""

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
BLOCKED = ("blocked", "scaled")
"""Kinds of blocked convolutions, which only some devices have. A "scaled" convolution has a kernel
of one pixel and one channel, so it only scales an image."""
WINOGRAD_GAIN = 0.05
"""Winograd's form takes more memory, so a device runs it only if it is faster by this share."""
KINDS = {operator: kind for kind, operators in OPERATORS.items() for operator in operators}
OTHER = "selection"
"""The kind assumed for unknown operators: the slowest pass over numbers."""


class Operation(msgspec.Struct, frozen=True):
    """An operation of the kind `kind` with these sizes. A run does it `count` times."""

    kind: str
    sizes: tuple[int, ...]
    count: int = 1


def amount(kind: str, sizes: Sequence[int]) -> int:
    """Work of an operation: multiply-accumulates for products, otherwise processed numbers."""
    return math.prod(sizes) if kind in PRODUCTS else sizes[0]


def sizes_of(kind: str, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """The sizes that determine the time of an operation of `kind`.

    - convolutions: (images * groups, filters of a group, positions, channels of a group, positions
      of the kernel).
    - products: (matrices, rows, columns, length).
    - broadcasts: (numbers, run length).
    - reductions: (numbers read, numbers written).
    - all other kinds: (numbers,).
    """
    numbers = max(math.prod(shape) for shape in (*inputs[:1], *outputs[:1]))
    match kind:
        case "convolution" | "blocked":
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
    """The sizes (matrices, rows, columns, length) of a matrix product."""
    columns = result[-1] if len(right) > 1 else 1
    rows = result[-2] if len(result) > 1 else 1
    matrices = math.prod(result[:-2])
    length = math.prod(left) // max(1, math.prod(left[:-2]) * rows) if len(left) > 1 else left[0]
    if len(right) <= 2:
        # All left matrices share one right matrix, so their rows form one large matrix.
        return (1, matrices * rows, columns, length)
    return (matrices, rows, columns, length)


def run_length(small: Shape, result: Shape) -> int:
    """The length of a run of numbers if the shape `small` is broadcast to the shape `result`.

    A run is a series of neighbouring numbers of the result. If the last axis is broadcast, one
    number of `small` is used for all numbers of a run. Otherwise each number of a run uses the next
    number of `small`.
    """
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
    """The kind of an operator whose tensors have these shapes.

    If a matrix product is added to a matrix, its kind is `accumulated`. An example is a gradient
    that is added to the momentum.
    """
    kind = KINDS.get(operator, OTHER)
    if operator == "Gemm" and len(inputs) > 2 and math.prod(inputs[2]) == math.prod(outputs[0]):
        return "accumulated"
    if kind in ("arithmetic", "division", "extreme", "comparison") and len(inputs) > 1:
        sizes = [math.prod(shape) for shape in inputs[:2]]
        # One number, a broadcast and equal shapes have kernels of different speed.
        if min(sizes) == 1 < max(sizes):
            return "scaling" if kind == "arithmetic" else kind
        if kind == "arithmetic" and math.prod(outputs[0]) > min(sizes):
            return "broadcast"
    return kind


def blocked_kind(operator: str, kernel: Shape) -> str:
    """The kind of an operator in the runtime's blocked layout.

    For a convolution, `kernel` is the shape of its weights.

    >>> blocked_kind("Conv", (64, 1, 1, 1)), blocked_kind("Conv", (64, 1, 3, 3))
    ('scaled', 'blocked')
    >>> blocked_kind("GlobalAveragePool", ())
    'reduction'
    """
    if operator in ("MaxPool", "GlobalAveragePool"):
        return kind_of(operator, (), ())
    if operator != "Conv":
        return "transposition"
    return "scaled" if math.prod(kernel[1:]) == 1 else "blocked"


class FormWork(msgspec.Struct, frozen=True, kw_only=True):
    """Operations and memory of another form of a graph. SignatureWork explains the forms."""

    operations: tuple[Operation, ...]
    nodes: int
    arena: int


class SignatureWork(msgspec.Struct, frozen=True, kw_only=True):
    """The operations and the memory of one graph of a bundle.

    The graph runs `times` times for each batch. `ports` is the number of its inputs and outputs.
    Memory is in bytes for one run. `inputs` counts all inputs. `state` counts the inputs that are
    tensors of the device's state. `arena` is the runtime arena for the tensors between inputs and
    outputs.

    Some runtimes have convolutions in blocked layout. For them, `blocked` has the operations of the
    graph's blocked form. It is empty if the graph has no such form. `nodes` and `arena` are each
    the larger value of the plain and the blocked form. `winograd` is the graph's form by Winograd's
    method, for devices on which this form is faster.
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
    blocked: tuple[Operation, ...] = ()
    winograd: FormWork | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a submodel for one batch, and the bytes that a round sends.

    `recording` are the stages of the multi-step forward pass; one is open at a time. The signatures
    of `training` are open at the same time and share `state`, which `memory_rule.state_bytes`
    counts. In a round, the device receives `down` bytes and sends `up` bytes.
    """

    recording: tuple[SignatureWork, ...]
    training: tuple[SignatureWork, ...]
    state: int
    down: int
    up: int
