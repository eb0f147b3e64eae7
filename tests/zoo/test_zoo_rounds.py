"""A round of stock models equals plain PyTorch's, for every family.

Real bundles, trained by the agent in ONNX Runtime and folded by the federation. The other side is
the library's own module: whole, with composed weights, or built with half of every width.
"""

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import oracles
from composed_weights import Table, places, train_composed
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.manifest import Manifest, TensorEntry
from device_agent.formats.update import read_update
from device_agent.training.bundle_training import Trained
from edgetailor import Federation
from oracles import BiLevel, BiLevelResult, Device, Plan, State, Tensorized
from small_models import MISSING, MODELS, WORDS, SmallModel
from trainings import personal_state, train_bundle, training_config
from zoo_models import CLASSES

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"the extra `zoo` is missing: {MISSING}"),
]

PLAN = Plan(batch_size=8, epochs=2, rate=0.02, momentum=0.9, weight_decay=0.01)
DECAY = 0.02
SIZES = (17, 12)
"""Samples of the devices: the last batches have 9 (one left over joins) and 4."""
COMPOSED = {"low-rank": f"low-rank:0.5,keep=0,decay={DECAY}", "slice": "slice:0.6"}
BI_LEVEL = {
    "cp": (
        "cp:2.0,penalty=2.0,personal-steps=2,factor-steps=3,factor-rate=0.001",
        BiLevel(penalty=2.0, personal_steps=2, factor_steps=3, factor_rate=0.001),
    ),
    "pfedme": (
        "pfedme,penalty=2.0,personal-steps=2,local-rate=0.1",
        BiLevel(penalty=2.0, personal_steps=2, factor_steps=1, factor_rate=0.1, adam=False),
    ),
}
FEW = 4
"""How many times PyTorch's own distance between float32 and float64 a result may have."""


THIRDS, QUARTERS = (1, 1, 1), (1, 1, 1, 1)
PIECES: dict[str, tuple[tuple[int, ...], ...]] = {
    "swin": (THIRDS, QUARTERS),  # four patches become one
    "vit": (THIRDS,),
    "gpt2": (THIRDS,),
    "mamba": ((1, 1), (1, 2, 2)),  # values and gates; step sizes and two matrices of states
    "wav2vec2": (QUARTERS,),  # groups of the convolution of positions
}
"""How an axis may be divided into pieces of which `width` keeps the leading halves, as relative
sizes: thirds are queries, keys and values."""


UNUSED = {"wav2vec2.masked_spec_embed"}
"""Parameters that are only for SpecAugment; `width` leaves them whole."""


def device(model: SmallModel, seed: int, number: int) -> Device:
    """Samples whose mean and spread differ between devices."""
    draw = np.random.default_rng([seed, number])
    size = (SIZES[number], *model.shape)
    y = draw.integers(WORDS if model.labels else CLASSES, size=(SIZES[number], *model.labels))
    if model.tokens:
        x = draw.integers(1, WORDS, size=size)
    else:
        x = draw.normal(0.3 * number, 1 + 0.5 * number, size).astype(np.float32)
    return Device(x, y, seed=seed % 1000 + number)


@dataclass
class Zoo:
    """A federation of a model, whose graphs are made once, and its devices."""

    model: SmallModel
    federation: Federation
    first: bytes
    devices: Sequence[Device]

    def state(self) -> State:
        """Parameters and statistics of the global model in float64, each under its first name."""
        module, saved = self.federation.module, self.federation.module.state_dict()
        self.federation.model.load_into(module)
        tensors = chain(module.named_parameters(), module.named_buffers())
        return {
            name: value.detach().double().clone()
            for name, value in tensors
            if name in saved and value.is_floating_point()
        }


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def zoo(request: pytest.FixtureRequest, seed: int) -> Zoo:
    training = training_config(PLAN)
    model = request.param
    federation = Federation(f"small_models:{model.name}", model.shape, training, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # statistics and affine parameters that do not hide a mistake
        for value in federation.model.tensors.values():
            if value.dim() == 1 and value.is_floating_point():
                value.add_(torch.rand(value.shape, generator=generator) * 0.5)
    devices = [device(model, seed, number) for number in range(len(SIZES))]
    return Zoo(model, federation, federation.save(), devices)


@dataclass
class Round:
    """One round of a family on real bundles, and where it started."""

    module: nn.Module
    old: State
    new: State
    table: Table
    received: Mapping[str, Tensor]
    reports: Sequence[Trained]


def one_round(zoo: Zoo, spec: str, folder: Path) -> Round:
    """Every device trains a bundle of `spec`, and the updates are folded."""
    federation = zoo.federation
    federation.load(zoo.first)
    old, module = zoo.state(), copy.deepcopy(federation.module)
    bundle = folder / "bundle"
    files = federation.bundle(spec)
    write_folder(bundle, files)
    reports = []
    for number, device in enumerate(zoo.devices):
        data = folder / f"{number}.npz"
        np.savez(data, x=device.x, y=device.y)
        out = folder / str(number)
        reports.append(train_bundle(bundle, str(data), out, threads=1, seed=device.seed))
    federation.fold([read_update(folder / str(n)) for n in range(len(zoo.devices))])
    table = msgspec.json.decode(files["manifest.json"], type=Manifest).tensors
    received = safetensors.torch.load(files["weights.safetensors"])
    return Round(module, old, zoo.state(), table, received, reports)


def assert_equal(came: State, expected: State, single: State, old: State) -> None:
    """Each tensor within 1e-4 in norm, and what the round changed of it within 1e-3.

    A change may also differ by a float32 weight's own rounding. Where training amplifies rounding,
    as the first steps of Adam on small gradients do, both may differ by a few times as much as
    PyTorch in float32 (`single`) differs from itself in float64 (`expected`).
    """
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        size, change = float(value.norm()), float((value - old[name]).norm())
        difference = float((came[name] - value).norm())
        own = float((single[name] - value).norm())
        said = (
            f"{name}: {difference:.1e}, in float32 {own:.1e}, norm {size:.1e}, change {change:.1e}"
        )
        assert difference <= 1e-4 * size + FEW * own, said
        assert difference <= 1e-3 * change + 5e-7 * size + FEW * own, said


def assert_means_equal(
    zoo: Zoo, came: Round, train: Callable[[Device, torch.dtype], State]
) -> None:
    """The new global model is the mean of what `train` gives, over the elements that it gives."""
    expected, single = (
        mean([(train(device, dtype), len(device.y)) for device in zoo.devices], came)
        for dtype in (torch.float64, torch.float32)
    )
    assert_equal(came.new, expected, single, came.old)


def mean(updates: Sequence[tuple[State, float]], came: Round) -> State:
    """The weighted mean, at the places that the submodel has; other elements stay."""
    new = dict(came.old)
    parts = {str(entry.stands_for): places(entry) for entry in came.table if entry.part}
    for name in updates[0][0].keys() & new.keys():
        values, weights = zip(*((held[name].numpy(), n) for held, n in updates), strict=True)
        averaged = torch.from_numpy(np.average(np.stack(values), axis=0, weights=weights))
        new[name] = new[name].index_put(parts[name], averaged) if name in parts else averaged
    return new


def test_full(zoo: Zoo, tmp_path: Path) -> None:
    came = one_round(zoo, "full", tmp_path)

    def train(device: Device, dtype: torch.dtype) -> State:
        return oracles.train_full(came.module, device, PLAN, dtype)

    assert_means_equal(zoo, came, train)


@pytest.mark.parametrize("family", COMPOSED)
def test_composed_weights(zoo: Zoo, family: str, tmp_path: Path) -> None:
    came = one_round(zoo, COMPOSED[family], tmp_path)

    def train(device: Device, dtype: torch.dtype) -> State:
        return train_composed(came.module, came.table, came.received, DECAY, device, PLAN, dtype)

    assert_means_equal(zoo, came, train)


def test_width(zoo: Zoo, tmp_path: Path) -> None:
    """The library's narrow model, or one whose other channels are zero from start to end.

    These stay zero where no normalisation takes the mean over channels: a batch norm with scale and
    bias zero gives zero, and so do these models' activations of zero.
    """
    came = one_round(zoo, "width:0.5", tmp_path)
    check_leading(came, PIECES.get(zoo.model.name, ()))
    narrow = getattr(importlib.import_module("small_models"), f"{zoo.model.name}_narrow", None)

    def train(device: Device, dtype: torch.dtype) -> State:
        if narrow is None:
            return train_composed(came.module, came.table, came.received, 0, device, PLAN, dtype)
        small = narrow()
        blocks = {
            str(e.stands_for): block(came.old[str(e.stands_for)], e)
            for e in came.table
            if e.name in came.received and e.name not in UNUSED
        }
        others = {name for name in small.state_dict() if name not in came.old} | UNUSED
        assert set(small.load_state_dict(blocks, strict=False).missing_keys) <= others
        trained = oracles.train_full(small, device, PLAN, dtype)
        return {name: value for name, value in trained.items() if name not in UNUSED}

    assert_means_equal(zoo, came, train)


def block(value: Tensor, entry: TensorEntry) -> Tensor:
    """The elements of a global tensor that a submodel has."""
    return value[places(entry)] if entry.part else value


def check_leading(came: Round, pieces: Sequence[tuple[int, ...]]) -> None:
    """Each axis is whole, or has the leading half of itself or of each of its pieces."""
    assert any(entry.part for entry in came.table)
    for entry in came.table:
        if entry.part is None:
            continue
        for size, ranges in zip(came.old[str(entry.stands_for)].shape, entry.part, strict=True):
            halves = [leading_halves(size, parts) for parts in ((1,), *pieces)]
            assert ranges in (((0, size),), *halves), f"{entry.name}: {ranges}"


def leading_halves(size: int, parts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ranges of the leading half of each piece of an axis, for pieces of sizes like `parts`."""
    unit = size // sum(parts)
    starts = accumulate(parts, initial=0)
    return tuple(
        (at * unit, at * unit + (n * unit + 1) // 2) for at, n in zip(starts, parts, strict=False)
    )


@pytest.mark.parametrize("family", BI_LEVEL)
def test_bi_level(zoo: Zoo, family: str, tmp_path: Path) -> None:
    spec, settings = BI_LEVEL[family]
    came = one_round(zoo, spec, tmp_path)
    start = received_factors(came)
    results, singles = (
        [oracles.train_cp(came.module, start, d, PLAN, settings, None, dtype) for d in zoo.devices]
        for dtype in (torch.float64, torch.float32)
    )
    for report, result, single in zip(came.reports, results, singles, strict=True):
        assert_equal(personal_state(report), result.personal, single.personal, came.old)
    mean_of_results, mean_of_singles = (
        {name: value for name, value in folded(zoo, own).items() if name in came.old}
        for own in (results, singles)
    )
    assert_equal(came.new, mean_of_results, mean_of_singles, came.old)


def folded(zoo: Zoo, results: Sequence[BiLevelResult]) -> State:
    """The global model of averaged factors."""
    updates = [(r.factors, len(d.y)) for r, d in zip(results, zoo.devices, strict=True)]
    return oracles.mean_factors(updates).composed()


def received_factors(came: Round) -> Tensorized:
    """Factors and statistics as the bundle's files say them."""
    start = Tensorized({})
    for entry in came.table:
        if entry.stands_for is None or entry.name not in came.received:
            continue
        value = came.received[entry.name].double()
        if entry.role == "buffer":
            start.statistics[entry.stands_for] = value
        else:
            start.factors.setdefault(entry.stands_for, []).append(value)
    return start
