"""Specs are known without torch, and any family that exchanges layers combines with `slice`."""

import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from commands import run_code
from refusals import refused
from toolkit import families
from toolkit.families import check_spec, family_named, recovering_family
from toolkit.families.forms import FORMS
from toolkit.splitting import split
from toolkit.submodels import global_model
from toolkit.submodels.family import ExchangesLayers
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.spec_form import Option, SpecForm
from toolkit.submodels.submodel import shapes_of

OUTER = '''
"""`outer`: every linear layer but the last becomes column times row, scaled by 1."""

import copy

from toolkit.factor_layers.low_rank_layers import FactorizedLinear, compose_weight
from toolkit.submodels.family import ExchangesLayers
from toolkit.submodels.one_step_submodel import rewritten_submodel
from toolkit.submodels.rewritten_model import Origin, Rewritten
from toolkit.submodels.submodel import LayerDecision, factors_of, recover_dense
from toolkit.submodels.weighted_layers import weighted_layers

class Outer(ExchangesLayers):
    def rewrite(self, model, captured, spec, among=None):
        new, origins = copy.deepcopy(model), {}
        layers = weighted_layers(model, captured)[:-1]
        replaced = [layer.name for layer in layers if among is None or layer.name in among]
        for name in replaced:
            new.set_submodule(name, FactorizedLinear(model.get_submodule(name), 1))
            for side in ("u", "v"):
                origins[f"{name}.{side}.weight"] = Origin(f"{name}.weight", side)
            origins[f"{name}.v.bias"] = Origin(f"{name}.bias")

        def factors(weights):
            values = {}
            for name in replaced:
                values[f"{name}.u.weight"] = weights.tensors[f"{name}.weight"][:1].clone()
                values[f"{name}.v.weight"] = weights.tensors[f"{name}.weight"][:, :1].clone()
                values[f"{name}.v.bias"] = weights.tensors[f"{name}.bias"]
            return values

        decisions = tuple(LayerDecision(name, "outer product") for name in replaced)
        return Rewritten(new, origins, factors, layer_decisions=decisions)

    def split(self, request):
        rewritten = self.rewrite(request.model, request.capture(), request.spec)
        return rewritten_submodel(request, rewritten)

    def recover(self, tensors, table, shapes):
        factors = factors_of(tensors, table).items()
        products = {name: compose_weight(sides["u"], sides["v"]) for name, sides in factors}
        return {**recover_dense(tensors, table), **products}


FAMILY = Outer()
'''


@pytest.fixture
def one_more_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family in a file of its own, as if it were in `toolkit/families`."""
    (tmp_path / "outer.py").write_text(OUTER)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    form = SpecForm("outer", "outer", "", options=(Option("scale"),), exchanges_layers=True)
    monkeypatch.setitem(FORMS, "outer", form)
    yield
    families.family_named.cache_clear()
    sys.modules.pop("toolkit.families.outer", None)


def test_every_family_is_in_the_table() -> None:
    modules = {module.name for module in pkgutil.iter_modules(families.__path__)} - {"forms"}
    assert modules == {name.replace("-", "_") for name in FORMS}
    for name, form in FORMS.items():
        family = family_named(name)
        assert (family.form, form.family) == (form, name)
        assert isinstance(family, ExchangesLayers) == form.exchanges_layers
        assert form.usage.startswith(name)
        assert all(f"{option.name}=" in form.summary for option in form.options)


@pytest.mark.parametrize(
    ("text", "code", "suggestion"),
    [
        ("lowrank:0.25", "spec.unknown-family", "did you mean 'low-rank'?"),
        ("low-rank:0.25,kep=1", "spec.unknown-option", "did you mean 'keep'?"),
        ("low-rank:2", "spec.invalid-size", "low-rank:0.25"),
        ("slice:0.5+width:0.5", "spec.invalid-combination", "slice:0.42+low-rank:0.25"),
    ],
)
def test_a_wrong_spec_is_refused_without_torch(text: str, code: str, suggestion: str) -> None:
    script = (
        "import sys, time\n"
        "from profiles.errors import SpecError\n"
        "from toolkit.families import check_spec\n"
        f"try: check_spec({text!r})\n"
        "except SpecError as error: print(error.code, error)\n"
        "assert 'torch' not in sys.modules\n"
        "assert time.process_time() < 1\n"
    )
    done = run_code(script)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{code} ")
    assert suggestion in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "low-rank:0.25,keep=3,decay=0",
        "slice:0.42+low-rank:0.25",
        "slice:lstm,skip=3",
        "cp:2.0,penalty=1,personal-steps=1,factor-steps=5,factor-rate=0.1",
        "pfedme,local-rate=0.1",
        "width:0.5",
    ],
)
def test_specs_that_are_accepted(text: str) -> None:
    assert check_spec(text) == check_spec(parse_spec(text)) == parse_spec(text)


@pytest.mark.parametrize(
    "text",
    [
        "full+low-rank:0.5",
        "slice:0.5+full",
        "slice:0.5+cp:2",
        "slice:0.5+slice:0.5",
        "slice:0.5+low-rank:0.5+low-rank:0.5",
    ],
)
def test_combinations_that_are_refused(text: str) -> None:
    with refused("spec.invalid-combination", spec=text):
        check_spec(text)


def test_an_unknown_family_names_all() -> None:
    with refused("spec.unknown-family", family="nothing-like-it") as caught:
        check_spec("nothing-like-it")
    assert "did you mean" not in str(caught.value)
    for form in FORMS.values():
        assert form.usage in str(caught.value)


@pytest.mark.usefixtures("one_more_family")
def test_slice_takes_any_family_that_exchanges_layers() -> None:
    model = nn.Sequential(
        *(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh()),
        *(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3)),
    )
    spec = "slice:2+outer,scale=1"
    submodel = split(model, spec, (6,), TrainingConfig(batch_size=4))
    weights = global_model.from_model(model)
    values = submodel.cut(weights)
    own = {
        **{f"2.{name}": shape for name, shape in outer_shapes(7, 8).items()},
        **{f"4.{name}": shape for name, shape in outer_shapes(8, 9).items()},
        **{"0.weight": (7, 6), "0.bias": (7,), "6.weight": (3, 9), "6.bias": (3,)},
    }
    assert {name: tuple(value.shape) for name, value in values.items()} == own
    assert [(d.layer, d.form) for d in submodel.layer_decisions[1:]] == [
        ("2", "outer product"),
        ("4", "outer product"),
    ]
    table = [e for e in submodel.program.tensors if e.role == "parameter"]
    recovered = recovering_family(submodel.spec).recover(
        {e.name: values[e.name] for e in table}, table, shapes_of(weights.tensors)
    )
    assert recovered.keys() == {f"{n}.{own}" for n in (2, 4, 6) for own in ("weight", "bias")}
    for name in ("2", "4"):
        product, weight = recovered[f"{name}.weight"], weights.tensors[f"{name}.weight"]
        assert isinstance(product, Product)
        torch.testing.assert_close(product.dense(), weight[:, :1] @ weight[:1])
    assert split(model, "outer", (6,), TrainingConfig()).counts.params > submodel.counts.params
    smaller = split(model, "slice:0.4+outer", (6,), TrainingConfig(batch_size=4))
    assert [d.layer for d in smaller.layer_decisions[1:]] == ["4"]
    with refused("spec.nothing-smaller", module="6"):
        split(model, "slice:6+outer", (6,), TrainingConfig(batch_size=4))


def outer_shapes(inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer that `outer` replaced."""
    return {"u.weight": (1, inputs), "v.weight": (outputs, 1), "v.bias": (outputs,)}
