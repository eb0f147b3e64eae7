"""The form of a family's specs: which size, options and second family it accepts.

Nothing here imports torch. So a command can refuse a typo before it loads a model.
"""

import math
from dataclasses import dataclass

from profiles.errors import SpecError
from profiles.text_formatting import did_you_mean
from toolkit.submodels.spec import Spec, as_number


@dataclass(frozen=True)
class Number:
    """A size that is a number above 0 and at most `highest`.

    Attributes:
        meaning: The meaning of the number, for example `rank ratio`.
        example: A whole spec with such a size.
        highest: The largest number allowed, inclusive.
    """

    meaning: str
    example: str
    highest: float = math.inf

    def read(self, spec: Spec) -> float:
        """The number in `spec`. Raises SpecError if it is missing or out of range."""
        if spec.size is None:
            raise _missing_size(spec, self.meaning, self.example)
        value = as_number(spec.size)
        if value is None or math.isinf(value) or not 0 < value <= self.highest:
            bound = "above 0" + (
                "" if math.isinf(self.highest) else f" and at most {self.highest:g}"
            )
            raise SpecError(
                "Invalid size in {spec!r}: the {meaning} must be a number {bound}, for example "
                "{example}.",
                code="spec.invalid-size",
                spec=str(spec),
                size=spec.size,
                meaning=self.meaning,
                bound=bound,
                example=self.example,
            )
        return value


@dataclass(frozen=True)
class Text:
    """A size whose meaning depends on the model, for example the name of a module."""

    meaning: str
    example: str

    def read(self, spec: Spec) -> str:
        """The text in `spec`. Raises SpecError if it is missing."""
        if spec.size is None:
            raise _missing_size(spec, self.meaning, self.example)
        return spec.size


@dataclass(frozen=True)
class Option:
    """An option with a number of at least `lowest`. With `whole`, it must be a whole number."""

    name: str
    lowest: int = 0
    whole: bool = False

    def read(self, spec: Spec) -> float:
        """The value of the option in `spec`. Raises SpecError if it is not such a number."""
        text = spec.options[self.name]
        value = as_number(text)
        usable = value is not None and self.lowest <= value < math.inf
        if value is None or not usable or (self.whole and value != int(value)):
            kind = "whole number" if self.whole else "number"
            raise SpecError(
                "Invalid option in {spec!r}: {option} must be a {kind} of at least {lowest}.",
                code="spec.invalid-option",
                spec=str(spec),
                option=self.name,
                value=text,
                kind=kind,
                lowest=self.lowest,
            )
        return value


@dataclass(frozen=True)
class Choice:
    """An option whose value is one of a few words.

    Attributes:
        name: The name of the option.
        words: The allowed words. The first word is the default.
    """

    name: str
    words: tuple[str, ...]

    def read(self, spec: Spec) -> str:
        """The word in `spec`. Raises SpecError if it is not in `words`."""
        word = spec.options[self.name]
        if word not in self.words:
            raise SpecError(
                "Invalid option in {spec!r}: {option} must be one of {words}.",
                code="spec.invalid-option",
                spec=str(spec),
                option=self.name,
                value=word,
                words=list(self.words),
            )
        return word


RECOMPUTE = Choice("recompute", ("some", "yes", "no"))
COMMON = (RECOMPUTE,)
"""Options of every family. They change how a device trains a submodel, not the submodel itself."""


@dataclass(frozen=True)
class SpecForm:
    """The specs that one family accepts.

    Attributes:
        family: Name of the family.
        usage: How to write its spec, for help texts.
        summary: One line about the family and its options, for help texts.
        size: The form of the text after the colon, or None if the family takes no size.
        options: The options that only this family accepts. All families also accept the options in
            COMMON.
        selects_layers: Whether a second family may follow after a plus sign. That family then
            exchanges the layers that this family selects.
        exchanges_layers: Whether the family can be such a second family.
    """

    family: str
    usage: str
    summary: str
    size: Number | Text | None = None
    options: tuple[Option | Choice, ...] = ()
    selects_layers: bool = False
    exchanges_layers: bool = False

    def check(self, spec: Spec) -> None:
        """Raise SpecError if `spec` has a wrong size or option. Ignores the inner spec."""
        if self.size is not None:
            self.size.read(spec)
        elif spec.size is not None:
            raise SpecError(
                "Invalid spec {spec!r}: {family} takes no size. Write {family!r}.",
                code="spec.unexpected-size",
                spec=str(spec),
                size=spec.size,
                family=self.family,
            )
        for name in spec.options:
            self._option(name, spec).read(spec)

    def size_as_number(self, spec: Spec) -> float:
        """The size of `spec`, for a form whose size is a number. Raises SpecError like `check`."""
        assert isinstance(self.size, Number), f"{self.family} has no number for a size"
        return self.size.read(spec)

    def number(self, spec: Spec, name: str, default: float) -> float:
        """The option `name` of `spec`, or `default`. Raises SpecError if it is out of range."""
        option = self._option(name, spec)
        assert isinstance(option, Option), f"{name} is not a number"
        return option.read(spec) if name in spec.options else default

    def choice(self, spec: Spec, name: str) -> str:
        """The word of the option `name`, or its default. Raises SpecError if it is not allowed."""
        option = self._option(name, spec)
        assert isinstance(option, Choice), f"{name} is no choice of words"
        return option.read(spec) if name in spec.options else option.words[0]

    def whole_number(self, spec: Spec, name: str, default: int) -> int:
        """Like `number`, for an option that is a whole number."""
        return int(self.number(spec, name, default))

    def _option(self, name: str, spec: Spec) -> Option | Choice:
        known = {option.name: option for option in (*self.options, *COMMON)}
        if name not in known:
            raise SpecError(
                "Unknown option {option!r} of {family} in {spec!r}{did_you_mean} Use one of "
                "{known}.",
                code="spec.unknown-option",
                spec=str(spec),
                family=self.family,
                option=name,
                did_you_mean=did_you_mean(name, known),
                known=", ".join(known),
            )
        return known[name]


def recomputed(spec: Spec) -> str:
    """The value of `recompute` in `spec` or in the spec after the plus sign; else the default."""
    said = [own.options.get(RECOMPUTE.name) for own in spec.nested()]
    return next((word for word in said if word is not None), RECOMPUTE.words[0])


def _missing_size(spec: Spec, meaning: str, example: str) -> SpecError:
    return SpecError(
        "Missing size in {spec!r}: write the {meaning}, for example {example}.",
        code="spec.missing-size",
        spec=str(spec),
        family=spec.family,
        meaning=meaning,
        example=example,
    )
