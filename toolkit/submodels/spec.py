"""Submodel specs: a family, its size (a number or a name) and options.

full    low-rank:0.25    low-rank:0.25,keep=3    slice:0.42    slice:blocks.3    cp:2.0

A plus sign combines two families: slice:0.42+low-rank:0.25 factorizes the layers of a slice.
Spaces around the signs are allowed.

This module only reads the text. `spec_form.py` checks whether the family accepts a spec. Neither
module imports torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from profiles.errors import SpecError


@dataclass(frozen=True)
class Spec:
    """A parsed spec.

    Attributes:
        family: Name of the family, for example `low-rank`.
        size: The text after the colon, or None if there is none.
        options: The options after the commas, as text.
        inner: The spec after the plus sign, which is applied to the layers of this submodel.
    """

    family: str
    size: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    inner: "Spec | None" = None

    @property
    def head(self) -> str:
        """Family and size as text, for example `cp:2.0`.

        Family and size determine the shapes of factors. So this text is the key of kept factors.
        """
        return self.family if self.size is None else f"{self.family}:{self.size}"

    def __str__(self) -> str:
        """The spec as a user writes it."""
        own = ",".join([self.head, *(f"{key}={value}" for key, value in self.options.items())])
        return own if self.inner is None else f"{own}+{self.inner}"

    def nested(self) -> Iterator["Spec"]:
        """This spec and the specs after its plus signs, in the order written."""
        yield self
        if self.inner is not None:
            yield from self.inner.nested()


def as_number(text: str) -> float | None:
    """The finite or infinite number in `text`, or None if it is not a number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def parse_spec(text: str) -> Spec:
    """Read a spec. Does not check that its family exists; `families.check_spec` does.

    Args:
        text: The spec, for example `low-rank:0.25,keep=3`.

    Returns:
        The parsed spec. Its `str` is `text` without spaces around the signs.

    Raises:
        SpecError: If the text is malformed.
    """
    outer, plus, inner = text.partition("+")
    if plus and not inner.strip():
        raise SpecError(
            "Invalid spec {spec!r}: write a second family after the plus sign, for example "
            "low-rank:0.25.",
            code="spec.malformed",
            spec=text,
        )
    spec = _parse_single(outer, text)
    return replace(spec, inner=parse_spec(inner)) if plus else spec


def _parse_single(part: str, text: str) -> Spec:
    """Read `part` of the spec `text`, the part of one family."""
    head, *rest = (word.strip() for word in part.split(","))
    family, colon, size = (word.strip() for word in head.partition(":"))
    options: dict[str, str] = {}
    for before, option in zip([head, *rest], rest, strict=False):
        if before[-1:].isdigit() and option.isdigit():
            raise SpecError(
                "Invalid number '{before},{option}' in {spec!r}: write decimals with a point, "
                "'{before}.{option}'.",
                code="spec.decimal-comma",
                spec=text,
                suggested=f"{before}.{option}",
                before=before,
                option=option,
            )
        name, equals, value = (word.strip() for word in option.partition("="))
        if not (name and equals and value) or name in options:
            raise SpecError(
                "Invalid option {option!r} in {spec!r}: write each option once, as name=value.",
                code="spec.malformed",
                spec=text,
                option=option,
            )
        options[name] = value
    if not family or (colon and not size):
        raise SpecError(
            "Invalid spec {spec!r}: write for example full, low-rank:0.25 or slice:0.42.",
            code="spec.malformed",
            spec=text,
        )
    return Spec(family, size or None, options)
