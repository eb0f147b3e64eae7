"""The weights of the global model, in memory and as one safetensors file.

The file may also hold factors that a family keeps from round to round (`cp`). Averaging factors
only makes sense if each round starts from the factors of the last one.
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
from toolkit.submodels.weights_file import unreadable

KEPT = "kept|"
PIECE = 1 << 20
"""Numbers that are checked at a time."""

Kept = Mapping[str, Mapping[str, Tensor]]
"""Factors by family and size (for example `cp:2.0`), then by their names in the bundle."""


@dataclass(frozen=True)
class GlobalModel:
    """All tensors of the global model, and the factors that families keep.

    Attributes:
        tensors: Parameters and buffers by their names in the PyTorch model.
        kept: Factors that families keep from round to round.
        factorizer: Computes and caches factors for all submodels. It is not saved.

    Raises:
        ModelError: If a tensor has a name that the file reserves for kept factors.

    Examples:
        >>> weights = GlobalModel({"layer.weight": torch.zeros(2, 3)})
        >>> from_bytes(weights.save(), "the same weights").tensors["layer.weight"].shape
        torch.Size([2, 3])
    """

    tensors: Mapping[str, Tensor]
    kept: Kept = field(default_factory=dict)
    factorizer: Factorizer = field(default_factory=Factorizer, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in self.tensors:
            if name.startswith(KEPT):
                raise ModelError(
                    f"The tensor {name!r} of the model has a name that is reserved for factors in "
                    f"weights files. Rename its module so that it does not begin with {KEPT!r}.",
                    code="model.reserved-name",
                    tensor=name,
                )

    def save(self) -> bytes:
        """The safetensors file of this model. Equal weights give equal bytes."""
        # safetensors refuses tensors that are not contiguous.
        flat = {name: value.detach().contiguous() for name, value in self.tensors.items()}
        for key, factors in self.kept.items():
            for name, value in factors.items():
                flat[f"{KEPT}{key}|{name}"] = value.detach().contiguous()
        return save(flat)

    def fingerprint(self) -> str:
        """SHA-256 of the saved model; bundles and updates refer to their global model by it."""
        return hashlib.sha256(self.save()).hexdigest()

    def load_into(self, model: nn.Module) -> None:
        """Copy the tensors into `model`, which must have the same names and shapes."""
        model.load_state_dict(dict(self.tensors))

    def lend_to(self, model: nn.Module) -> None:
        """As `load_into`, but parameters are not copied: they share the memory of these tensors.

        Buffers are copied, because a forward pass may change them.
        """
        parameters = {name for name, _ in model.named_parameters()}
        tensors = {n: v if n in parameters else v.clone() for n, v in self.tensors.items()}
        model.load_state_dict(tensors, assign=True)


def from_model(model: nn.Module) -> GlobalModel:
    """The current weights of `model`, copied.

    Examples:
        >>> from toolkit.models import mnist_dnn
        >>> sorted(from_model(mnist_dnn()).tensors)
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
    """
    return GlobalModel({name: value.detach().clone() for name, value in model.state_dict().items()})


def from_bytes(data: bytes, origin: str) -> GlobalModel:
    """Read the bytes that `GlobalModel.save` wrote.

    Args:
        data: The content of a safetensors file.
        origin: Where it comes from, for messages.

    Raises:
        InputError: If it is not a safetensors file, or holds a number that is not finite.
    """
    try:
        flat = load(data)
    except SafetensorError as error:
        raise InputError(
            f"{origin} is not a safetensors file: {error}.",
            code="file.not-safetensors",
            file=origin,
        ) from None
    tensors: dict[str, Tensor] = {}
    kept: dict[str, dict[str, Tensor]] = {}
    for name, value in flat.items():
        # One such number would spread to the whole model in a round.
        if value.is_floating_point() and not _all_finite(value):
            raise InputError(
                f"{origin}: the tensor {name!r} holds a number that is not finite.",
                code="model.not-finite",
                file=origin,
                tensor=name,
            )
        if name.startswith(KEPT):
            # A tensor name may contain the bar, a key may not.
            key, bar, tensor = name.removeprefix(KEPT).partition("|")
            if not bar:
                raise InputError(
                    f"{origin}: {name!r} is not the name of a kept factor, which is "
                    f"{KEPT}KEY|TENSOR. Write the file again.",
                    code="model.invalid-kept-factor",
                    file=origin,
                    tensor=name,
                )
            kept.setdefault(key, {})[tensor] = value
        else:
            tensors[name] = value
    return GlobalModel(tensors, kept)


def _all_finite(value: Tensor) -> bool:
    """Whether all numbers are finite, without temporaries of the tensor's size."""
    pieces = torch.split(value.reshape(-1), PIECE)
    return all(bool(torch.isfinite(piece).all()) for piece in pieces)


def from_file(path: str | Path) -> GlobalModel:
    """Read a weights file. Raises InputError if it is missing or cannot be read."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    return from_bytes(data, str(path))


def check_fits(weights: GlobalModel, model: nn.Module, origin: str) -> None:
    """Raise InputError if names, shapes or types of `weights` differ from those of `model`."""
    own = model.state_dict()
    for name in own.keys() ^ weights.tensors.keys():
        problem = "lacks the tensor" if name in own else "has the unexpected tensor"
        raise InputError(
            f"{origin} {problem} {name!r}. It belongs to another model; give the weights of this "
            "one.",
            code="model.wrong-weights",
            file=origin,
            tensor=name,
        )
    for name, value in own.items():
        came = weights.tensors[name]
        if came.shape != value.shape:
            raise InputError(
                f"{origin}: {name!r} has the shape {tuple(came.shape)}, but the model has "
                f"{tuple(value.shape)}. It belongs to another model; give the weights of this one.",
                code="model.wrong-weights",
                file=origin,
                tensor=name,
                shape=list(came.shape),
                expected=list(value.shape),
            )
        if came.dtype != value.dtype:
            raise InputError(
                f"{origin}: {name!r} is {came.dtype}, but the model has {value.dtype}. Convert it.",
                code="model.wrong-weights",
                file=origin,
                tensor=name,
                dtype=str(came.dtype),
                expected=str(value.dtype),
            )
