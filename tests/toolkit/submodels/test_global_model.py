"""What a weights file cannot hold."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save
from torch import nn

from edgetailor import split
from exporters.bundle_writer import bundle_files
from profiles.errors import InputError, ModelError
from refusals import refused
from toolkit.submodels.global_model import GlobalModel, from_bytes, from_model


@pytest.mark.parametrize("name", ["kept|conv", "kept|cp:2|conv"])
def test_names_that_are_kept_factors_in_a_file(name: str) -> None:
    model = nn.Sequential(OrderedDict([(name, nn.Linear(2, 3))]))
    with pytest.raises(ModelError) as caught:
        from_model(model)
    assert str(caught.value) == (
        f"The model's tensor '{name}.weight' has a name that weights files keep for factors; "
        "rename its module so that it does not begin with 'kept|'."
    )


def test_names_with_a_bar_elsewhere_are_read_back() -> None:
    model = GlobalModel({"a|kept|b": torch.ones(2)}, {"cp:2.0": {"a|kept|b#0": torch.zeros(1)}})
    back = from_bytes(model.save(), "w")
    assert (back.tensors.keys(), back.kept["cp:2.0"].keys()) == (
        model.tensors.keys(),
        model.kept["cp:2.0"].keys(),
    )


def test_a_kept_factor_without_a_key() -> None:
    with pytest.raises(InputError) as caught:
        from_bytes(save({"kept|conv": torch.ones(2)}), "w.st")
    assert str(caught.value) == (
        "w.st: 'kept|conv' is no kept factor; these are called kept|KEY|TENSOR. "
        "Write the file anew."
    )


def test_numbers_of_another_type_are_not_put_into_a_bundle() -> None:
    program = split(nn.Linear(4, 2), "full", (4,)).program
    values = {"weight": torch.ones(2, 4, dtype=torch.float64), "bias": torch.ones(2)}
    with refused("export.wrong-type", tensor="weight", dtype="float64", expected="float32"):
        bundle_files(program, {}, values, "")
