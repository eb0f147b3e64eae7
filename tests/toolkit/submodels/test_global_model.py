"""Weights files that are refused."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save
from torch import nn

from edgetailor import split
from exporters.bundle_writer import bundle_files
from refusals import refused
from toolkit.submodels.global_model import (
    GlobalModel,
    check_fits,
    from_bytes,
    from_file,
    from_model,
)


@pytest.mark.parametrize("name", ["kept|conv", "kept|cp:2|conv"])
def test_names_that_are_kept_factors_in_a_file(name: str) -> None:
    model = nn.Sequential(OrderedDict([(name, nn.Linear(2, 3))]))
    with refused("model.reserved-name", tensor=f"{name}.weight") as caught:
        from_model(model)
    assert "'kept|'" in str(caught.value)


def test_names_with_a_bar_elsewhere_are_read_back() -> None:
    model = GlobalModel({"a|kept|b": torch.ones(2)}, {"cp:2.0": {"a|kept|b#0": torch.zeros(1)}})
    back = from_bytes(model.save(), "w")
    assert (back.tensors.keys(), back.kept["cp:2.0"].keys()) == (
        model.tensors.keys(),
        model.kept["cp:2.0"].keys(),
    )


def test_a_kept_factor_without_a_key() -> None:
    with refused("model.invalid-kept-factor", file="w.st", tensor="kept|conv") as caught:
        from_bytes(save({"kept|conv": torch.ones(2)}), "w.st")
    assert "kept|KEY|TENSOR" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "values"),
    [
        (nn.Linear(4, 2, bias=False), {"tensor": "bias"}),
        (nn.Linear(5, 2), {"tensor": "weight", "shape": [2, 5], "expected": [2, 4]}),
        (
            nn.Linear(4, 2).double(),
            {"tensor": "weight", "dtype": "torch.float64", "expected": "torch.float32"},
        ),
    ],
)
def test_weights_of_another_model(other: nn.Module, values: dict[str, object]) -> None:
    with refused("model.wrong-weights", file="w.st", **values) as caught:
        check_fits(from_model(other), nn.Linear(4, 2), "w.st")
    shown = (tuple(v) if isinstance(v, list) else v for v in values.values())
    assert all(str(value) in str(caught.value) for value in ("w.st", *shown))


def test_bytes_that_are_no_weights() -> None:
    with refused("file.not-safetensors", file="w.st"):
        from_bytes(b"nothing", "w.st")
    with refused("model.not-finite", file="w.st", tensor="w"):
        from_bytes(save({"w": torch.tensor([1.0, torch.inf])}), "w.st")
    with refused("file.unreadable", file="missing/w.st"):
        from_file("missing/w.st")


def test_numbers_of_another_type_are_not_put_into_a_bundle() -> None:
    program = split(nn.Linear(4, 2), "full", (4,)).program
    values = {"weight": torch.ones(2, 4, dtype=torch.float64), "bias": torch.ones(2)}
    with refused("export.wrong-type", tensor="weight", dtype="float64", expected="float32"):
        bundle_files(program, {}, values, "")
