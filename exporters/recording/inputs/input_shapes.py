"""Explains a wrong input shape: names the layer that does not fit, and the input that it takes."""

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from exporters.recording.shared_tensors import twin_of
from profiles.errors import ModelError

BATCH = 5
SPATIAL_AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


class _MismatchError(Exception):
    """Stops a model at the first layer that does not fit."""

    def __init__(self, layer: nn.Module, takes: str, came: Tensor) -> None:
        super().__init__()
        self.layer, self.takes, self.came = layer, takes, came


def wrong_input_shape(model: nn.Module, sample_shape: tuple[int, ...]) -> ModelError | None:
    """Return the error for samples that a layer of `model` cannot take.

    Call this after the model has failed. It runs a copy of the model. It stops at the first layer
    whose number of channels or features differs from the layer's input.

    Args:
        model: The model.
        sample_shape: Shape of one sample, without the batch.

    Returns:
        The error, or None if all layers that ran fit their input.
    """
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    # Other exceptions have other causes, which this function does not explain.
    with torch.no_grad(), suppress(Exception):
        samples = torch.zeros(BATCH, *sample_shape, dtype=torch.int64 if embeds else torch.float32)
        twin = twin_of(model)
        for module in twin.modules():
            module.register_forward_pre_hook(_check_input)
        try:
            twin(samples)
        except _MismatchError as mismatch:
            name = next(n for n, module in twin.named_modules() if module is mismatch.layer)
            return _explained(sample_shape, name, mismatch)
    return None


def _explained(sample_shape: tuple[int, ...], name: str, mismatch: _MismatchError) -> ModelError:
    title = f"the layer {name!r}" if name else "the model"
    came = _written(("batch", *mismatch.came.shape[1:]))
    return ModelError(
        "Wrong input shape {shape}: {title} ({kind}) takes {takes}, but gets {came}. Give the "
        "shape of one sample, without the batch, as the model expects it.",
        code="model.wrong-input-shape",
        shape=sample_shape,
        layer=name,
        takes=mismatch.takes,
        came=came,
        title=title,
        kind=type(mismatch.layer).__name__,
    )


def _check_input(layer: nn.Module, inputs: tuple[object, ...]) -> None:
    came = inputs[0] if inputs else None
    takes = _expected_input(layer)
    if not isinstance(came, Tensor) or takes is None:
        return
    axis, size, written, dimensions = takes
    fits = came.dim() in dimensions if dimensions else came.dim() > 0
    if not fits or came.shape[axis] != size:
        raise _MismatchError(layer, written, came)


def _expected_input(layer: nn.Module) -> tuple[int, int, str, tuple[int, ...]] | None:
    """Axis and size of a layer's channels, its input as text, and the allowed numbers of axes.

    None if the input of such a layer is not known. An empty tuple allows any number of axes.
    """
    match layer:
        case _ConvNd():
            spatial = SPATIAL_AXES[len(layer.kernel_size)]
            written = _written(("batch", layer.in_channels, *spatial))
            return 1, layer.in_channels, written, (2 + len(spatial),)
        case _BatchNorm():
            written = _written(("batch", layer.num_features, "..."))
            return 1, layer.num_features, written, (2, 3, 4, 5)
        case nn.RNNBase():
            axes = ("batch", "steps") if layer.batch_first else ("steps", "batch")
            return -1, layer.input_size, _written((*axes, layer.input_size)), (2, 3)
        case nn.Linear():
            return -1, layer.in_features, _written(("batch", "...", layer.in_features)), ()
    return None


def _written(axes: tuple[object, ...]) -> str:
    return f"({', '.join(map(str, axes))})"
