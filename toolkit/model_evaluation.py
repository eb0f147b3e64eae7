"""Evaluates a model on samples that no device trained on: accuracy, by class, loss and errors.

Also computes the gradient of the model's loss on such samples, and how training on these samples
changes the model.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from device_agent.data.array_files import LABELS
from device_agent.data.data_checks import batch_shape, check_classes
from device_agent.data.local_data import load_data
from device_agent.data.packed_arrays import check_packed
from device_agent.formats.label_rule import LabelRule, count_labels
from device_agent.formats.manifest import Dtype
from device_agent.formats.preprocessing import Preprocessing
from exporters.objectives.loss_text import is_own
from exporters.objectives.objective import objective
from exporters.recording.inputs.input_shapes import wrong_input_shape
from exporters.recording.inputs.packed_inputs import parts_of_model
from exporters.recording.inputs.sample_range import NO_INPUTS, Inputs
from exporters.recording.inputs.unknown_ids import is_wrong_id, unknown_ids
from exporters.recording.model_output import OutputForm, named_values, output_form
from profiles.errors import InputError, ModelError
from profiles.progress import Report, silent
from profiles.text_formatting import counted
from toolkit.evaluation_sums import Evaluation, EvaluationSums
from toolkit.submodels.hyperparameters import Loss
from toolkit.submodels.model_loading import load_model

logger = logging.getLogger(__name__)

CHUNK = 256
"""The most samples that are evaluated at a time."""
PROBE = 13
"""The number of samples on which a model runs first, to find out which outputs it returns."""
NEEDS_GRADIENTS = "does not require grad"
"""Part of PyTorch's error if a model's own code needs gradients but gradients are disabled."""
GRADIENT = 500
"""About how many samples `loss_gradient` and `trained_change` use at most."""
NUMBERS = 1 << 24
"""The most output numbers that are evaluated at a time; a single sample may have more."""


def evaluate(
    module: nn.Module,
    x: np.ndarray,
    y: np.ndarray,
    origin: str = "The data",
    loss: Loss = "cross-entropy",
) -> Evaluation:
    """Evaluate a model.

    Use it on the server between rounds, on samples that no device has.

    Args:
        module: The model with its weights. It is switched to inference mode.
        x: Samples (n, *shape).
        y: Labels. Classes are int64: (n,), or (n, ...) with a class for each position of the
            model's output. A regression has float32 numbers in the shape of the output.
        origin: Where the data come from, for messages.
        loss: The loss that the model was trained with.

    Returns:
        The evaluation: `accuracy` (from 0 to 1; None for a regression), the mean `loss`, and counts
        of each class. A regression has `rmse` and `mae`.

    Raises:
        ModelError: If the model cannot take the samples, or the loss does not fit its output.
        InputError: If the labels do not fit the model's output.

    Examples:
        >>> from toolkit.models import mnist_dnn
        >>> x = np.zeros((8, 1, 28, 28), np.float32)
        >>> evaluate(mnist_dnn(), x, np.zeros(8, np.int64), "zeros").samples
        8
    """
    outputs = _outputs(module.eval(), torch.from_numpy(x), loss)
    return evaluate_outputs(partial(_output, module, outputs), x, y, origin, loss, outputs)


def evaluate_outputs(
    predict: Callable[[torch.Tensor], torch.Tensor],
    x: np.ndarray,
    y: np.ndarray,
    origin: str = "The data",
    loss: Loss = "cross-entropy",
    outputs: OutputForm | None = None,
) -> Evaluation:
    """Do the same as `evaluate` for a function that computes outputs from a batch of samples.

    If the function packs several outputs into one tensor, `outputs` describes them; else it is
    None.
    """
    shape = tuple(predict(torch.from_numpy(x[:1])).shape[1:])
    goal = objective(loss, outputs or shape)
    _check_labels(y, goal.labels, origin)
    total, sums = 0.0, EvaluationSums(goal, len(y))
    chunk = max(1, min(CHUNK, NUMBERS // math.prod(shape)))
    for start in range(0, len(y), chunk):
        own = y[start : start + chunk]
        target = torch.from_numpy(own)
        # float64, so that the mean over many samples does not lose digits. The user's own loss is
        # recorded for float32.
        output = predict(torch.from_numpy(x[start : start + chunk]))
        output = output if goal.own else output.double()
        total += float(goal.loss(output, target)) * count_labels(own)
        sums.add(output, own)
    return sums.evaluation(len(y), count_labels(y), total)


def take_statistics(module: nn.Module, x: np.ndarray) -> None:
    """Set the running statistics of all batch norms from the samples `x` (n, *shape).

    The samples run through the model in chunks. Each batch norm computes its statistics for every
    chunk, and keeps their mean. As in training, it normalises a chunk with the statistics of this
    chunk.
    """
    norms = [m for m in module.eval().modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    # Training uses the momentum, so it is restored at the end.
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # None tells PyTorch to take the plain mean.
        norm.train()
    for chunk in np.array_split(x, -(-len(x) // CHUNK)):
        _run(module, torch.from_numpy(chunk))
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    module.eval()


def training_problem(module: nn.Module, x: np.ndarray, y: np.ndarray, loss: Loss) -> str | None:
    """Compute the loss and the gradients of `module` for one batch.

    The parameters do not change, but running statistics do.

    Returns a text that names the number that is not finite: the loss, a gradient or a new
    statistic. Returns None if all numbers are finite. Also returns None if the module cannot train
    on this batch. Such a failure says nothing about the weights: some layers need two or more
    samples.
    """
    before = torch.get_rng_state()
    try:
        outputs = _outputs(module.eval(), torch.from_numpy(x), loss)
        output = outputs.pack(module.train()(torch.from_numpy(x)), len(x))
        assert isinstance(output, torch.Tensor)
        loss_value = objective(loss, outputs).loss(output, torch.from_numpy(y))
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss_value, [p for _, p in trained], allow_unused=True)
    except Exception as error:  # the user's code may raise anything
        logger.debug("No training step was tried: %s", error)
        return None
    finally:
        torch.set_rng_state(before)  # dropout draws from it
        module.eval()
    if not math.isfinite(loss_value.item()):
        return f"the loss is {loss_value.item()}"
    named = {name: gradient for (name, _), gradient in zip(trained, gradients, strict=True)}
    # Buffers that are not saved may hold inf, for example masks.
    saved = {n: v for n, v in module.state_dict().items() if v.is_floating_point()}
    for what, tensors in (("the gradient of", named), ("the new value of", saved)):
        for name, value in tensors.items():
            if value is not None and not _is_finite(value):
                return f"{what} {name!r}"
    return None


def loss_gradient(
    module: nn.Module, x: np.ndarray, y: np.ndarray, loss: Loss, batch_size: int
) -> dict[str, torch.Tensor]:
    """Compute the gradient of the mean loss of `module` in inference mode.

    Use it to see which changes of the weights lower the loss. If there are more than GRADIENT
    samples, it uses about that many of them, evenly spaced.

    Args:
        module: The model with its weights.
        x: Samples (n, *shape).
        y: Their labels, as for `evaluate`.
        loss: The loss.
        batch_size: How many samples are in memory at the same time, with their activations.

    Returns:
        The gradient by the name of a parameter, in the parameter's shape. Empty if it cannot be
        computed, or if a number is not finite.

    Examples:
        >>> from toolkit.models import mnist_dnn
        >>> x, y = np.zeros((4, 1, 28, 28), np.float32), np.zeros(4, np.int64)
        >>> loss_gradient(mnist_dnn(), x, y, "cross-entropy", 2)["fc2.bias"].shape
        torch.Size([10])
    """
    spaced = slice(None, None, max(1, len(x) // GRADIENT))
    x, y = x[spaced], y[spaced]
    try:
        outputs = _outputs(module.eval(), torch.from_numpy(x), loss)
        goal, counted_labels = objective(loss, outputs), count_labels(y)
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        sums = [torch.zeros_like(p) for _, p in trained]
        for start in range(0, len(y), batch_size):
            own = slice(start, start + batch_size)
            output = outputs.pack(module(torch.from_numpy(x[own])), len(x[own]))
            assert isinstance(output, torch.Tensor)
            value = goal.loss(output, torch.from_numpy(y[own]))
            share = value * (count_labels(y[own]) / counted_labels)
            gradients = torch.autograd.grad(share, [p for _, p in trained], allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient
    except Exception as error:  # the user's code may raise anything
        logger.debug("No gradient of the loss was computed: %s", error)
        return {}
    if not all(map(_is_finite, sums)):
        return {}
    return {name: total for (name, _), total in zip(trained, sums, strict=True)}


def trained_change(
    module: nn.Module,
    x: np.ndarray,
    y: np.ndarray,
    loss: Loss,
    batch_size: int,
    learning_rate: float,
    momentum: float,
) -> dict[str, torch.Tensor]:
    """Compute how one epoch of SGD would change the parameters of `module`, without changing them.

    Uses at most about GRADIENT samples, like `loss_gradient`. Their order is always the same.

    Returns:
        The changes by the name of a parameter. Empty if they cannot be computed, or if a number is
        not finite.
    """
    spaced = slice(None, None, max(1, len(x) // GRADIENT))
    x, y = x[spaced], y[spaced]
    before = torch.get_rng_state()
    try:
        outputs = _outputs(module.eval(), torch.from_numpy(x), loss)
        goal, order = objective(loss, outputs), np.random.default_rng(0).permutation(len(y))
        parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
        trained = {n: parameters[n] for n, p in module.named_parameters() if p.requires_grad}
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        optimizer = torch.optim.SGD(
            [p.requires_grad_() for p in trained.values()], learning_rate, momentum
        )
        module.train()
        for rows in np.array_split(order, max(1, len(order) // batch_size)):
            own = torch.from_numpy(x[rows])
            returned = functional_call(module, {**parameters, **buffers}, (own,))
            output = outputs.pack(returned, len(own))
            assert isinstance(output, torch.Tensor)
            value = goal.loss(output, torch.from_numpy(y[rows]))
            gradients = torch.autograd.grad(value, [*trained.values()], allow_unused=True)
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    except Exception as error:  # the user's code may raise anything
        logger.debug("No training on the held-out samples: %s", error)
        return {}
    finally:
        torch.set_rng_state(before)  # dropout draws from it
        module.eval()
    first = dict(module.named_parameters())
    changes = {n: p.detach() - first[n].detach() for n, p in trained.items()}
    return changes if all(map(_is_finite, changes.values())) else {}


def _is_finite(value: torch.Tensor) -> bool:
    """Whether all numbers are finite. Unlike `torch.isfinite`, this makes no copy of them."""
    ends = torch.aminmax(value.detach()) if value.numel() else ()
    return all(math.isfinite(end) for end in ends)


def evaluate_file(
    model: str,
    weights_file: str | Path,
    sample_shape: tuple[int, ...],
    data: str | Path,
    loss: Loss = "cross-entropy",
    progress: Report = silent,
    preprocessing: Preprocessing | None = None,
    seed: int = 0,
    inputs: Inputs = NO_INPUTS,
) -> Evaluation:
    """Evaluate a model with weights from a file.

    Args:
        model: Model reference, `package.module:callable`.
        weights_file: Its weights, a safetensors file.
        sample_shape: Shape of one sample, without the batch.
        data: The samples and labels, as `local_data.load_data` reads them.
        loss: The loss that the model was trained with.
        progress: Called with the name of each stage when it begins.
        preprocessing: How pictures or CSV files become samples.
        seed: The seed that the model is built with.
        inputs: The inputs, if the model takes several.

    Returns:
        Accuracy, loss and errors, and figures of each class.

    Raises:
        ModelError: If the model cannot be loaded or cannot take the samples.
        DataError: If the data cannot be read.
        InputError: If the weights or labels do not fit the model.
    """
    progress("loading the model")
    module = load_model(model, weights_file, seed, inputs)
    progress("reading the data")
    x, y = samples_for(module, sample_shape, data, loss, preprocessing)
    progress(f"evaluating {counted(len(y), 'sample')}")
    return evaluate(module, x, y, str(data), loss)


def samples_for(
    module: nn.Module,
    sample_shape: tuple[int, ...],
    data: str | Path,
    loss: Loss,
    preprocessing: Preprocessing | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Read samples and labels for a model, see `evaluate_file`."""
    outputs, dtype = _outputs_and_sample_type(module.eval(), sample_shape, loss)
    labels = objective(loss, outputs).labels
    local = load_data(
        data,
        sample_shape,
        labels,
        dtype,
        least=1,
        preprocessing=preprocessing,
        parts=parts_of_model(module),
    )
    return np.array(local.x), np.array(local.y)


def _check_labels(y: np.ndarray, labels: LabelRule, origin: str) -> None:
    """Raise InputError if the labels `y` do not fit the rule `labels` of the model."""
    if y.shape[1:] != labels.shape:
        raise InputError(
            "{origin} has labels of shape {shape}; the model needs the shape {labels}.",
            code="data.wrong-shape",
            origin=origin,
            shape=y.shape,
            expected=list(labels.shape or ()),
            labels=batch_shape(labels.shape or ()),
        )
    if labels.dtype == "int64":
        check_classes(y, labels, origin)
    elif labels.parts:
        check_packed(y, LABELS, labels.parts, origin)


def _outputs_and_sample_type(
    module: nn.Module, sample_shape: tuple[int, ...], loss: Loss
) -> tuple[OutputForm, Dtype]:
    """The outputs of `module`, and the type of the samples that it takes."""
    zeros = torch.zeros(PROBE, *sample_shape)
    try:
        return _outputs(module, zeros, loss), "float32"
    except ModelError:
        # Only a model with an embedding can take integers.
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in module.modules()):
            raise
    return _outputs(module, zeros.long(), loss), "int64"


def _outputs(module: nn.Module, x: torch.Tensor, loss: Loss) -> OutputForm:
    """Find which outputs `module` returns, by running it on a sample of `x`."""
    some = x[:1]
    returned = _run(module, some)
    if len(list(named_values(returned))) > 1 or getattr(returned, "shape", some.shape)[:1] != (1,):
        # Use more samples than a recurrent layer's state has layers: then the axis of layers cannot
        # be taken for the batch.
        some = x[:PROBE] if len(x) >= PROBE else x[torch.arange(PROBE) % len(x)]
        returned = _run(module, some)
    outputs = output_form(returned, len(some), is_own(loss))
    _check_output(outputs.pack(returned, len(some)), some)
    return outputs


def _run(module: nn.Module, x: torch.Tensor) -> object:
    """What `module` returns for `x`. Raises ModelError if it fails."""
    try:
        with torch.no_grad():
            try:
                return module(x)
            except RuntimeError as error:
                if NEEDS_GRADIENTS not in str(error):
                    raise
        # The model itself computes gradients, for example those of a potential.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, module(x))
    except Exception as error:  # the user's code may raise anything
        if is_wrong_id(error):
            raise unknown_ids(error) from error
        shape = tuple(x.shape[1:])
        reason = str(error).partition("\n")[0]
        raise wrong_input_shape(module, shape) or ModelError(
            "The model cannot take samples of shape {shape}: {reason}",
            code="model.forward-fails",
            shape=shape,
            reason=reason,
        ) from error


def _output(module: nn.Module, outputs: OutputForm, x: torch.Tensor) -> torch.Tensor:
    """The outputs of `module` for `x`, packed if there are several."""
    return _check_output(outputs.pack(_run(module, x), len(x)), x)


def _check_output(output: object, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(output, torch.Tensor) or output.shape[:1] != x.shape[:1]:
        raise ModelError(
            "The model must return one tensor with the batch as its first axis.",
            code="model.wrong-output",
        )
    return output
