"""Reads the submodels to export: the tiers of a TOML file, or the specs of the command line.

Needs no torch, so that a mistake in the file is refused before the model is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from profiles.errors import InputError
from toolkit.exporting.output_places import folder_name
from toolkit.toml_files import KeyPath, Table, Tier, read_table, repeated


class TierFile(Table):
    """The content of a file of tiers."""

    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _unique(self) -> Self:
        twice = repeated([tier.name for tier in self.tiers])
        if twice:
            raise ValueError(f"tiers are named twice: {twice}; give each its own name")
        return self


def read_tiers(path: Path) -> tuple[Tier, ...]:
    """Read the tiers of a TOML file. Raises InputError with the file and the key."""
    return read_table(path, TierFile, _known_keys).tiers


def tiers_of(specs: Sequence[str]) -> tuple[Tier, ...]:
    """Make a tier of each spec. A tier has the name of the folder for its bundle.

    Raises InputError if two tiers would have the same name.
    """
    tiers = tuple(Tier.model_construct(name=folder_name(spec), submodel=spec) for spec in specs)
    twice = repeated([tier.name for tier in tiers])
    if twice:
        raise InputError(
            "Several submodels would be written to {folders}: give each submodel once.",
            code="option.repeated-submodel",
            folders=twice.split(", "),
        )
    return tiers


def _known_keys(path: KeyPath) -> list[str]:
    return list(Tier.model_fields if len(path) > 1 else TierFile.model_fields)
