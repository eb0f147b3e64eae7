"""The outputs of a model: one tensor, or several outputs that a recording packs into one."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor, nn

from device_agent.formats.manifest import Part
from exporters.programs.output_parts import PREFERRED, pack_outputs, part_of
from exporters.recording.batch_attributes import set_batch_size
from exporters.recording.model_checks import PRODUCTS
from profiles.errors import ModelError


@dataclass(frozen=True)
class Rows:
    """The `axis` of an output that has the samples.

    Each sample has `count` places on this axis. None means one place.

    Examples:
        >>> steps_first = torch.arange(6).view(3, 2)
        >>> Rows(1).by_sample(steps_first, 2)
        tensor([[0, 2, 4],
                [1, 3, 5]])
        >>> Rows(0, 3).by_sample(torch.zeros(6, 4), 2).shape  # steps of both samples in one axis
        torch.Size([2, 3, 4])
    """

    axis: int = 0
    count: int | None = None

    def by_sample(self, value: Tensor, rows: int | SymInt) -> Tensor:
        """Return `value` with the batch as its first axis."""
        value = value.movedim(self.axis, 0)
        return value if self.count is None else value.reshape(rows, self.count, *value.shape[1:])

    def as_returned(self, value: Tensor) -> Tensor:
        """The inverse of `by_sample`. The result is contiguous, like the results of models."""
        value = value if self.count is None else value.flatten(0, 1)
        return value.movedim(0, self.axis).contiguous()


FIRST = Rows()
NOT_FIRST = "its first axis is not the batch"
SEVERAL = "several of its axes depend on the number of samples"
NONE = "it is None"
ONE_NUMBER = "it is one number for the whole batch"


@dataclass(frozen=True)
class OutputForm:
    """The outputs of a model: the returned values that a loss can take.

    Attributes:
        parts: The outputs in the order in which the model returns them. Outputs in dictionaries and
            named tuples have their keys and fields as names. Other outputs are numbered from "0". A
            single tensor has the name "".
        left_out: For each returned value that is not an output, by name, the reason.
        in_training: Set if there is one output but the model returns several values in training
            mode: the name of the output among these values.
        in_one_mode: Set if the outputs have keys: the names in `left_out` that the model returns
            only in training or only in inference.
        rows: The axis of the samples, for each output whose first axis is not the batch.
        integers: The type of each output that is not a float. Such an output is packed as float32.
        fixed: The outputs without an axis for the batch. Each is repeated for every sample.
    """

    parts: tuple[Part, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    in_training: str = ""
    in_one_mode: frozenset[str] = frozenset()
    rows: Mapping[str, Rows] = field(default_factory=dict)
    integers: Mapping[str, torch.dtype] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        """Forms are keys of a cache."""
        return hash((self.parts, *self.left_out))

    @property
    def packed(self) -> tuple[Part, ...]:
        """The outputs that are packed into one. Empty if there is only one output."""
        return self.parts if len(self.parts) > 1 else ()

    def pack(self, returned: object, rows: int | SymInt) -> object:
        """Take the only output from the model's result for `rows` samples, or pack all outputs."""
        values = dict(named_values(returned))
        if not self.parts and len(values) < 2:  # a later check of the output names the problem
            return next(iter(values.values()), returned)
        if not self.parts:
            raise ModelError(
                "The model returns nothing that this loss can take: {reasons}.{remedy}",
                code="model.wrong-output",
                reasons="; ".join(f"{name}: {reason}" for name, reason in self.left_out.items()),
                remedy=PRODUCTS
                if SEVERAL in self.left_out.values()
                else " Return tensors (batch, ...) of float32, or give a loss of your own: --loss "
                "module:function.",
            )
        if len(self.parts) == 1:
            name = self.parts[0].name
            return self.by_sample(name, values.get(name, values.get(self.in_training)), rows)
        names = [part.name for part in self.parts]
        return pack_outputs([self.by_sample(name, values[name], rows) for name in names], rows)

    def by_sample(self, name: str, value: Any, rows: int | SymInt) -> Any:
        """The output `name` as float32 with the batch as its first axis."""
        value = value.to(torch.float32) if name in self.integers else value
        if isinstance(value, Tensor) and name in self.fixed:
            return value.expand(rows, *value.shape)
        return self.rows[name].by_sample(value, rows) if name in self.rows else value

    def as_returned(self, packed: Tensor) -> dict[str, Tensor]:
        """The outputs by name, in the shape and type in which the model returns them."""
        if len(self.parts) == 1:
            name = self.parts[0].name
            return {name: self.restored(name, packed)}
        values = {part.name: part_of(packed, part, self.parts) for part in self.parts}
        return {name: self.restored(name, value) for name, value in values.items()}

    def restored(self, name: str, value: Tensor) -> Tensor:
        """The inverse of `by_sample`."""
        if name in self.fixed:
            value = value[0]
        value = self.rows[name].as_returned(value) if name in self.rows else value
        return value.to(self.integers.get(name, value.dtype))


SINGLE = OutputForm(())
"""The form of a model whose outputs are not known."""


def output_form(returned: object, rows: int | SymInt, own_loss: bool = False) -> OutputForm:
    """Find the outputs in the value that a model returns for a batch of `rows` samples.

    An output whose first axis is not the batch is left out. There are two exceptions: if no other
    output has a batch, or if the user's own loss takes everything that the model returns.

    Examples:
        >>> x = torch.zeros(5, 3)
        >>> form = output_form({"kind": x, "state": torch.zeros(2, 5, 3)}, 5)
        >>> form.parts[0].name, form.left_out
        ('kind', {'state': 'its first axis is not the batch'})
        >>> output_form(torch.zeros(2, 5, 3), 5).parts[0].shape
        (2, 3)
    """
    named = list(named_values(returned))
    left_out = {n: r for n, value in named if (r := _unusable(value, rows, own_loss)) is not None}
    usable = {name: value for name, value in named if name not in left_out}
    fixed = {n for n, value in usable.items() if is_fixed(value, rows)}
    places = {n: rows_of(value, rows) or FIRST for n, value in usable.items() if n not in fixed}
    if FIRST in places.values() and not own_loss:
        others = [name for name, place in places.items() if place != FIRST]
        left_out |= dict.fromkeys(others, NOT_FIRST)
        usable = {name: value for name, value in usable.items() if name not in others}
    if not places and not own_loss:  # a number for the whole batch alone predicts nothing
        left_out |= dict.fromkeys(usable, ONE_NUMBER)
        usable = {}
    parts = []
    for name, value in usable.items():
        shape = value.shape if name in fixed else places[name].by_sample(value, rows).shape[1:]
        sizes = [int(size) for size in shape if isinstance(size, int)]
        parts.append(Part(name=name, shape=tuple(sizes)))
    return OutputForm(
        tuple(parts),
        left_out,
        rows={name: place for name, place in places.items() if name in usable and place != FIRST},
        integers={n: v.dtype for n, v in usable.items() if not v.is_floating_point()},
        fixed=frozenset(fixed & usable.keys()),
    )


def named_values(returned: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values in nested dictionaries, tuples and lists, with names such as `boxes.0`.

    If a model of `transformers` returns `logits`, these are its only output.
    """
    items: list[tuple[str, object]]
    if isinstance(returned, Mapping):
        # Their other fields are states and caches.
        if type(returned) not in (dict, OrderedDict) and returned.get(PREFERRED) is not None:
            returned = {PREFERRED: returned[PREFERRED]}
        items = [(str(key), value) for key, value in returned.items()]
    elif is_dataclass(returned) and not isinstance(returned, type):
        items = [(key.name, getattr(returned, key.name)) for key in fields(returned)]
    elif isinstance(returned, tuple | list):
        names = getattr(returned, "_fields", map(str, range(len(returned))))
        items = list(zip(names, returned, strict=True))
    else:
        yield prefix, returned
        return
    for key, value in items:
        yield from named_values(value, f"{prefix}.{key}" if prefix else key)


def _unusable(value: object, rows: int | SymInt, own_loss: bool) -> str | None:
    """Why no loss can take `value` as an output; None if a loss can."""
    if not isinstance(value, Tensor):
        return NONE if value is None else f"it is a {type(value).__name__}"
    if value.is_complex() or not (value.is_floating_point() or own_loss):
        return f"it is {value.dtype}, which has no gradient"
    # A number without axes, such as an auxiliary loss, is the same for all samples.
    if not value.dim() or rows_of(value, rows) is not None:
        return None
    if own_loss and is_fixed(value, rows):
        return None
    return SEVERAL if sum(_count(size, rows) > 0 for size in value.shape) > 1 else NOT_FIRST


def is_fixed(value: Tensor, rows: int | SymInt) -> bool:
    """Whether no axis of `value` depends on the number of samples."""
    return not any(isinstance(size, SymInt) or _count(size, rows) for size in value.shape)


def rows_of(value: Tensor, rows: int | SymInt) -> Rows | None:
    """The axis of a batch of `rows` samples in `value`. None unless exactly one axis fits."""
    if _count(value.shape[0], rows) == 1 and all(isinstance(n, int) for n in value.shape[1:]):
        return FIRST
    found = [axis for axis, size in enumerate(value.shape) if _count(size, rows)]
    others = [size for axis, size in enumerate(value.shape) if axis not in found]
    if len(found) != 1 or not all(isinstance(size, int) for size in others):
        return None
    count = _count(value.shape[found[0]], rows)
    return Rows(found[0], None if count == 1 else count)


def _count(size: int | SymInt, rows: int | SymInt) -> int:
    """The quotient `size` / `rows`, without a guard on the numbers; 0 if it is not whole."""
    if isinstance(size, SymInt) and isinstance(rows, SymInt):
        count = size.node.expr / rows.node.expr
        return int(count) if count.is_Integer else 0
    if isinstance(size, int) and isinstance(rows, int):
        return size // rows if size % rows == 0 else 0
    return 0


def names_in_both(first: OutputForm, second: OutputForm) -> tuple[str, ...]:
    """The outputs with keys that have the same shape in both forms. Empty if all are numbered."""
    return tuple(
        part.name for part in first.parts if part in second.parts and not part.name[:1].isdigit()
    )


def return_packed_output(
    model: nn.Module, only: Collection[str] | None = None, own_loss: bool = False
) -> list[OutputForm]:
    """Make `model` return one tensor for one tensor: its only output, or all outputs packed.

    Call this with a copy of the model. If `only` is given, the model returns only the outputs with
    these names. `output_form` describes `own_loss`.

    Returns:
        A list that gets the form of the outputs when the model runs.
    """
    forward = model.forward
    forms: list[OutputForm] = []

    # A module around the model would rename all tensors.
    def packed(x: Tensor) -> Any:
        set_batch_size(model, x.shape[0])
        returned = forward(x)
        form = output_form(returned, x.shape[0], own_loss)
        if only is not None:
            form = replace(form, parts=tuple(p for p in form.parts if p.name in only), left_out={})
        forms.append(form)
        return form.pack(returned, x.shape[0])

    model.forward = packed
    return forms
