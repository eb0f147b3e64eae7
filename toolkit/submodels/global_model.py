"""The global model's numbers, in memory and as one safetensors file.

Beside the model's own tensors the file may hold factors that a family keeps from round to round
(`cp`): averaging factors only makes sense when every round starts from the last one's.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from profiles.errors import InputError, ModelError
from toolkit.factorization.factorizer import Factorizer

KEPT = "kept|"

Kept = Mapping[str, Mapping[str, Tensor]]
"""Factors by their spec's head (family and size, like `cp:2.0`), then by name in the bundle."""


@dataclass(frozen=True)
class GlobalModel:
    """All tensors of the global model under their names in the PyTorch model, and kept factors.

    `factorizer` factorizes them once for all submodels; it is not part of what is saved. Raises
    ModelError for a name that the file would take for a kept factor's.
    """

    tensors: Mapping[str, Tensor]
    kept: Kept = field(default_factory=dict)
    factorizer: Factorizer = field(default_factory=Factorizer, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in self.tensors:
            if name.startswith(KEPT):
                raise ModelError(
                    f"The model's tensor {name!r} has a name that weights files keep for factors; "
                    f"rename its module so that it does not begin with {KEPT!r}."
                )

    def save(self) -> bytes:
        """The safetensors file of this model; the same bytes for the same numbers."""
        flat = {name: value.detach().contiguous() for name, value in self.tensors.items()}
        for key, factors in self.kept.items():
            for name, value in factors.items():
                flat[f"{KEPT}{key}|{name}"] = value.detach().contiguous()
        return save(flat)

    def fingerprint(self) -> str:
        """SHA-256 of the saved model: bundles and updates name the model they come from by it."""
        return hashlib.sha256(self.save()).hexdigest()

    def load_into(self, model: nn.Module) -> None:
        """Copy the tensors into `model`, which must have the same names and shapes."""
        model.load_state_dict(dict(self.tensors))


def from_model(model: nn.Module) -> GlobalModel:
    """The numbers that `model` holds now."""
    return GlobalModel({name: value.detach().clone() for name, value in model.state_dict().items()})


def from_bytes(data: bytes, origin: str) -> GlobalModel:
    """Read what `save` wrote. Raises InputError naming `origin` where it is no safetensors file."""
    try:
        flat = load(data)
    except SafetensorError as error:
        raise InputError(f"{origin} is not a safetensors file: {error}.") from None
    tensors: dict[str, Tensor] = {}
    kept: dict[str, dict[str, Tensor]] = {}
    for name, value in flat.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise InputError(f"{origin}: {name!r} holds a number that is not finite.")
        if name.startswith(KEPT):
            key, bar, tensor = name.removeprefix(KEPT).partition("|")
            if not bar:
                raise InputError(
                    f"{origin}: {name!r} is no kept factor; these are called "
                    f"{KEPT}KEY|TENSOR. Write the file anew."
                )
            kept.setdefault(key, {})[tensor] = value
        else:
            tensors[name] = value
    return GlobalModel(tensors, kept)


def from_file(path: str | Path) -> GlobalModel:
    """Read a weights file. Raises InputError where it is missing or not readable."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    return from_bytes(data, str(path))


def check_fits(weights: GlobalModel, model: nn.Module, origin: str) -> None:
    """Raise InputError where names, shapes or types of `weights` differ from the model's."""
    own = model.state_dict()
    for name in own.keys() ^ weights.tensors.keys():
        lack = "lacks" if name in own else "has, beyond the model,"
        raise InputError(f"{origin} {lack} the tensor {name!r}: it is not from this model.")
    for name, value in own.items():
        came = weights.tensors[name]
        if came.shape != value.shape:
            raise InputError(
                f"{origin}: {name!r} is {tuple(came.shape)}, the model's is {tuple(value.shape)}."
            )
        if came.dtype != value.dtype:
            raise InputError(
                f"{origin}: {name!r} is {came.dtype}, the model's is {value.dtype}: convert it."
            )
