"""Loads models from references `package.module:callable` to functions that return an nn.Module."""

import importlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

from exporters.recording.inputs.input_ranges import with_inputs
from exporters.recording.inputs.sample_range import NO_INPUTS, Inputs
from exporters.recording.trainable_forms import in_trainable_form
from profiles.errors import ModelError
from profiles.text_formatting import did_you_mean
from toolkit.submodels import global_model
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.model_reference import parse_reference


def load_model(
    reference: str,
    weights_file: str | Path | None = None,
    seed: int = 0,
    inputs: Inputs = NO_INPUTS,
) -> nn.Module:
    """Build the model that a reference names. The module may be in the current folder.

    Use it in scripts that take a model by its reference, as the commands do. If you build the model
    yourself, you do not need it.

    Args:
        reference: `package.module:callable`, for example `toolkit.models:resnet20`.
        weights_file: A safetensors file with the model's weights, or None for initial weights.
        seed: Seed of the random initial weights.
        inputs: What you know about the samples: the range of their numbers, and the inputs that are
            packed into one sample.

    Returns:
        The model.

    Raises:
        ModelError: If the reference does not name a callable that returns an `nn.Module`.
        InputError: If `weights_file` cannot be read or does not fit the model.

    Examples:
        >>> load_model("toolkit.models:mnist_dnn").fc2
        Linear(in_features=100, out_features=10, bias=True)
    """
    model = with_inputs(build_model(reference, seed), inputs)
    if weights_file is not None:
        load_weights(model, weights_file)
    return model


def load_global(
    reference: str,
    weights_file: str | Path | None = None,
    seed: int = 0,
    inputs: Inputs = NO_INPUTS,
) -> tuple[nn.Module, GlobalModel]:
    """Load a model like `load_model`. Returns the model, and its weights as a global model.

    The global model includes the factors in the weights file. Arguments and errors are those of
    `load_model`.
    """
    model = with_inputs(build_model(reference, seed), inputs)
    if weights_file is None:
        return model, global_model.from_model(model)
    return model, load_weights(model, weights_file)


BUILT_FOR_ANOTHER_TORCH = (
    " This torchvision was built for another torch. Install both from one package index, for "
    "example with --index-url https://download.pytorch.org/whl/cpu."
)


def load_weights(model: nn.Module, weights_file: str | Path) -> GlobalModel:
    """Load a weights file into `model`. Raises InputError if it does not fit."""
    file = global_model.from_file(weights_file)
    loaded = global_model.fitted(file, model, str(weights_file))
    loaded.load_into(model)
    return loaded


def build_model(reference: str, seed: int) -> nn.Module:
    """Build the model that `reference` names. Raises ModelError if it names no model."""
    module_name, name = parse_reference(reference)
    # Installed commands do not have the current folder on the path, unlike `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    known = sys.modules.get(module_name)
    try:
        module = importlib.import_module(module_name)
        if module is known and not hasattr(module, name):
            module = importlib.reload(module)  # its file may have changed since the import
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ModelError(
            "{model!r}: the module {module} cannot be imported: {reason}.{hint}",
            code="model.cannot-import",
            model=reference,
            module=module_name,
            reason=str(error),
            hint=BUILT_FOR_ANOTHER_TORCH if "torchvision::" in str(error) else "",
        ) from None
    builder = getattr(module, name, None)
    if not callable(builder):
        callables = [n for n in dir(module) if callable(getattr(module, n, None))]
        raise ModelError(
            "{model!r}: the module {module} has no callable {callable!r}{did_you_mean}",
            code="model.unknown-callable",
            model=reference,
            module=module_name,
            callable=name,
            did_you_mean=did_you_mean(name, callables),
        )
    # Seed immediately before the builder, because imports may draw random numbers.
    torch.manual_seed(seed)
    try:
        model = builder()
    except (Exception, SystemExit) as error:
        raise ModelError(
            "{model!r} failed: {kind}: {reason}",
            code="model.builder-failed",
            model=reference,
            kind=type(error).__name__,
            reason=str(error),
        ) from error
    if not isinstance(model, nn.Module):
        # A common mistake: the reference names a configuration or a state dict.
        kind = type(model).__name__
        article = "an" if kind[0].lower() in "aeiou" else "a"
        raise ModelError(
            "{model!r} returned {article} {returned}; it must return an nn.Module.",
            code="model.not-a-module",
            model=reference,
            returned=kind,
            article=article,
        )
    # A training loop begins with this call: a model's own `train` may freeze parameters.
    return in_trainable_form(model.train())
