"""The grid of a sweep: which values a sweep tries for which keys of the federation's file.

A grid maps keys such as `training.learning_rate` or `devices.board.submodel` to lists of values.
Each combination of these values is a run.
"""

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from profiles.errors import InputError
from toolkit.toml_files import Values

Grid = Mapping[str, Sequence[object]]
SEPARATOR = "|"
"""Separates the values of an option: submodels and losses contain commas."""
SEEDS = ("seed", "simulation.seed")
LONGEST = 150
"""The most characters of a folder's name. File systems allow 255 bytes."""


def grid_of_options(texts: Sequence[str]) -> dict[str, list[object]]:
    """The grid in options such as `training.learning_rate=0.05|0.1`.

    A value is read as TOML. If it is not TOML, it is a text without quotes.

    Raises InputError if an option has no key or no value, or if a key comes twice.

    Examples:
        >>> grid_of_options(["devices.board.submodel=full|width:0.5,window=rolling", "quorum=3"])
        {'devices.board.submodel': ['full', 'width:0.5,window=rolling'], 'quorum': [3]}
    """
    grid: dict[str, list[object]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key, parts = key.strip(), [part.strip() for part in values.split(SEPARATOR)]
        if not key or not all(parts) or key in grid:
            raise InputError(
                "Invalid grid {text!r}: write a key and all its values, separated by |, for "
                "example training.learning_rate=0.05|0.1. Give each key once.",
                code="simulation.bad-grid",
                text=text,
            )
        grid[key] = _distinct([_value(part) for part in parts])
    return grid


def combinations(grid: Grid) -> list[dict[str, object]]:
    """The values of each run. The values of the last key change first.

    Examples:
        >>> combinations({"rounds": [1, 2], "quorum": [3]})
        [{'rounds': 1, 'quorum': 3}, {'rounds': 2, 'quorum': 3}]
    """
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Map each key to its shortest end that no other key has.

    Examples:
        >>> short_keys(["devices.board.submodel", "devices.phone.submodel", "training.epochs"])
        {'devices.board.submodel': 'board.submodel', 'devices.phone.submodel': 'phone.submodel', \
'training.epochs': 'epochs'}
    """

    def ends(key: str) -> list[str]:
        parts = key.split(".")
        return [".".join(parts[place:]) for place in reversed(range(len(parts)))]

    taken = Counter(end for key in keys for end in ends(key))
    return {key: next((end for end in ends(key) if taken[end] == 1), key) for key in keys}


def folder_names(runs: Sequence[Values]) -> list[str]:
    """A name for the folder of each run, made of its values.

    A run has the same name in each sweep with the same keys. So a larger grid reuses finished runs.

    Examples:
        >>> folder_names([{"training.epochs": 1, "devices.board.submodel": "slice:0.3"}])
        ['epochs=1+submodel=slice-0.3']
    """
    short = short_keys([*runs[0]])
    texts = ["+".join(f"{short[key]}={shown(own)}" for key, own in run.items()) for run in runs]
    names = [re.sub(r"[^\w.,=+-]", "-", text, flags=re.ASCII) for text in texts]
    repeats = Counter(name.lower() for name in names)
    return [
        name
        if repeats[name.lower()] == 1 and len(name) <= LONGEST
        else f"{name[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        for name, text in zip(names, texts, strict=True)
    ]


def described(values: Values) -> str:
    """The values of a run as text.

    Examples:
        >>> described({"training.epochs": 5, "devices.board.submodel": "full"})
        'training.epochs = 5, devices.board.submodel = full'
    """
    return ", ".join(f"{key} = {shown(value)}" for key, value in values.items())


def shown(value: object) -> str:
    """A value of a grid as text: a text stays as it is, other values are written as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _distinct(values: Sequence[object]) -> list[object]:
    return [*{shown(value): value for value in values}.values()]
