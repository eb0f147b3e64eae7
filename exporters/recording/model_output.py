"""What a model returns: one tensor, or several outputs that a recording packs into one."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import SymInt, Tensor, nn

from device_agent.formats.manifest import Part
from exporters.programs.output_parts import PREFERRED, pack_outputs
from exporters.recording.batch_attributes import set_batch_size


@dataclass(frozen=True)
class OutputForm:
    """The outputs of a model: the returned values that a loss can take.

    Attributes:
        parts: The outputs in the order in which the model returns them. Outputs in dictionaries and
            named tuples are named by their keys and fields, other outputs are numbered from "0". A
            single tensor has the name "".
        left_out: For each other value, by name, the reason why it is not an output.
        in_training: If the model returns further outputs in training mode, the name by which the
            only output is found among them.
    """

    parts: tuple[Part, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    in_training: str = ""

    @property
    def packed(self) -> tuple[Part, ...]:
        """The outputs that are packed into one; empty if there is only one output."""
        return self.parts if len(self.parts) > 1 else ()

    def pack(self, returned: object) -> object:
        """The only output in the value that the model returns, or all of them packed."""
        values = dict(named_values(returned))
        if not self.parts:  # a check of the output says what is wrong
            return returned
        if len(self.parts) == 1:
            return values.get(self.parts[0].name, values.get(self.in_training))
        return pack_outputs([values[part.name] for part in self.parts])


SINGLE = OutputForm(())
"""The form of a model whose outputs are not known."""


def output_form(returned: object, rows: int | SymInt) -> OutputForm:
    """Find the outputs in the value that a model returns for a batch of `rows` samples.

    Examples:
        >>> x = torch.zeros(5, 3)
        >>> form = output_form({"kind": x, "state": torch.zeros(2, 5, 3)}, 5)
        >>> form.parts[0].name, form.left_out
        ('kind', {'state': 'its first axis is not the batch'})
    """
    parts, left_out = [], {}
    for name, value in named_values(returned):
        reason = _unusable(value, rows)
        if reason is not None:
            left_out[name] = reason
        elif isinstance(value, Tensor):
            sizes = [int(size) for size in value.shape[1:] if isinstance(size, int)]
            parts.append(Part(name=name, shape=tuple(sizes)))
    return OutputForm(tuple(parts), left_out)


def named_values(returned: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values in nested dictionaries, tuples and lists, with names such as `boxes.0`.

    The output of a model of `transformers` is only its `logits`, if it has them.
    """
    items: list[tuple[str, object]]
    if isinstance(returned, Mapping):
        # Their other fields are states and caches.
        if type(returned) not in (dict, OrderedDict) and returned.get(PREFERRED) is not None:
            returned = {PREFERRED: returned[PREFERRED]}
        items = [(str(key), value) for key, value in returned.items()]
    elif isinstance(returned, tuple | list):
        names = getattr(returned, "_fields", map(str, range(len(returned))))
        items = list(zip(names, returned, strict=True))
    else:
        yield prefix, returned
        return
    for key, value in items:
        yield from named_values(value, f"{prefix}.{key}" if prefix else key)


def _unusable(value: object, rows: int | SymInt) -> str | None:
    """Why no loss can take `value` as an output; None if a loss can."""
    if not isinstance(value, Tensor):
        return f"it is a {type(value).__name__}"
    if not value.is_floating_point():
        return f"it is {value.dtype}, which has no gradient"
    if not value.dim():  # such as an auxiliary loss; it is the same for all samples
        return None
    if not _same(value.shape[0], rows) or not all(isinstance(n, int) for n in value.shape[1:]):
        return "its first axis is not the batch"
    return None


def _same(size: int | SymInt, rows: int | SymInt) -> bool:
    """Whether two sizes are equal, without a guard on their numbers."""
    if isinstance(size, SymInt) and isinstance(rows, SymInt):
        return bool(size.node.expr == rows.node.expr)
    return isinstance(size, int) and isinstance(rows, int) and size == rows


def return_packed_output(model: nn.Module, only: str | None = None) -> list[OutputForm]:
    """Make `model` take one tensor and return one tensor: its only output, or all outputs packed.

    Call it with a copy. With `only`, the model returns the output of this name alone.

    Returns:
        A list that gets the form of the outputs when the model runs.
    """
    forward = model.forward
    forms: list[OutputForm] = []

    # A module around the model would rename all tensors.
    def packed(x: Tensor) -> Any:
        set_batch_size(model, x.shape[0])
        returned = forward(x)
        form = output_form(returned, x.shape[0])
        if only is not None:
            form = OutputForm(tuple(part for part in form.parts if part.name == only))
        forms.append(form)
        return form.pack(returned)

    model.forward = packed
    return forms
