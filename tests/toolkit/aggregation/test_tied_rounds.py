"""A round on models whose layers share tensors equals plain PyTorch's, family by family."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import oracles
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.update import read_update
from edgetailor import Federation, TrainingConfig, split
from models_for_tests import CLASSES, INPUT_SHAPE, TiedTokens, tied_layers
from oracles import Device, Plan, State
from parameters import some_long
from refusals import refused
from trainings import train_bundle, training_config

PLAN = Plan(batch_size=8, epochs=2, rate=0.1, momentum=0.9, weight_decay=0.01)
DECAY = 0.02
SIZES = (21, 9)


def federation_of(model: str, shape: tuple[int, ...], seed: int) -> Federation:
    return Federation(f"models_for_tests:{model}", shape, training_config(PLAN), seed=seed)


@pytest.fixture(scope="module")
def compiled(seed: int) -> tuple[Federation, bytes]:
    """A federation whose graphs are lowered once, and its first global model."""
    federation = federation_of("tied_layers", INPUT_SHAPE, seed)
    return federation, federation.save()


@pytest.fixture
def layers(compiled: tuple[Federation, bytes]) -> Federation:
    federation, first = compiled
    federation.load(first)
    return federation


@pytest.fixture
def devices(seed: int) -> list[Device]:
    draw = np.random.default_rng(seed)
    return [
        Device(
            draw.normal(0.3 * n, 1, (size, *INPUT_SHAPE)).astype(np.float32),
            draw.integers(CLASSES, size=size),
            seed=seed % 1000 + n,
        )
        for n, size in enumerate(SIZES)
    ]


def model_now(federation: Federation) -> nn.Module:
    """The global model as the user's module, with every tensor under all its names."""
    federation.model.load_into(federation.module)
    return federation.module


def one_round(federation: Federation, fleet: Sequence[tuple[str, Device]], folder: Path) -> State:
    """The global model after every device of `fleet` trained its spec."""
    for number, (spec, device) in enumerate(fleet):
        out = folder / str(number)
        write_folder(out / "bundle", federation.bundle(spec))
        np.savez(out / "data.npz", x=device.x, y=device.y)
        train_bundle(
            out / "bundle", str(out / "data.npz"), out / "update", threads=1, seed=device.seed
        )
    federation.fold([read_update(folder / str(n) / "update") for n in range(len(fleet))])
    return oracles.state_of(model_now(federation))


def assert_equal(came: State, expected: State, old: State) -> None:
    """Each tensor within 1e-4 in norm, and what the round changed of it within 1e-3."""
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        difference, change = (came[name] - value).norm(), (value - old[name]).norm()
        assert difference <= 1e-4 * value.norm(), name
        assert difference <= 1e-3 * change + 5e-7 * value.norm(), name


def test_full(layers: Federation, devices: list[Device], tmp_path: Path) -> None:
    model = model_now(layers)
    old = oracles.state_of(model)
    updates = [(oracles.train_full(model, d, PLAN), len(d.y)) for d in devices]
    came = one_round(layers, [("full", d) for d in devices], tmp_path)
    assert_equal(came, oracles.mean(updates, old), old)
    sent = {e.stands_for for e in layers.submodel("full").program.tensors if e.stands_for}
    assert sent == set(layers.model.tensors) - {"norm.num_batches_tracked"}
    assert not {"second.weight", "back.weight", "same_norm.weight"} & sent


@pytest.mark.long
def test_slice_beside_full(layers: Federation, devices: list[Device], tmp_path: Path) -> None:
    model = model_now(layers)
    assert isinstance(model, nn.Sequential)
    old = oracles.state_of(model)
    updates = [
        (oracles.train_slice(model, "first", devices[0], PLAN), len(devices[0].y)),
        (oracles.train_full(model, devices[1], PLAN), len(devices[1].y)),
    ]
    fleet = list(zip(("slice:first", "full"), devices, strict=True))
    assert_equal(one_round(layers, fleet, tmp_path), oracles.mean(updates, old), old)


@pytest.mark.long
def test_low_rank(layers: Federation, devices: list[Device], tmp_path: Path) -> None:
    spec = f"low-rank:0.25,keep=0,decay={DECAY}"
    model = model_now(layers)
    old = oracles.state_of(model)
    # A quarter of 10 and of 6, rounded. The layer has two names.
    update = oracles.train_low_rank(model, {"stem": 3, "layer": 2}, DECAY, devices[0], PLAN)
    came = one_round(layers, [(spec, devices[0])], tmp_path)
    assert_equal(came, oracles.mean([(update, 1)], old), old)


@pytest.mark.long
def test_width_beside_full(layers: Federation, devices: list[Device], tmp_path: Path) -> None:
    model = model_now(layers)
    old = oracles.state_of(model)
    updates = [
        (oracles.train_leading(model, tied_layers(5, 3), devices[0], PLAN), len(devices[0].y)),
        (oracles.train_full(model, devices[1], PLAN), len(devices[1].y)),
    ]
    fleet = list(zip(("width:0.5", "full"), devices, strict=True))
    assert_equal(one_round(layers, fleet, tmp_path), oracles.mean_of_blocks(updates, old), old)


def tied_tokens(seed: int) -> tuple[Federation, Device]:
    """A federation whose embedding is its classifier, and a device with token ids."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(CLASSES, size=(21, 5))
    device = Device(tokens, draw.integers(CLASSES, size=21), seed=3)
    return federation_of("TiedTokens", (5,), seed), device


@pytest.mark.parametrize(
    ("spec", "width"), some_long([("full", 6), ("width:0.5", 3)], ("width:0.5", 3))
)
def test_an_embedding_that_is_the_classifier(
    spec: str, width: int, seed: int, tmp_path: Path
) -> None:
    federation, device = tied_tokens(seed)
    model = model_now(federation)
    old = oracles.state_of(model)
    update = oracles.train_leading(model, TiedTokens(width), device, PLAN)
    expected = oracles.mean_of_blocks([(update, 1)], old)
    assert_equal(one_round(federation, [(spec, device)], tmp_path), expected, old)


def test_a_slice_keeps_what_the_part_before_it_reads_too(seed: int, tmp_path: Path) -> None:
    federation, device = tied_tokens(seed)
    model = model_now(federation)
    old = oracles.state_of(model)
    twin = copy.deepcopy(model).double()
    twin.get_parameter("embedding.weight").requires_grad_(False)
    trained = {name for name, p in twin.named_parameters() if p.requires_grad}
    assert trained == {"hidden.weight", "hidden.bias", "head.bias"}
    optimizer = torch.optim.SGD(
        [p for p in twin.parameters() if p.requires_grad],
        *(PLAN.rate, PLAN.momentum),
        weight_decay=PLAN.weight_decay,
    )
    for y, indices in device.visits(PLAN):
        oracles.descend(
            optimizer, oracles.cross_entropy(twin(torch.from_numpy(device.x)[indices]), y)
        )
    submodel = federation.submodel("slice:hidden")
    assert {e.stands_for for e in submodel.program.tensors if e.role == "parameter"} == trained
    assert submodel.counts.params == sum(twin.get_parameter(name).numel() for name in trained)
    came = one_round(federation, [("slice:hidden", device)], tmp_path)
    assert_equal(came, oracles.state_of(twin), old)


def test_no_cut_separates_the_uses_of_running_statistics() -> None:
    model = tied_layers()
    assert split(model, "slice:classifier", INPUT_SHAPE).counts.params == 6 * 4 + 4
    assert split(model, "slice:norm", INPUT_SHAPE).counts.params == 12 + 42 + 6 + 28
    for name in ("layer", "back", "second"):
        with refused("spec.unknown-cut-point"):
            split(model, f"slice:{name}", INPUT_SHAPE)


@pytest.mark.parametrize("spec", ["low-rank:0.25,keep=0", "cp:2.0"])
def test_weights_of_several_layers_stay_dense(spec: str) -> None:
    decisions = {d.layer: d for d in split(tied_layers(), spec, INPUT_SHAPE).layer_decisions}
    assert decisions.keys() == {"stem", "first", "layer", "back", "second", "classifier"}
    assert decisions["first"].form == decisions["second"].form == "dense"
    assert "another module" in decisions["first"].reason
    assert decisions["layer"].form != "dense"


def test_rows_of_a_classifier_that_is_also_an_embedding_are_of_no_class() -> None:
    training = TrainingConfig(masked=True)
    marked = {
        e.name for e in split(TiedTokens(), "full", (5,), training).program.tensors if e.by_class
    }
    assert marked == {"head.bias"}
