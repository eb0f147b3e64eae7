"""The families, found by looking: every module here has one FAMILY."""

import importlib
import pkgutil

from profiles.errors import SpecError
from toolkit.submodels.submodel import Family


def find_families() -> dict[str, Family]:
    """All families by name. Raises ValueError where two modules claim one name."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        family: Family = importlib.import_module(module.name).FAMILY
        if family.name in found:
            raise ValueError(f"{module.name} claims the family {family.name!r} a second time.")
        found[family.name] = family
    return found


FAMILIES = find_families()


def family_named(name: str) -> Family:
    """The family called `name`. Raises SpecError listing the families there are."""
    if name not in FAMILIES:
        known = ", ".join(family.usage for family in FAMILIES.values())
        raise SpecError(f"There is no submodel family {name!r}; there are {known}.")
    return FAMILIES[name]
