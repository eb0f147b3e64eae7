"""Packs the inputs of a model into its samples: floats and ids are side by side in one array."""

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from device_agent.formats.input_range import InputRange, Interval, repeated
from device_agent.formats.manifest import SAFE_LIMIT, Part
from device_agent.formats.packing import columns, packed_size, size_of
from exporters.programs.recorded_graph import input_node
from exporters.recording.shared_tensors import twin_of
from profiles.errors import ModelError
from profiles.text_formatting import did_you_mean

aten = torch.ops.aten
Model = TypeVar("Model", bound=nn.Module)
ATTRIBUTE = "_edgetailor_parts"
MOST_GUESSED = 8
"""With more inputs, their types are not found by trials: n inputs have 2^n choices."""
KEEPING = (
    *("view", "reshape", "slice", "select", "squeeze", "unsqueeze", "to.", "clone", "alias"),
    *("contiguous", "flatten", "unflatten", "transpose", "permute"),
)
"""Prefixes of operator names. The results of these operators are ids if their inputs are ids."""


def pack_inputs(model: Model, **inputs: Sequence[int | str]) -> Model:
    """Let `model` take one tensor with all of its inputs, which may have different types.

    Use this before `split` if the model's `forward` takes several tensors or a dictionary of
    tensors. The data must then have an array for each input: `x_NAME` in a file, or `{"NAME":
    array}` in Python. The arrays are packed to float32 when they are read. The model separates them
    again.

    Args:
        model: The model. Only its `forward` changes. Its tensors keep their names.
        inputs: The shape of each input in one sample, without the batch axis, by the input's name
            in `forward`. If an input is ids, write "int64" before the sizes: `word=("int64", 20)`,
            or `("int64",)` for one id in each sample. If `forward` has no arguments with these
            names, it gets a dictionary.

    Returns:
        `model` itself. Its input shape is `(packed_size,)`, with the total count of numbers in a
        sample.

    Raises:
        ModelError: `forward` cannot be called with these inputs.

    Examples:
        >>> class Rating(nn.Module):
        ...     def forward(self, user, amount):
        ...         return amount * user[:, None]
        >>> model = pack_inputs(Rating(), user=("int64",), amount=(2,))
        >>> model(torch.tensor([[3.0, 0.5, 1.0]]))
        tensor([[1.5000, 3.0000]])
    """
    parts = []
    for name, sizes in inputs.items():
        ids = tuple(sizes[:1]) == ("int64",)
        shape = tuple(int(size) for size in (sizes[1:] if ids else sizes))
        parts.append(Part(name=name, shape=shape, dtype="int64" if ids else "float32"))
    return with_packed_inputs(model, parts)


def with_packed_inputs(model: Model, parts: Sequence[Part]) -> Model:
    """Pack the inputs `parts` of `model`, see `pack_inputs`. Returns `model` itself."""
    if not parts:
        return model
    original = type(model)
    call = calling(original, parts)
    parts = with_types(model, call, parts)

    def forward(self: nn.Module, x: Tensor) -> object:
        size = packed_size(parts)
        if tuple(x.shape[1:]) != (size,):
            raise ModelError(
                "The packed inputs of {model} need samples of {needs} numbers. These samples have "
                "the shape {came}. Give the input shape {needs}.",
                code="model.inputs",
                needs=size,
                came=list(x.shape[1:]),
                model=original.__name__,
            )
        types, inputs = {"float32": x.dtype, "int64": torch.int64}, {}
        for part, at in zip(parts, columns(parts).values(), strict=True):
            # Contiguous, so that `view` can join the batch with other axes.
            own = x[:, at].reshape(-1, *part.shape).contiguous()
            inputs[part.name] = own.to(types[part.dtype])
        return call(self, inputs)

    # A new class, not an attribute: a copy of the model must call its own layers.
    model.__class__ = type(original.__name__, (original,), {"forward": forward})
    setattr(model, ATTRIBUTE, tuple(parts))
    return model


def parts_of_model(model: nn.Module) -> tuple[Part, ...]:
    """The inputs that are packed into the samples of `model`. Empty for a single tensor."""
    known: tuple[Part, ...] = getattr(model, ATTRIBUTE, ())
    return known


Call = Callable[[nn.Module, dict[str, Tensor]], object]


def calling(model: type[nn.Module], parts: Sequence[Part]) -> Call:
    """How `forward` of `model` takes the inputs: by name, or as one dictionary.

    Raises ModelError if both are impossible.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known, names = [p.name for p in named], [part.name for part in parts]
    required = [p.name for p in named if p.default is p.empty]
    forward: Any = model.forward
    if len(required) == 1 and not set(names) & set(known):
        return lambda self, inputs: forward(self, inputs)
    for name in names:
        if name not in known and not takes_any:
            raise ModelError(
                "{model}.forward has no argument {name!r}{did_you_mean} It takes {takes}.",
                code="model.inputs",
                model=model.__name__,
                name=name,
                takes=known,
                did_you_mean=did_you_mean(name, known),
            )
    missing = [name for name in required if name not in names]
    if missing:
        raise ModelError(
            "{model}.forward also needs {missing}. Give the shape of each: --input NAME:SHAPE, or "
            "--input NAME:SHAPE:int64 for ids.",
            code="model.inputs",
            model=model.__name__,
            takes=known,
            missing=missing,
        )
    return lambda self, inputs: forward(self, **inputs)


def with_types(model: nn.Module, call: Call, parts: Sequence[Part]) -> Sequence[Part]:
    """Return `parts`. If no type is given, some parts become ids if `model` cannot run otherwise.

    Tries the model on zeros with each choice of types, beginning with the fewest ids. If all parts
    must be ids, nothing changes, because recording detects this itself.
    """
    if len(parts) > MOST_GUESSED or any(part.dtype != "float32" for part in parts):
        return parts
    twin = twin_of(model).eval()

    def runs(ids: Collection[Part]) -> bool:
        types = [torch.int64 if part in ids else torch.float32 for part in parts]
        inputs = {
            part.name: torch.zeros(2, *part.shape, dtype=dtype)
            for part, dtype in zip(parts, types, strict=True)
        }
        with torch.no_grad(), torch.random.fork_rng(devices=()), suppress(Exception):
            call(twin, inputs)  # the user's code may raise any error
            return True
        return False

    choices = (ids for n in range(len(parts)) for ids in combinations(parts, n))
    ids = next(filter(runs, choices), ())
    return [msgspec.structs.replace(p, dtype="int64") if p in ids else p for p in parts]


def check_one_input(model: nn.Module) -> None:
    """Raise ModelError if `forward` of `model` needs several inputs and they are not packed."""
    parameters = inspect.signature(model.forward).parameters.values()
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
    ]
    if len(required) > 1 and not parts_of_model(model):
        raise ModelError(
            "{model}.forward takes {inputs} inputs: {takes}. Give the shape of each input: --input "
            "NAME:SHAPE, or --input NAME:SHAPE:int64 for ids, in place of --input-shape. In "
            "Python, use `pack_inputs`; in a federation's file, use the key `inputs`.",
            code="model.inputs",
            model=type(model).__name__,
            inputs=len(required),
            takes=required,
        )


def with_limits(model: nn.Module, graph: GraphModule) -> None:
    """Set the number of ids of each input of ids, from the rows of the tables that it indexes."""
    parts = parts_of_model(model)
    if not any(part.dtype == "int64" and part.limit is None for part in parts):
        return
    rows = indexed_rows(graph, parts)
    setattr(
        model,
        ATTRIBUTE,
        tuple(
            msgspec.structs.replace(part, limit=part.limit or min(rows[part.name], default=None))
            if part.dtype == "int64"
            else part
            for part in parts
        ),
    )


def indexed_rows(graph: GraphModule, parts: Sequence[Part]) -> dict[str, list[int]]:
    """For each part, the number of rows of each table that `graph` indexes with this part."""
    size = packed_size(parts)
    rows: dict[str, list[int]] = {part.name: [] for part in parts}
    names = {(at.start, at.stop): name for name, at in columns(parts).items()}
    source = input_node(graph)
    samples, holds = {source}, dict[Node, str]()
    if len(parts) == 1:  # the graph has no slice that takes everything
        holds[source] = parts[0].name
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.slice.Tensor and node.args[0] in samples:
            _, axis, start, end = node.args[:4]
            if axis == 0:
                samples.add(node)
            else:
                holds[node] = names[start, min(end, size)]
            continue
        if node.target is aten.embedding.default and node.args[1] in holds:
            rows[holds[node.args[1]]].append(int(node.args[0].meta["val"].shape[0]))
        if node.target is aten.index.Tensor:
            for axis, index in enumerate(node.args[1]):
                if index in holds:
                    length = node.args[0].meta["val"].shape[axis]
                    if isinstance(length, int):
                        rows[holds[index]].append(length)
        first = node.args[0] if node.args else None
        if first in holds and any(f"aten.{word}" in str(node.target) for word in KEEPING):
            holds[node] = holds[first]
    return rows


def range_of_parts(parts: Sequence[Part], other: Interval | None = None) -> InputRange:
    """The range of packed samples: ids are below their limits, other numbers have range `other`.

    If `other` is empty, the other numbers are standard normal.
    """
    numbers: list[Interval] = []
    for part in parts:
        own = other or Interval()
        if part.dtype == "int64":
            own = Interval(low=0.0, high=float((part.limit or SAFE_LIMIT) - 1), whole=True)
        numbers += [own] * size_of(part)
    return repeated(numbers) if any(part.dtype == "int64" for part in parts) else ()
