"""The global model after a round equals plain PyTorch's, family by family.

Real bundles, on disk, trained by the agent in ONNX Runtime and folded by the federation; the other
side is tests/oracles.py.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import Tensor, nn

import oracles
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.update import read_update
from device_agent.training.bundle_training import Trained
from edgetailor import Federation
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from oracles import BiLevel, BiLevelResult, Device, Plan, State, Tensorized
from trainings import personal_state, train_bundle, training_config

PLAN = Plan(batch_size=8, epochs=2, rate=0.1, momentum=0.9, weight_decay=0.01)
DECAY = 0.02
BI_LEVEL = BiLevel(penalty=2.0, personal_steps=2, factor_steps=3, factor_rate=0.001)
FULL = "full"
LOW_RANK = f"low-rank:0.25,keep=1,decay={DECAY}"
RANKS = {"strided": 2, "residual.conv": 2, "hidden": 2}  # a quarter of 8 outputs and 8 inputs
SLICE = "slice:residual"
CP = "cp:2.0,penalty=2.0,personal-steps=2,factor-steps=3,factor-rate=0.001"
SIZES = (21, 9, 14)  # last batches of 5, of 9 (one left over joins) and of 6
STEADY = 1e-5
"""Most that PyTorch in float32 may differ from itself in float64 on data for a comparison."""
UNIT = 5
"""Most that a float32 weight's own rounding may weigh in a change, in units of 1e-7 of its norm."""


def federation_of(model: str, seed: int, shape: tuple[int, ...] = INPUT_SHAPE) -> Federation:
    return Federation(f"models_for_tests:{model}", shape, training_config(PLAN), seed=seed)


@pytest.fixture(scope="module")
def compiled(seed: int) -> tuple[Federation, bytes]:
    """A federation whose graphs are lowered once, and its first global model."""
    federation = federation_of("smooth_cnn", seed)
    with torch.no_grad():  # statistics and affine parameters that do not hide a mistake
        generator = torch.Generator().manual_seed(seed)
        for value in federation.model.tensors.values():
            if value.dim() == 1:
                value.add_(torch.rand(value.shape, generator=generator) * 0.5)
    return federation, federation.save()


@pytest.fixture
def federation(compiled: tuple[Federation, bytes]) -> Federation:
    federation, first = compiled
    federation.load(first)
    return federation


@pytest.fixture
def devices(seed: int) -> list[Device]:
    return [device(seed, number, size, INPUT_SHAPE) for number, size in enumerate(SIZES)]


def device(seed: int, number: int, size: int, shape: tuple[int, ...], again: int = 0) -> Device:
    """Samples whose mean and spread differ between devices; `again` draws others like them."""
    draw = np.random.default_rng([seed, number, again])
    x = draw.normal(0.3 * number, 1 + 0.5 * number, (size, *shape)).astype(np.float32)
    return Device(x, draw.integers(CLASSES, size=size), seed=seed % 1000 + number)


def trained(
    federation: Federation,
    spec: str,
    device: Device,
    folder: Path,
    personal: Mapping[str, np.ndarray] | None = None,
) -> Trained:
    """Let a device train this round's bundle of `spec` from files; the update is in `folder`."""
    bundle = folder / "bundle"
    write_folder(bundle, federation.bundle(spec))
    np.savez(folder / "data.npz", x=device.x, y=device.y)
    return train_bundle(
        bundle,
        str(folder / "data.npz"),
        folder / "update",
        threads=1,
        seed=device.seed,
        personal=personal,
    )


def one_round(
    federation: Federation, fleet: Sequence[tuple[str, Device]], folder: Path
) -> list[Trained]:
    """Every device of `fleet` trains its spec, and all updates are folded."""
    folders = [folder / str(number) for number in range(len(fleet))]
    reports = [
        trained(federation, spec, device, out)
        for (spec, device), out in zip(fleet, folders, strict=True)
    ]
    federation.fold([read_update(out / "update") for out in folders])
    return reports


def model_now(federation: Federation) -> nn.Sequential:
    """The global model as a float32 module."""
    federation.model.load_into(federation.module)
    assert isinstance(federation.module, nn.Sequential)
    return federation.module


def state_now(federation: Federation) -> State:
    return oracles.state_of(model_now(federation))


def assert_equal(came: Mapping[str, Tensor], expected: State, old: State) -> None:
    """Each tensor within 1e-4 in norm, and what the round changed of it within 1e-3."""
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        difference = float((came[name] - value).norm())
        change = float((value - old[name]).norm())
        size = float(value.norm())
        assert difference <= 1e-4 * size, f"{name}: {difference / size:.1e} of its norm"
        assert difference <= 1e-3 * change + UNIT * 1e-7 * size, (
            f"{name}: {difference / change:.1e} of its change"
        )


def received_factors(federation: Federation, spec: str) -> Tensorized:
    """Factors and statistics as the bundle's files say them."""
    files = federation.bundle(spec)
    manifest = json.loads(files["manifest.json"])
    values = safetensors.numpy.load(files["weights.safetensors"])
    start = Tensorized({})
    for entry in manifest["tensors"]:
        if entry["name"] in values:
            value = torch.from_numpy(values[entry["name"]]).double()
            if entry["role"] == "buffer":
                start.statistics[entry["stands_for"]] = value
            else:
                start.factors.setdefault(entry["stands_for"], []).append(value)
    return start


def test_full(federation: Federation, devices: list[Device], tmp_path: Path) -> None:
    old, model = state_now(federation), model_now(federation)
    updates = [(oracles.train_full(model, d, PLAN), len(d.y)) for d in devices]
    one_round(federation, [(FULL, d) for d in devices], tmp_path)
    assert_equal(state_now(federation), oracles.mean(updates, old), old)
    for name, value in federation.model.tensors.items():
        if not value.is_floating_point():
            # Two epochs of batches of 8, 8 and 5 samples; the other devices have fewer.
            assert value == 6, f"{name} counts the batches of the device with most of them"


def test_low_rank(federation: Federation, devices: list[Device], tmp_path: Path) -> None:
    old, model = state_now(federation), model_now(federation)
    updates = [
        (oracles.train_low_rank(model, RANKS, DECAY, d, PLAN), len(d.y)) for d in devices[:2]
    ]
    one_round(federation, [(LOW_RANK, d) for d in devices[:2]], tmp_path)
    assert_equal(state_now(federation), oracles.mean(updates, old), old)


def test_slice_beside_full(federation: Federation, devices: list[Device], tmp_path: Path) -> None:
    old, model = state_now(federation), model_now(federation)
    updates = [
        (oracles.train_slice(model, "residual", devices[0], PLAN), len(devices[0].y)),
        (oracles.train_slice(model, "residual", devices[1], PLAN), len(devices[1].y)),
        (oracles.train_full(model, devices[2], PLAN), len(devices[2].y)),
    ]
    fleet = list(zip((SLICE, SLICE, FULL), devices, strict=True))
    one_round(federation, fleet, tmp_path)
    assert_equal(state_now(federation), oracles.mean(updates, old), old)


@pytest.mark.long
def test_low_rank_layers_in_a_slice(
    federation: Federation, devices: list[Device], tmp_path: Path
) -> None:
    def low_rank(suffix: nn.Module, local: Device, plan: Plan) -> State:
        ranks = {name: RANKS[name] for name in ("residual.conv", "hidden")}
        return oracles.train_low_rank(suffix, ranks, DECAY, local, plan)

    old, model = state_now(federation), model_now(federation)
    updates = [
        (oracles.train_slice(model, "residual", devices[0], PLAN, low_rank), len(devices[0].y)),
        (oracles.train_full(model, devices[2], PLAN), len(devices[2].y)),
    ]
    fleet = [(f"{SLICE}+low-rank:0.25,decay={DECAY}", devices[0]), (FULL, devices[2])]
    one_round(federation, fleet, tmp_path)
    assert_equal(state_now(federation), oracles.mean(updates, old), old)


def test_width_beside_full(federation: Federation, devices: list[Device], tmp_path: Path) -> None:
    old, model = state_now(federation), model_now(federation)
    half, third = smooth_cnn(3, 4, 4, 6), smooth_cnn(2, 3, 3, 4)
    updates = [
        (oracles.train_leading(model, half, devices[0], PLAN), len(devices[0].y)),
        (oracles.train_leading(model, third, devices[1], PLAN), len(devices[1].y)),
    ]
    one_round(federation, [("width:0.5", devices[0]), ("width:0.33", devices[1])], tmp_path)
    assert_equal(state_now(federation), oracles.mean_of_blocks(updates, old), old)


def test_pfedme(federation: Federation, devices: list[Device], tmp_path: Path) -> None:
    settings = BiLevel(penalty=2.0, personal_steps=2, factor_steps=1, factor_rate=0.1, adam=False)
    spec = "pfedme,penalty=2.0,personal-steps=2,local-rate=0.1"
    old, model = state_now(federation), model_now(federation)
    names = dict(model.named_parameters())
    start = Tensorized(
        {name: [old[name]] for name in names}, {n: v for n, v in old.items() if n not in names}
    )
    results = [oracles.train_cp(model, start, d, PLAN, settings) for d in devices[:2]]
    reports = one_round(federation, [(spec, d) for d in devices[:2]], tmp_path)
    for report, result in zip(reports, results, strict=True):
        assert_equal(personal_state(report), result.personal, old)
    updates = [(r.factors.composed(), len(d.y)) for r, d in zip(results, devices[:2], strict=True)]
    assert_equal(state_now(federation), oracles.mean(updates, old), old)


@pytest.mark.parametrize("start", ["kept", "aggregate"])
def test_where_a_personal_model_starts(
    start: str, federation: Federation, devices: list[Device], seed: int, tmp_path: Path
) -> None:
    """A device that has a personal model goes on with it, or starts from the received model."""
    settings = BiLevel(penalty=2.0, personal_steps=2, factor_steps=1, factor_rate=0.1, adam=False)
    spec = f"pfedme,penalty=2.0,personal-steps=2,local-rate=0.1,personal-start={start}"
    old, model, local = state_now(federation), model_now(federation), devices[0]
    names = dict(model.named_parameters())
    received = Tensorized(
        {name: [old[name]] for name in names}, {n: v for n, v in old.items() if n not in names}
    )
    draw = np.random.default_rng(seed)
    own = {n: (old[n].numpy() + draw.normal(0, 0.1, old[n].shape)).astype("float32") for n in names}
    theta = {n: torch.from_numpy(v).double() for n, v in own.items()} if start == "kept" else None
    expected = oracles.train_cp(model, received, local, PLAN, settings, theta)
    kept = {f"personal:{name}": value for name, value in own.items()}
    report = trained(federation, spec, local, tmp_path, kept)
    assert_equal(personal_state(report), expected.personal, old)
    federation.fold([read_update(tmp_path / "update")])
    assert_equal(state_now(federation), expected.factors.composed(), old)


def test_tensors_that_nobody_trained_stay_bit_for_bit(
    federation: Federation, devices: list[Device], tmp_path: Path
) -> None:
    before = dict(federation.model.tensors)
    one_round(federation, [(SLICE, devices[1])], tmp_path)
    for name, value in federation.model.tensors.items():
        frozen = name.split(".")[0] in ("conv", "bn", "strided")
        assert torch.equal(value, before[name]) == frozen, name


def cp_device(
    model: nn.Module, start: Tensorized, draws: Iterator[Device], personal: State | None = None
) -> tuple[Device, BiLevelResult]:
    """The first of `draws` on which PyTorch in float32 agrees with itself in float64.

    On some the training amplifies any rounding (several times a step, through the batch norm of a
    small batch): no float32 implementation can be expected to agree there.
    """
    for local in draws:
        result = oracles.train_cp(model, start, local, PLAN, BI_LEVEL, personal)
        single = oracles.train_cp(model, start, local, PLAN, BI_LEVEL, personal, torch.float32)
        if result.apart(single) < STEADY:
            return local, result
    raise AssertionError("PyTorch agrees with itself on no draw")


def draws(seed: int, number: int) -> Iterator[Device]:
    """Data sets for device `number`, one after the other."""
    return (
        device(seed, number, SIZES[number % len(SIZES)], INPUT_SHAPE, again) for again in range(40)
    )


@pytest.mark.long
def test_cp_over_two_rounds(federation: Federation, seed: int, tmp_path: Path) -> None:
    model = model_now(federation)
    theirs: list[Mapping[str, np.ndarray] | None] = [None, None]
    ours: list[State | None] = [None, None]
    for number in range(2):  # the second with kept personal models and averaged factors
        old, start = state_now(federation), received_factors(federation, CP)
        updates, folders = [], []
        for place in range(2):
            local, expected = cp_device(model, start, draws(seed, place), ours[place])
            updates.append((expected.factors, len(local.y)))
            folders.append(tmp_path / f"{number}-{place}")
            report = trained(federation, CP, local, folders[-1], theirs[place])
            theirs[place] = report.personal
            kept = personal_state(report)
            assert_equal(kept, expected.personal, start.composed())
            ours[place] = kept  # each round is compared by itself, from where the device stands
        federation.fold([read_update(folder / "update") for folder in folders])
        assert_equal(state_now(federation), oracles.mean_factors(updates).composed(), old)


def test_mixed_fleet(
    federation: Federation, devices: list[Device], seed: int, tmp_path: Path
) -> None:
    """Weights by samples; `cp` devices count once, as composed averaged factors."""
    specs = (FULL, LOW_RANK, SLICE, CP, CP)
    old, model = state_now(federation), model_now(federation)
    start = received_factors(federation, CP)
    tensorized = [cp_device(model, start, draws(seed, number)) for number in (3, 4)]
    devices = [*devices, *(local for local, _ in tensorized)]
    factors = [(result.factors, len(local.y)) for local, result in tensorized]
    updates = [
        (oracles.train_full(model, devices[0], PLAN), len(devices[0].y)),
        (oracles.train_low_rank(model, RANKS, DECAY, devices[1], PLAN), len(devices[1].y)),
        (oracles.train_slice(model, "residual", devices[2], PLAN), len(devices[2].y)),
        (oracles.mean_factors(factors).composed(), sum(weight for _, weight in factors)),
    ]
    one_round(federation, list(zip(specs, devices, strict=True)), tmp_path)
    assert_equal(state_now(federation), oracles.mean(updates, old), old)
    refitted = received_factors(federation, CP).composed()
    for name in start.factors:
        if len(start.factors[name]) == 1:
            assert torch.equal(refitted[name], state_now(federation)[name]), name


@pytest.mark.long
def test_relu_where_no_mask_hangs_on_rounding(seed: int, tmp_path: Path) -> None:
    federation = federation_of("relu_cnn", seed)
    old, model = state_now(federation), model_now(federation)
    closest: list[float] = []
    model.act.register_forward_hook(
        lambda _, x, __: closest.append(x[0].detach().abs().min().item())
    )
    for again in range(100):
        closest.clear()
        local = device(seed, 0, 9, INPUT_SHAPE, again)
        expected = oracles.train_full(model, local, PLAN)
        if min(closest) > 1e-5:
            break
    one_round(federation, [(FULL, local)], tmp_path)
    assert_equal(state_now(federation), expected, old)


@pytest.mark.long
def test_full_of_one_dimension(seed: int, tmp_path: Path) -> None:
    federation = federation_of("smooth_conv1d", seed, (2, 9))
    old, model = state_now(federation), model_now(federation)
    fleet = [device(seed, number, size, (2, 9)) for number, size in enumerate(SIZES)]
    updates = [(oracles.train_full(model, d, PLAN), len(d.y)) for d in fleet]
    one_round(federation, [(FULL, d) for d in fleet], tmp_path)
    assert_equal(state_now(federation), oracles.mean(updates, old), old)
