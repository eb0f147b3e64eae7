"""The labels of the user's own loss, which a decorator declares."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Part
from device_agent.formats.packing import LARGEST_ID, columns, packed_size
from profiles.errors import InputError

ATTRIBUTE = "edgetailor_labels"
"""The attribute of a loss that holds its labels."""
NO_LABELS = Part(name="", shape=(), limit=0)
"""The labels of a loss that reads none. A zero for each sample takes their place."""
Function = TypeVar("Function", bound=Callable[..., object])


def classes(count: int, *shape: int) -> Part:
    """Declare labels that are classes from 0 to `count` - 1, for the decorator `loss`.

    Args:
        count: Number of classes, or of other ids.
        shape: Shape of the labels of one sample. Without sizes, a sample has one class. If there is
            a shape, a label of -100 marks a position without a label. The loss also gets the
            labels of -100.

    Raises:
        InputError: A number is not allowed.

    Examples:
        >>> classes(10).limit, classes(21, 64, 64).shape
        (10, (64, 64))
    """
    if not isinstance(count, int) or not 1 <= count <= LARGEST_ID:
        raise InputError(
            "et.classes needs the number of classes, from 1 to {most:,}; it got {count}.",
            code="loss.wrong-labels",
            count=str(count),
            most=LARGEST_ID,
        )
    return Part(name="", shape=_checked(shape), dtype="int64", limit=count)


def numbers(*shape: int) -> Part:
    """Declare labels that are float32 numbers, for the decorator `loss`.

    Args:
        shape: Shape of the labels of one sample. Without sizes, a sample has one number.

    Raises:
        InputError: A size is not allowed.

    Examples:
        >>> numbers(4).shape, numbers().shape
        ((4,), ())
    """
    return Part(name="", shape=_checked(shape))


def loss(single: Part | None = None, /, **named: Part) -> Callable[[Function], Function]:
    """Declare the labels of your own loss: a decorator for a function of outputs and labels.

    Use this for any loss that is not built in. The function gets the model's result (a tensor, a
    tuple or a dictionary) and the labels of a batch (a tensor, or a dictionary of several arrays).
    The function returns one of these:

    - the loss of each sample, a tensor (batch,); EdgeTailor takes its mean;
    - the loss of the batch, a tensor with one number;
    - a pair: one of these two losses, and a dictionary of metrics by name, each a tensor (batch,).
      An evaluation shows the mean of each metric over the samples.

    Like a model, the function is recorded once and becomes a part of the exported training step. It
    must compute with torch's operators. An `if` may test a value of a tensor if both branches give
    tensors of the same shapes. To use the function as a loss, give its name as `module:function`.

    Args:
        single: The labels, if they are one array: `y` of the local data.
        named: Several arrays of labels by name: `y_NAME` of the local data. If there are no
            arguments, the loss reads no labels: the local data need no labels, and the function
            gets None.

    Raises:
        InputError: The labels are not results of `classes` or `numbers`.

    Examples:
        >>> import torch
        >>> import edgetailor as et
        >>> @et.loss(box=et.numbers(4), kind=et.classes(10))
        ... def detection(outputs, labels):
        ...     far = (outputs["box"] - labels["box"]).abs().mean(1)
        ...     wrong = torch.nn.functional.cross_entropy(
        ...         outputs["kind"], labels["kind"], reduction="none"
        ...     )
        ...     return wrong + far, {"distance": far}
    """
    given = {"": single} if single is not None else dict(named) or {"": NO_LABELS}
    right = all(isinstance(part, Part) and not part.name for part in given.values())
    if not right or (single is not None and named):
        raise InputError(
            "et.loss needs the labels: one array, as @et.loss(et.classes(10)), or several by name, "
            "as @et.loss(box=et.numbers(4), kind=et.classes(10)). If the loss reads no labels, "
            "write @et.loss().",
            code="loss.wrong-labels",
        )
    parts = tuple(
        Part(name=name, shape=part.shape, dtype=part.dtype, limit=part.limit)
        for name, part in given.items()
        if part is not None
    )

    def declare(function: Function) -> Function:
        setattr(function, ATTRIBUTE, parts)
        return function

    return declare


def rule_of_parts(parts: tuple[Part, ...]) -> LabelRule:
    """The rule for arrays of labels that are packed into one array."""
    return LabelRule(None, (packed_size(parts),), "float32", parts=parts)


def _checked(shape: tuple[int, ...]) -> tuple[int, ...]:
    if all(isinstance(size, int) and size > 0 for size in shape):
        return shape
    raise InputError(
        "The shape of labels {shape} must be whole numbers above 0, the sizes of one sample "
        "without the batch.",
        code="loss.wrong-labels",
        shape=str(shape),
    )


def zeros_last(labels: Tensor, parts: Sequence[Part]) -> Tensor:
    """Make packed labels in which each sequence of classes ends with zeros.

    Losses of sequences, such as CTC, may take zeros for padding. If a sequence has zeros
    before other labels, torch's own gradient of CTC may be wrong.
    """
    labels, places = labels.clone(), columns(parts)
    for part in parts:
        if part.dtype == "int64" and len(part.shape) == 1:
            own = labels[:, places[part.name]]
            labels[:, places[part.name]] = own.sort(1, descending=True).values
    return labels
