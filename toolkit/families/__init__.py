"""The families: ways to cut a model, such as low-rank (FedHM) and cp (TDPFed).

Each family is a module. The table in `forms.py` has the specs of all families. The module of a
family has an object `FAMILY` of the type in `submodels/family.py`; `full.py` is the shortest.

Importing this package does not import torch: the module of a family is imported when the family is
first used. So `check_spec` takes milliseconds.
"""

import importlib
from functools import cache
from typing import TYPE_CHECKING

from profiles.errors import SpecError
from profiles.text_formatting import did_you_mean
from toolkit.families.forms import FORMS
from toolkit.submodels.spec import Spec, parse_spec
from toolkit.submodels.spec_form import COMMON, SpecForm

if TYPE_CHECKING:
    from toolkit.submodels.family import Family


def form_named(name: str) -> SpecForm:
    """The form of the specs that the family `name` accepts.

    Raises:
        SpecError: If there is no such family; the message lists all of them.
    """
    if name not in FORMS:
        usages = ", ".join(form.usage for form in FORMS.values())
        raise SpecError(
            "Unknown family {family!r}{did_you_mean} Use one of {usages}.",
            code="spec.unknown-family",
            family=name,
            did_you_mean=did_you_mean(name, FORMS),
            usages=usages,
        )
    return FORMS[name]


def check_spec(spec: str | Spec) -> Spec:
    """Read a spec and check what can be checked without a model and without torch.

    Args:
        spec: The spec, as text or already parsed.

    Returns:
        The parsed spec.

    Raises:
        SpecError: If the spec is malformed, or a family, size, option or combination is wrong.
    """
    parsed = parse_spec(spec) if isinstance(spec, str) else spec
    for own in parsed.nested():
        form = form_named(own.family)
        form.check(own)
        if own.inner is not None:
            _check_combination(parsed, form, form_named(own.inner.family), own.inner)
    for option in COMMON:
        if sum(option.name in own.options for own in parsed.nested()) > 1:
            raise SpecError(
                "Invalid spec {spec!r}: {option} is for the whole submodel, so write it once.",
                code="spec.malformed",
                spec=str(parsed),
                option=option.name,
            )
    return parsed


def _check_combination(spec: Spec, outer: SpecForm, inner: SpecForm, inner_spec: Spec) -> None:
    selecting = [form.family for form in FORMS.values() if form.selects_layers]
    exchanging = [form.family for form in FORMS.values() if form.exchanges_layers]
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
    module = importlib.import_module(f"{__name__}.{form.family.replace('-', '_')}")
    family: Family = module.FAMILY
    return family


def recovering_family(spec: Spec) -> "Family":
    """The family that turns updates of `spec` into global tensors: the last family in the spec.

    If two families are combined, the first only selects layers and makes no factors. So the second
    makes all factors of an update.
    """
    *_, innermost = spec.nested()
    return family_named(innermost.family)
