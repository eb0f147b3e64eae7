"""Weights that are carried over into a changed model, against slices of numpy arrays."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from refusals import refused
from toolkit.aggregation.federation import Federation
from toolkit.submodels.carried_weights import carry
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig

shapes = arrays.array_shapes(min_dims=0, max_dims=3, max_side=4)
models = st.dictionaries(st.sampled_from("abcde"), shapes, min_size=1)


def model(given: dict[str, tuple[int, ...]], draw: np.random.Generator) -> GlobalModel:
    return GlobalModel(
        {name: torch.tensor(draw.normal(size=shape)).float() for name, shape in given.items()}
    )


@given(models, models, st.integers(0, 2**32 - 1))
def test_numbers_are_kept_where_they_fit(
    before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    old, initial = model(before, draw), model(after, draw)
    first = {name: tensor.numpy().copy() for name, tensor in initial.tensors.items()}
    fits = {
        name
        for name in before.keys() & after.keys()
        if len(before[name]) == len(after[name])
        and all(a <= b for a, b in zip(before[name], after[name], strict=True))
    }
    if not fits:
        with refused("settings.nothing-carried"):
            carry(old, initial)
        return
    new, about = carry(old, initial)
    assert new.tensors.keys() == after.keys()
    for name, tensor in new.tensors.items():
        expected = first[name].copy()
        if name in fits:
            expected[np.ix_(*map(range, before[name]))] = old.tensors[name].numpy()
        np.testing.assert_array_equal(tensor.numpy(), expected)
        np.testing.assert_array_equal(initial.tensors[name].numpy(), first[name])
    whole = {name for name in fits if before[name] == after[name]}
    assert about.whole == len(whole)
    assert {text.partition(" ")[0] for text in about.part} == fits - whole
    assert set(about.new) == after.keys() - fits
    assert set(about.dropped) == before.keys() - after.keys()


def test_a_tensor_with_two_names_is_carried_once() -> None:
    tied = torch.ones(2, 3)
    old = GlobalModel({"in.weight": tied, "out.weight": tied})
    wide = torch.zeros(3, 3)
    new, about = carry(old, GlobalModel({"in.weight": wide, "out.weight": wide}))
    assert about.text() == "0 kept; 1 kept in part: in.weight (2 x 3 of 3 x 3)"
    assert new.state_dict()["out.weight"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


def test_another_type_keeps_its_numbers_only_between_floats() -> None:
    old = GlobalModel({"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)})
    initial = GlobalModel({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)})
    new, about = carry(old, initial)
    assert (about.whole, about.new) == (1, ["b"])
    assert (new.tensors["a"].dtype, new.tensors["b"].tolist()) == (torch.float32, [0, 0])


def test_factors_and_moments_are_made_again() -> None:
    weight = {"w": torch.ones(2)}
    old = GlobalModel(weight, kept={"cp:2.0": weight}, moments={"fedadam.first": weight})
    new, _ = carry(old, GlobalModel({"w": torch.zeros(3)}))
    assert (new.kept, new.moments) == ({}, {})


def test_which_devices_keep_tensors_of_their_own() -> None:
    federation = Federation("toolkit.models:digits_cnn", (1, 8, 8), TrainingConfig())
    assert federation.keeps_personal("cp:2.0")
    assert not federation.keeps_personal("full")
