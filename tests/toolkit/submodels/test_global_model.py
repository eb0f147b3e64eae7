"""Weights files: several names of one tensor, and files that are refused."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save, save_model
from torch import nn

from edgetailor import split
from exporters.bundle_writer import bundle_files
from refusals import refused
from toolkit.submodels.global_model import (
    GlobalModel,
    fitted,
    from_bytes,
    from_file,
    from_model,
)


@pytest.mark.parametrize("name", ["kept|conv", "kept|cp:2|conv", "moment|conv"])
def test_names_that_are_reserved_in_a_file(name: str) -> None:
    model = nn.Sequential(OrderedDict([(name, nn.Linear(2, 3))]))
    with refused("model.reserved-name", tensor=f"{name}.weight") as caught:
        from_model(model)
    assert f"'{name.partition('|')[0]}|'" in str(caught.value)


def test_names_with_a_bar_elsewhere_are_read_back() -> None:
    model = GlobalModel(
        {"a|kept|b": torch.ones(2)},
        {"cp:2.0": {"a|kept|b#0": torch.zeros(1)}},
        moments={"fedavgm.first": {"a|kept|b": torch.zeros(2)}},
    )
    back = from_bytes(model.save(), "w")
    assert (back.tensors.keys(), back.kept["cp:2.0"].keys(), back.moments) == (
        model.tensors.keys(),
        model.kept["cp:2.0"].keys(),
        {"fedavgm.first": {"a|kept|b": pytest.approx(torch.zeros(2))}},
    )


def test_a_kept_factor_without_a_key() -> None:
    with refused("model.invalid-kept-factor", "kept|KEY|TENSOR", file="w.st", tensor="kept|conv"):
        from_bytes(save({"kept|conv": torch.ones(2)}), "w.st")


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
        fitted(from_model(other), nn.Linear(4, 2), "w.st")
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


def tied() -> nn.Sequential:
    """Two layers with one weight, and a batch norm with two names."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.append(model[1])
    return model


def assert_tied(model: nn.Sequential) -> None:
    assert model[2].weight is model[0].weight
    assert model[3].running_mean is model[1].running_mean


@pytest.mark.parametrize("read", [from_model, lambda model: GlobalModel(model.state_dict())])
def test_a_tensor_with_several_names_is_one(read: Callable[[nn.Module], GlobalModel]) -> None:
    model = tied()
    weights = read(model)
    assert [n for n in weights.tensors if n.endswith("weight")] == ["0.weight", "1.weight"]
    assert weights.shared["2.weight"] == "0.weight"
    assert weights.shared["3.running_var"] == "1.running_var"
    back = from_bytes(weights.save(), "w")
    assert (back.tensors.keys(), back.shared) == (weights.tensors.keys(), weights.shared)
    assert back.fingerprint() == weights.fingerprint()


def test_a_saved_model_loads_strictly_into_pytorch() -> None:
    model, other = tied(), tied()
    other.load_state_dict(load(from_model(model).save()), strict=True)
    assert_tied(other)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("name", ["load_into", "lend_to"])
def test_a_model_stays_tied(name: str) -> None:
    model, other = tied(), tied()
    other[0].bias.requires_grad_(False)
    getattr(from_model(model), name)(other)
    assert_tied(other)
    assert [p.requires_grad for p in (other[0].weight, other[0].bias)] == [True, False]
    for tensor, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[tensor], value), tensor


def test_plain_state_dicts_of_a_model_with_several_names(tmp_path: Path) -> None:
    """One tensor under all names, or under any one of them, as other programs write it."""
    model = tied()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    (tmp_path / "all.st").write_bytes(save(plain))
    second = {n: v for n, v in plain.items() if n != "0.weight"}
    (tmp_path / "second.st").write_bytes(save(second, {"format": "pt"}))
    save_model(model, str(tmp_path / "one.st"))
    for file in ("all.st", "second.st", "one.st"):
        weights = fitted(from_file(tmp_path / file), tied(), file)
        assert weights.fingerprint() == from_model(model).fingerprint(), file


def test_several_names_with_different_values() -> None:
    plain = {name: value.clone() for name, value in tied().state_dict().items()}
    plain["2.weight"] += 1
    with refused("model.unequal-names", file="w.st", tensors=["0.weight", "2.weight"]):
        fitted(from_bytes(save(plain), "w.st"), tied(), "w.st")
    own = from_model(tied())
    names = {"edgetailor.shared": json.dumps(own.shared)}
    with refused("model.unequal-names", file="w.st", tensors=["0.weight", "2.weight"]):
        from_bytes(save(plain, names), "w.st")


@pytest.mark.parametrize("text", ["no JSON", '["0.weight"]', '{"other": "0.weight"}'])
def test_metadata_that_name_no_tensors(text: str) -> None:
    with refused("model.invalid-shared-names", file="w.st"):
        from_bytes(save({"0.weight": torch.ones(2)}, {"edgetailor.shared": text}), "w.st")


def test_lending_keeps_the_parameters_that_a_model_has_in_a_list() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    listed = list(model.parameters())
    state = from_model(model)
    state.tensors["0.weight"] = torch.full((2, 3), 5.0)
    state.lend_to(model)
    assert all(one is two for one, two in zip(listed, model.parameters(), strict=True))
    assert torch.equal(listed[0], torch.full((2, 3), 5.0))
    assert listed[0].data_ptr() == state.tensors["0.weight"].data_ptr()
    assert all(parameter.requires_grad for parameter in listed)
