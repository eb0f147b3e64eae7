"""The text that names a loss, such as `cross-entropy,smoothing=0.1`, and its canonical form.

| text | loss |
|---|---|
| `NAME` or `NAME,OPTION=VALUE` | a built-in loss of one output |
| `OUTPUT=NAME,weight=W + OUTPUT=NAME` | a weighted sum of the losses of named outputs |
| `module:function` | the user's own loss |
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiles.errors import InputError
from profiles.text_formatting import did_you_mean

OWN = ":"
"""The sign between module and function of an own loss."""
WEIGHT = "weight"
"""The option that every built-in loss takes in a sum of losses."""
SUM = re.compile(r"(?<![0-9.][eE])\+")
"""The plus sign between two losses of a sum. The plus sign of an exponent, such as 1e+2, does not
match."""
Value = float | tuple[float, ...]


@dataclass(frozen=True)
class Option:
    """An option of a loss.

    Attributes:
        fits: Whether a number is allowed.
        allowed: The allowed numbers in words.
        default: The number if the option is left out. None if the loss needs no number in this
            case.
        several: Whether the option has one number for each class.
    """

    fits: Callable[[float], bool]
    allowed: str
    default: Value | None = None
    several: bool = False


def _positive(number: float) -> bool:
    return number > 0


OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "cross-entropy": {
        "smoothing": Option(lambda s: 0 <= s < 1, "at least 0 and below 1", 0.0),
        "weights": Option(
            lambda w: w >= 0,
            "numbers of at least 0 with / between them, not all 0",
            (),
            several=True,
        ),
    },
    "binary-cross-entropy": {},
    "ctc": {},
    "mse": {},
    "mae": {},
    "huber": {"delta": Option(_positive, "above 0", 1.0)},
    "dice": {},
    "cosine": {},
    "contrastive": {"temperature": Option(_positive, "above 0", 0.1)},
}
"""The built-in losses by name, with their options."""
NUMBERS = ("mse", "mae", "huber", "cosine")
"""Losses whose labels are float32 numbers."""


@dataclass(frozen=True)
class BuiltIn:
    """A built-in loss. `options` has, by name, all options that differ from the defaults."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

    def option(self, name: str) -> Any:
        """The value of the option `name`, or the default of this option."""
        return dict(self.options).get(name, OPTIONS[self.name][name].default)

    @property
    def numbers(self) -> bool:
        """Whether the labels are float32 numbers; otherwise they are classes."""
        return self.name in NUMBERS

    def __str__(self) -> str:
        return ",".join((self.name, *(f"{key}={_shown(value)}" for key, value in self.options)))


@dataclass(frozen=True)
class Head:
    """The loss of one of several outputs, and the weight of this loss in the sum."""

    output: str
    loss: BuiltIn
    weight: float = 1.0

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f",{WEIGHT}={_number(self.weight)}"
        return f"{self.output}={self.loss}{weight}"


@dataclass(frozen=True)
class Own:
    """The user's own loss, by its reference `module:function`."""

    reference: str

    def __str__(self) -> str:
        return self.reference


ParsedLoss = BuiltIn | tuple[Head, ...] | Own


def is_own(loss: str) -> bool:
    """Whether `loss` is the user's own function. Raises the InputError of `canonical`."""
    return isinstance(parse(loss), Own)


def canonical(loss: str | Sequence[Mapping[str, Any]]) -> str:
    """Convert a loss (a text, or the list in a federation's file) to its canonical text.

    Raises:
        InputError: There is no such loss, or an option is wrong.

    Examples:
        >>> canonical("age = mse, weight=0.10 + kind=cross-entropy,smoothing=0")
        'age=mse,weight=0.1 + kind=cross-entropy'
        >>> canonical([{"output": "age", "loss": "mse", "weight": 0.1}])
        'age=mse,weight=0.1'
    """
    parsed = parse(loss if isinstance(loss, str) else _text_of(loss))
    return " + ".join(map(str, parsed)) if isinstance(parsed, tuple) else str(parsed)


def parse(text: str) -> ParsedLoss:
    """Read the text of a loss. Raises the InputError of `canonical`."""
    stripped = text.strip()
    if OWN in stripped and "=" not in stripped:
        return Own(stripped)
    terms = [[word.strip() for word in term.split(",")] for term in SUM.split(stripped)]
    if "=" not in terms[0][0]:
        if len(terms) > 1:
            raise _invalid(text, _unnamed_output(terms[0][0]))
        return _built_in(text, terms[0])
    heads = [_head(text, words) for words in terms]
    outputs = [head.output for head in heads]
    if twice := [name for name in outputs if outputs.count(name) > 1]:
        raise _invalid(text, f"it has two losses for the output {twice[0]!r}")
    return tuple(heads)


def takes_numbers(loss: str) -> bool:
    """Whether the labels of a loss are one array of float32 numbers."""
    parsed = parse(loss)
    if isinstance(parsed, tuple) and len(parsed) == 1:
        parsed = parsed[0].loss
    return isinstance(parsed, BuiltIn) and parsed.numbers


def mixes_samples(loss: str) -> str | None:
    """Name a part of a loss that depends on other samples of the batch; None if there is none.

    A class weight depends on the classes of the other samples in the batch. The code of the user's
    own loss is not examined.

    Examples:
        >>> mixes_samples("contrastive"), mixes_samples("mse")
        ('contrastive', None)
    """
    parsed = parse(loss)
    heads = parsed if isinstance(parsed, tuple) else (parsed,)
    for one in (head.loss if isinstance(head, Head) else head for head in heads):
        if isinstance(one, BuiltIn) and one.name == "contrastive":
            return one.name
        if isinstance(one, BuiltIn) and one.name == "cross-entropy" and one.option("weights"):
            return "cross-entropy with `weights`"
    return None


def _unnamed_output(loss: str) -> str:
    return f"the loss {loss!r} in a sum does not name its output: write OUTPUT=LOSS"


def _head(text: str, words: Sequence[str]) -> Head:
    output, equals, name = (word.strip() for word in words[0].partition("="))
    if not (equals and output):
        raise _invalid(text, _unnamed_output(words[0]))
    if OWN in name:
        raise _invalid(
            text, "a loss of your own takes all outputs at once: write one function for all outputs"
        )
    others = [word for word in words[1:] if word.partition("=")[0].strip() != WEIGHT]
    weights = [word.partition("=")[2] for word in words[1:] if word not in others]
    weight = 1.0
    if len(weights) > 1:
        raise _given_twice(text, WEIGHT)
    if weights:
        option = Option(_positive, "above 0")
        weight = _value(text, WEIGHT, weights[0], option)
    return Head(output, _built_in(text, [name, *others]), weight)


def _built_in(text: str, words: Sequence[str]) -> BuiltIn:
    name, options = words[0], OPTIONS.get(words[0])
    given = dict[str, Value]()
    if options is None:
        known = ", ".join(OPTIONS)
        raise _invalid(
            text,
            f"there is no loss {name!r}{did_you_mean(name, OPTIONS)} The losses are {known}, or "
            "module:function for a loss of your own",
        )
    for word in words[1:]:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if key not in options or not equals:
            takes = " and ".join((*options, f"in a sum of losses {WEIGHT}"))
            raise _invalid(text, f"{name} has no option {word!r}; it takes {takes}")
        if key in given:
            raise _given_twice(text, key)
        given[key] = _value(text, key, value, options[key])
    differing = {key: value for key, value in given.items() if value != options[key].default}
    return BuiltIn(name, tuple((key, differing[key]) for key in options if key in differing))


def _value(text: str, key: str, value: str, option: Option) -> Any:
    try:
        numbers = tuple(float(number) for number in value.split("/"))
    except ValueError:
        numbers = ()
    fits = all(math.isfinite(number) and option.fits(number) for number in numbers)
    fits &= not option.several or any(numbers)
    if not numbers or not fits or (len(numbers) > 1) != option.several:
        raise _invalid(text, f"{key} must be {option.allowed}, not {value!r}")
    return numbers if option.several else numbers[0]


def _text_of(heads: Sequence[Mapping[str, Any]]) -> str:
    """The text for a list of tables `{output, loss, weight}`. Raises InputError."""
    terms = []
    for head in heads:
        if not isinstance(head, Mapping) or not {"output", "loss"} <= set(head):
            raise _invalid(str(head), "each table needs the keys `output` and `loss`")
        if other := set(head) - {"output", "loss", WEIGHT}:
            raise _invalid(
                str(dict(head)),
                f"unknown key {min(other)!r}; a table has only `output`, `loss` and `weight`",
            )
        weight = f",{WEIGHT}={head[WEIGHT]}" if WEIGHT in head else ""
        terms.append(f"{head['output']}={head['loss']}{weight}")
    return " + ".join(terms)


def _given_twice(text: str, key: str) -> InputError:
    return _invalid(text, f"the option {key!r} is given twice")


def _invalid(text: str, problem: str) -> InputError:
    return InputError(
        "loss is {value!r}, but {problem}.",
        code="option.invalid-value",
        option="loss",
        value=text,
        problem=problem,
    )


def _shown(value: Value) -> str:
    return "/".join(map(_number, value)) if isinstance(value, tuple) else _number(value)


def _number(value: float) -> str:
    """The shortest text from which Python reads exactly `value`."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
