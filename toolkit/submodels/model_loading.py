"""Model references: `package.module:callable` returning an `nn.Module`."""

import importlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

from profiles.errors import ModelError
from toolkit.submodels import global_model
from toolkit.submodels.global_model import GlobalModel


def load_model(reference: str, weights_file: str | Path | None = None, seed: int = 0) -> nn.Module:
    """Build the model that `reference` names, with `seed` for its initial weights.

    The current folder is importable. Raises ModelError where the reference names nothing that
    returns a module, InputError where `weights_file` does not fit it.
    """
    model = build(reference, seed)
    if weights_file is not None:
        fill(model, weights_file)
    return model


def load_global(
    reference: str, weights_file: str | Path | None = None, seed: int = 0
) -> tuple[nn.Module, GlobalModel]:
    """As `load_model`, and the global model that it is: the file's, kept factors included."""
    model = build(reference, seed)
    if weights_file is None:
        return model, global_model.from_model(model)
    return model, fill(model, weights_file)


def fill(model: nn.Module, weights_file: str | Path) -> GlobalModel:
    """Give `model` the numbers of a weights file. Raises InputError where they do not fit."""
    loaded = global_model.from_file(weights_file)
    global_model.check_fits(loaded, model, str(weights_file))
    loaded.load_into(model)
    return loaded


def build(reference: str, seed: int) -> nn.Module:
    """Build the model that `reference` names. Raises ModelError where it names none."""
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ModelError(
            f"{reference!r} is no model: write package.module:callable, "
            "for instance toolkit.models:resnet20."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ModelError(f"{reference!r}: {module_name} cannot be imported: {error}.") from None
    builder = getattr(module, name, None)
    if not callable(builder):
        raise ModelError(f"{reference!r}: {module_name} has no callable {name!r}.")
    torch.manual_seed(seed)
    try:
        model = builder()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{reference!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        article = "an" if kind[0].lower() in "aeiou" else "a"
        raise ModelError(f"{reference!r} returned {article} {kind}, not an nn.Module.")
    return model
