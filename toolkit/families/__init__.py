"""The families, one module each: ways to cut a model, such as low-rank (FedHM) and cp (TDPFed).

A family is one file with two names: `FORM`, the specs that it accepts, and `FAMILY`, an object that
fulfils `submodels/family.py`. Nothing else has to be registered. `full.py` is the smallest.

This package imports no torch. The forms are read from the source of the modules, and a module is
imported when its family is first used. `check_spec` therefore takes milliseconds.
"""

import ast
import importlib
import importlib.util
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from profiles.errors import SpecError
from profiles.text_formatting import did_you_mean
from toolkit.submodels.spec import Spec, parse_spec
from toolkit.submodels.spec_form import COMMON, Choice, Number, Option, SpecForm, Text

if TYPE_CHECKING:
    from toolkit.submodels.family import Family

USABLE_IN_FORMS = {kind.__name__: kind for kind in (SpecForm, Number, Text, Option, Choice)}


@cache
def _forms_by_module() -> dict[str, SpecForm]:
    """The form of every family by the name of its module.

    Raises ValueError if two modules describe the same family.
    """
    found: dict[str, SpecForm] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        form = _read_form(module.name)
        if any(form.family == other.family for other in found.values()):
            raise ValueError(f"{module.name} describes the family {form.family!r} a second time")
        found[module.name] = form
    return found


def _read_form(module: str) -> SpecForm:
    """The value of `FORM` in the source of `module`, which is not imported."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.loader is not None
    # Importing the module would import torch, which takes seconds. The form is a literal call, so
    # that its source is enough.
    source = found.loader.get_source(module)  # type: ignore[attr-defined]
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="FORM")], value=value):
                expression = compile(ast.Expression(value), module, "eval")
                # Only names of this module are available. The source is part of this package.
                form: SpecForm = eval(expression, dict(USABLE_IN_FORMS))
                return form
    raise ValueError(f"{module} has no FORM = SpecForm(...)")


def spec_forms() -> list[SpecForm]:
    """The specs that each family accepts, in the order of the families' modules."""
    return list(_forms_by_module().values())


def form_named(name: str) -> SpecForm:
    """The specs that the family `name` accepts.

    Raises:
        SpecError: If there is no such family; the message lists all of them.
    """
    forms = {form.family: form for form in spec_forms()}
    if name not in forms:
        usages = ", ".join(form.usage for form in forms.values())
        raise SpecError(
            "Unknown family {family!r}{did_you_mean} Use one of {usages}.",
            code="spec.unknown-family",
            family=name,
            did_you_mean=did_you_mean(name, forms),
            usages=usages,
        )
    return forms[name]


def check_spec(spec: str | Spec) -> Spec:
    """Read a spec and check all that can be checked without a model, and without torch.

    Args:
        spec: The spec, as text or already parsed.

    Returns:
        The parsed spec.

    Raises:
        SpecError: If the spec is malformed, or a family, size, option or combination is wrong.
    """
    parsed = parse_spec(spec) if isinstance(spec, str) else spec
    for one in parsed.nested():
        form = form_named(one.family)
        form.check(one)
        if one.inner is not None:
            _check_combination(parsed, form, form_named(one.inner.family), one.inner)
    for option in COMMON:
        if sum(option.name in one.options for one in parsed.nested()) > 1:
            raise SpecError(
                "Invalid spec {spec!r}: {option} is for the whole submodel, so write it once.",
                code="spec.malformed",
                spec=str(parsed),
                option=option.name,
            )
    return parsed


def _check_combination(spec: Spec, outer: SpecForm, inner: SpecForm, inner_spec: Spec) -> None:
    selecting = [form.family for form in spec_forms() if form.selects_layers]
    exchanging = [form.family for form in spec_forms() if form.exchanges_layers]
    if outer.selects_layers and inner.exchanges_layers and inner_spec.inner is None:
        return
    raise SpecError(
        "Invalid combination {spec!r}: only {first} can be combined with a second family, and "
        "only with {second}. Write for example slice:0.42+low-rank:0.25.",
        code="spec.invalid-combination",
        spec=str(spec),
        first=" or ".join(selecting),
        second=" or ".join(exchanging),
    )


@cache
def family_named(name: str) -> "Family":
    """The family called `name`; imports its module on first use.

    Raises:
        SpecError: If there is no such family; the message lists all of them.
    """
    form = form_named(name)
    module = next(module for module, one in _forms_by_module().items() if one is form)
    family: Family = importlib.import_module(module).FAMILY
    return family


def recovering_family(spec: Spec) -> "Family":
    """The family that recovers updates of `spec`: the innermost one.

    A family that selects layers makes no factors. If it is combined with a second family, all
    factors of an update are made by that one.
    """
    *_, innermost = spec.nested()
    return family_named(innermost.family)
