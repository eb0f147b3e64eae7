"""Joins the inputs of a model: one sample contains all inputs, one after the other."""

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from profiles.errors import ModelError
from profiles.text_formatting import did_you_mean

Model = TypeVar("Model", bound=nn.Module)


def join_inputs(model: Model, **shapes: tuple[int, ...]) -> Model:
    """Let `model` take one tensor that contains all of its inputs.

    Use this before `split` if the model's `forward` takes several tensors.

    A bundle has only one array of samples, `x`. So the changed model takes one vector for each
    sample. The vector contains all flattened inputs in the order of `shapes`. Prepare `x` in this
    way, for example with `np.concatenate([input_ids, attention_mask], axis=1)`. All inputs have the
    type of the samples: float32, or int64 if the model embeds integers. So a mask for token ids is
    also int64. Positions that the mask leaves out must contain a valid id, such as 0.

    Args:
        model: The model. Only its `forward` changes. Its tensors keep their names.
        shapes: The shape of each input in one sample, without the batch axis, by the input's name
            in `forward`.

    Returns:
        `model` itself.

    Raises:
        ModelError: `forward` has no argument with a given name, a required argument has no shape,
            or no shape is given. Later, the changed model raises ModelError if samples have a wrong
            length.

    Examples:
        >>> import torch
        >>> class Scaled(nn.Module):
        ...     def forward(self, image, factor):
        ...         return image.flatten(1) * factor
        >>> model = join_inputs(Scaled(), image=(2, 3), factor=(1,))
        >>> model(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 10.0]]))
        tensor([[10., 20., 30., 40., 50., 60.]])
    """
    original = type(model)
    check_names(original, shapes)
    bounds = [0, *itertools.accumulate(map(math.prod, shapes.values()))]

    def forward(self: nn.Module, x: Tensor) -> object:
        if tuple(x.shape[1:]) != (bounds[-1],):
            raise wrong_length(original, shapes, bounds[-1], tuple(x.shape[1:]))
        parts = zip(shapes.items(), itertools.pairwise(bounds), strict=True)
        # Contiguous, so that `view` can join the batch with other axes.
        inputs = {
            name: x[:, a:b].reshape(-1, *shape).contiguous() for (name, shape), (a, b) in parts
        }
        return original.forward(self, **inputs)

    # A new class, not an attribute: a copy of the model must call its own layers.
    model.__class__ = type(original.__name__, (original,), {"forward": forward})
    return model


def wrong_length(
    model: type[nn.Module], shapes: Mapping[str, tuple[int, ...]], length: int, came: Sequence[int]
) -> ModelError:
    """The error for samples of the shape `came` that must be vectors of `length` numbers."""
    parts = " + ".join(f"{name} {math.prod(shape)}" for name, shape in shapes.items())
    return ModelError(
        "The joined inputs of {model} need samples of {needs} numbers ({parts}). These samples "
        "have the shape ({shape}). Give the input shape {needs}.",
        code="model.inputs",
        needs=length,
        came=list(came),
        model=model.__name__,
        parts=parts,
        shape=",".join(map(str, came)),
    )


def check_names(model: type[nn.Module], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError if `model` cannot be called with the inputs in `shapes`."""
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    title = f"{model.__name__}.forward"
    if not shapes:
        raise ModelError(
            "join_inputs needs at least one input. {model} takes {takes}: give the shape of each "
            "input that your samples contain.",
            code="model.inputs",
            takes=known,
            model=title,
        )
    for name in shapes:
        if name not in known and not takes_any:
            raise ModelError(
                "{model} has no argument {name!r}{did_you_mean} It takes {takes}.",
                code="model.inputs",
                name=name,
                takes=known,
                model=title,
                did_you_mean=did_you_mean(name, known),
            )
    missing = [p.name for p in named if p.default is p.empty and p.name not in shapes]
    if missing:
        raise ModelError(
            "{model} also needs {missing}. Give the shape of each.",
            code="model.inputs",
            takes=known,
            missing=missing,
            model=title,
        )
