"""Submodel specs: a family, its one main number or name, and options.

full    low-rank:0.25    low-rank:0.25,keep=3    slice:0.42    slice:blocks.3    cp:2.0

A family may work on what another one makes of the layers: slice:0.42+low-rank:0.25.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from profiles.errors import SpecError


@dataclass(frozen=True)
class Spec:
    """A parsed spec; `size` is the text behind the colon, None where there is none.

    `inner` is the spec behind the plus sign: what is done to the layers of this submodel.
    """

    family: str
    size: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    inner: "Spec | None" = None

    @property
    def head(self) -> str:
        """Family and size, which fix the shapes of factors: the server keeps these under it."""
        return self.family if self.size is None else f"{self.family}:{self.size}"

    def __str__(self) -> str:
        """The spec as one writes it."""
        own = ",".join([self.head, *(f"{key}={value}" for key, value in self.options.items())])
        return own if self.inner is None else f"{own}+{self.inner}"

    def nested(self) -> Iterator["Spec"]:
        """This spec and those behind its plus signs, in the order written."""
        yield self
        if self.inner is not None:
            yield from self.inner.nested()

    def number(self, what: str, low: float, high: float, example: str) -> float:
        """The main number, called `what`, within (low, high]. Raises SpecError otherwise."""
        if self.size is None:
            raise SpecError(f"{self.family!r} needs a {what}: write it like {example}.")
        value = as_number(self.size)
        if value is None or math.isinf(value) or not low < value <= high:
            bound = f"above {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
            raise SpecError(f"{str(self)!r}: the {what} must be a number {bound}, like {example}.")
        return value

    def option(self, name: str, default: float, low: float = 0.0) -> float:
        """The option `name` as a number of at least `low`. Raises SpecError otherwise."""
        if name not in self.options:
            return default
        value = as_number(self.options[name])
        if value is None or value < low or math.isinf(value):
            raise SpecError(f"{str(self)!r}: {name} must be a number of at least {low:g}.")
        return value

    def whole(self, name: str, default: int, low: int = 0) -> int:
        """The option `name` as a whole number of at least `low`. Raises SpecError otherwise."""
        value = self.option(name, default, low)
        if value != int(value):
            raise SpecError(f"{str(self)!r}: {name} must be a whole number.")
        return int(value)

    def check_options(self, *known: str) -> None:
        """Raise SpecError for options other than `known`."""
        for name in self.options:
            if name not in known:
                choice = f"it knows {', '.join(known)}" if known else "it has none"
                raise SpecError(f"{str(self)!r}: {self.family} has no option {name!r}; {choice}.")

    def check_no_inner(self) -> None:
        """Raise SpecError where another family is to work on this one's layers."""
        if self.inner is not None:
            raise SpecError(
                f"{str(self)!r}: {self.family} takes no second family; a slice takes low-rank, "
                "like slice:0.42+low-rank:0.25."
            )

    def check_no_size(self) -> None:
        """Raise SpecError where a size was given to a family that has only one."""
        if self.size is not None:
            raise SpecError(f"{str(self)!r}: {self.family} takes no number, write {self.family!r}.")


def as_number(text: str) -> float | None:
    """`text` as a finite or infinite number, None where it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def parse_spec(text: str) -> Spec:
    """Read a spec; its family may not exist. Raises SpecError where it is malformed."""
    outer, plus, inner = text.strip().partition("+")
    if plus and not inner:
        raise SpecError(f"{text!r}: nothing follows the plus sign, like low-rank:0.25 would.")
    spec = parse_single(outer, text)
    return replace(spec, inner=parse_spec(inner)) if plus else spec


def parse_single(part: str, text: str) -> Spec:
    """Read `part` of the spec `text`, one family's."""
    head, *rest = part.split(",")
    family, colon, size = head.partition(":")
    options: dict[str, str] = {}
    for option in rest:
        name, equals, value = option.partition("=")
        if not (name and equals and value) or name in options:
            raise SpecError(
                f"{text!r}: {option!r} is no option; options are written name=value, once."
            )
        options[name] = value
    if not family or (colon and not size):
        raise SpecError(
            f"{text!r} is no submodel spec; write it like full, low-rank:0.25 or slice:0.42."
        )
    return Spec(family, size or None, options)
