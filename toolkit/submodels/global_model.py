"""The weights of the global model, in memory and as one safetensors file.

The file may also have factors that a family keeps from round to round (`cp`). An average of factors
is only meaningful if each round starts from the factors of the last round. The file may also have
the moments of a server optimizer.

A tensor with several names, such as the weight of tied layers, is one tensor here, under its first
name. The file has it under all names, as `load_state_dict` expects. The file's metadata map each
other name to the first name.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from exporters.recording.shared_tensors import first_names
from exporters.recording.trainable_forms import in_form_of
from profiles.errors import InputError, ModelError
from toolkit.factorization.factorizer import Factorizer
from toolkit.submodels.model_reference import unreadable

KEPT, MOMENT = "kept|", "moment|"
SHARED = "edgetailor.shared"
"""The metadata under this key map each other name of a tensor to its first name, as JSON."""
PIECE = 1 << 20
"""How many numbers are checked at a time."""

Kept = Mapping[str, Mapping[str, Tensor]]
"""Factors by family and size (for example `cp:2.0`), then by their names in the bundle."""
Moments = Mapping[str, Mapping[str, Tensor]]
"""Moments of a server optimizer, by optimizer and moment (`fedadam.first`), then by tensor."""


@dataclass(frozen=True)
class GlobalModel:
    """All tensors of the global model, and the factors that families keep.

    A round starts from a global model and ends with a new one. Make the first global model from
    `model.state_dict()`. With `load_into`, copy the last one back into the PyTorch model.

    Attributes:
        tensors: Parameters and buffers, by their first names in the PyTorch model. You may give a
            state dict that has a tensor under several names.
        kept: Factors that families keep from round to round.
        factorizer: Computes and caches factors for all submodels. It is not saved.
        shared: Maps each other name of a tensor to its first name.
        moments: The moments that a server optimizer keeps from round to round.

    Raises:
        ModelError: If a tensor has a name that the file reserves for kept factors or moments.

    Examples:
        >>> weights = GlobalModel({"layer.weight": torch.zeros(2, 3)})
        >>> from_bytes(weights.save(), "the same weights").tensors["layer.weight"].shape
        torch.Size([2, 3])
    """

    tensors: Mapping[str, Tensor]
    kept: Kept = field(default_factory=dict)
    factorizer: Factorizer = field(default_factory=Factorizer, compare=False, repr=False)
    shared: Mapping[str, str] = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = first_names(self.tensors)
        others = {name: kept_name for name, kept_name in first.items() if name != kept_name}
        tensors = {name: self.tensors[name] for name in first if name not in others}
        # The class is frozen, so set attributes through `object`.
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "shared", {**self.shared, **others})
        for name in self.tensors:
            if name.startswith((KEPT, MOMENT)):
                raise ModelError(
                    "The tensor {tensor!r} of the model has a name that is reserved in weights "
                    "files. Rename the module so that the name does not begin with {prefix!r}.",
                    code="model.reserved-name",
                    tensor=name,
                    prefix=name.partition("|")[0] + "|",
                )

    def save(self) -> bytes:
        """The safetensors file of this model. Equal weights give equal bytes."""
        # safetensors refuses tensors that are not contiguous or share memory.
        flat = {name: value.detach().contiguous() for name, value in self.tensors.items()}
        flat |= {name: flat[first].clone() for name, first in self.shared.items()}
        for prefix, groups in ((KEPT, self.kept), (MOMENT, self.moments)):
            for key, group in groups.items():
                for name, value in group.items():
                    flat[f"{prefix}{key}|{name}"] = value.detach().contiguous()
        # Write one entry: the order of several would differ from file to file.
        names = {SHARED: json.dumps(self.shared, sort_keys=True)} if self.shared else None
        return save(flat, names)

    def fingerprint(self) -> str:
        """SHA-256 of the saved model. Bundles and updates name their global model by this hash."""
        return hashlib.sha256(self.save()).hexdigest()

    def load_into(self, model: nn.Module) -> None:
        """Copy the tensors into `model`. PyTorch raises RuntimeError if names or shapes differ."""
        own = model.state_dict()
        state = {n: in_form_of(own.get(n, v), v) for n, v in self.state_dict().items()}
        model.load_state_dict(state)

    def lend_to(self, model: nn.Module) -> None:
        """Like `load_into`, but parameters are not copied: they share memory with these tensors.

        Buffers are copied, because a forward pass may change them.
        """
        for name, parameter in model.named_parameters():
            # The parameter stays the same object, which the model may keep in a list, too.
            parameter.data = self.tensors[name].detach()
        model.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors under all their names, as `load_state_dict` of the PyTorch model expects."""
        return self._under_all_names(self.tensors)

    def _under_all_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, **{name: tensors[first] for name, first in self.shared.items()}}


def from_model(model: nn.Module) -> GlobalModel:
    """Copy the current weights of `model` into a global model.

    Examples:
        >>> from toolkit.models import mnist_dnn
        >>> sorted(from_model(mnist_dnn()).tensors)
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
    """
    own = GlobalModel(model.state_dict())
    copies = {name: value.detach().clone() for name, value in own.tensors.items()}
    return replace(own, tensors=copies)


def from_bytes(data: bytes, origin: str) -> GlobalModel:
    """Read the bytes that `GlobalModel.save` wrote.

    Args:
        data: The content of a safetensors file.
        origin: Where the data come from, for messages.

    Raises:
        InputError: If `data` is not a safetensors file, has a number that is not finite, or has
            different values under two names of one tensor.
    """
    try:
        flat = load(data)
    except SafetensorError as error:
        raise InputError(
            "{file} is not a safetensors file: {reason}.",
            code="file.not-safetensors",
            file=origin,
            reason=str(error),
        ) from None
    tensors: dict[str, Tensor] = {}
    groups: dict[str, dict[str, dict[str, Tensor]]] = {KEPT: {}, MOMENT: {}}
    for name, value in flat.items():
        # A single such number would spread to the whole model in a round.
        if value.is_floating_point() and not _all_finite(value):
            raise InputError(
                "{file}: the tensor {tensor!r} contains a number that is not finite.",
                code="model.not-finite",
                file=origin,
                tensor=name,
            )
        prefix = next((own for own in groups if name.startswith(own)), None)
        if prefix is not None:
            # A tensor name may contain the bar, but a key may not.
            key, bar, tensor = name.removeprefix(prefix).partition("|")
            if not bar:
                raise InputError(
                    "{file}: {tensor!r} is not a valid tensor name. The name of a kept factor or "
                    "moment has the form {prefix}KEY|TENSOR. Write the file again.",
                    code="model.invalid-kept-factor",
                    file=origin,
                    tensor=name,
                    prefix=prefix,
                )
            groups[prefix].setdefault(key, {})[tensor] = value
        else:
            tensors[name] = value
    shared = _shared_names(data, origin)
    first = _first_only(tensors, shared, origin)
    return GlobalModel(first, groups[KEPT], shared=shared, moments=groups[MOMENT])


def _shared_names(data: bytes, origin: str) -> dict[str, str]:
    """Read `GlobalModel.shared` from a safetensors file. Its header is its length, then JSON.

    Raises InputError if the metadata do not have the form that `GlobalModel.save` writes.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = header.get("__metadata__", {}).get(SHARED, "{}")
    try:
        names = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError:
        names = None
    if names is None or not header.keys() >= {*names, *names.values()}:
        raise InputError(
            "{file}: the metadata {key!r} do not name tensors of the file. Write the file again.",
            code="model.invalid-shared-names",
            file=origin,
            key=SHARED,
        )
    return names


def _first_only(
    tensors: Mapping[str, Tensor], first: Mapping[str, str], origin: str
) -> dict[str, Tensor]:
    """The tensors under their first names. `first` maps each other name to the first name.

    Raises InputError if two names of one tensor have different values.
    """
    unique = {name: value for name, value in tensors.items() if first.get(name, name) == name}
    for name, value in tensors.items():
        own = first.get(name, name)
        if own in unique and not torch.equal(unique[own], value):
            raise InputError(
                "{file}: {kept!r} and {name!r} are two names of one tensor, but their values "
                "differ. Give the weights of this model, with equal values under both names.",
                code="model.unequal-names",
                file=origin,
                tensors=[own, name],
                kept=own,
                name=name,
            )
        unique.setdefault(own, value)
    return unique


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


def fitted(weights: GlobalModel, model: nn.Module, origin: str) -> GlobalModel:
    """Check that `weights` from a file fit `model`. Return them under the names that `model` uses.

    If a tensor has several names in `model`, the file may have it under one or all of them.

    Raises:
        InputError: If names, shapes or types differ from those of `model`, or if a tensor has
            different values under two names.
    """
    own = model.state_dict()
    first = first_names(own)
    read = {n: in_form_of(own.get(n, v), v) for n, v in weights.state_dict().items()}
    tensors = _first_only(read, first, origin)
    for name in tensors.keys() ^ set(first.values()):
        problem = "lacks the tensor" if name in own else "has the unexpected tensor"
        raise InputError(
            "{file} {problem} {tensor!r}. The file is of another model: give the weights of this "
            "model.",
            code="model.wrong-weights",
            file=origin,
            tensor=name,
            problem=problem,
        )
    for name, given in tensors.items():
        value = own[name]
        if given.shape != value.shape:
            raise InputError(
                "{file}: {tensor!r} has the shape {shape}, but the model has {expected}. The "
                "file is of another model: give the weights of this model.",
                code="model.wrong-weights",
                file=origin,
                tensor=name,
                shape=tuple(given.shape),
                expected=tuple(value.shape),
            )
        if given.dtype != value.dtype:
            raise InputError(
                "{file}: {tensor!r} is {dtype}, but the model has {expected}. Convert the tensor.",
                code="model.wrong-weights",
                file=origin,
                tensor=name,
                dtype=str(given.dtype),
                expected=str(value.dtype),
            )
    others = {name: kept_name for name, kept_name in first.items() if name != kept_name}
    return replace(weights, tensors=tensors, shared=others)
