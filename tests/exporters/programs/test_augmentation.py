"""Random changes of samples in a training step, against numpy on the same random numbers."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional

from edgetailor import TrainingConfig, export, pack_inputs, split
from exporters.programs.seeded_random import random_integers, uniform_numbers
from exporters.programs.training.augmentation import fitting, parse_augmentation
from exporters.programs.training.augmented_samples import FIRST_SITE, SITES, augmented
from parameters import half_quick, needs_litert, some_long
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

BATCH, RATE = 6, 0.1
PICTURE, SERIES, CHANNELS = (2, 5, 7), (9, 2), (2, 9)
ALL = [
    *((text, PICTURE) for text in ("flip", "flip-vertical", "shift:2", "noise:0.3")),
    *((text, SERIES) for text in ("shift:3:first", "mask:4:first", "noise:2")),
    *((text, CHANNELS) for text in ("shift:3:last", "mask:4:last")),
    *((text, (9,)) for text in ("shift:3", "mask:4")),
]


def draws(seed: int, count: int, number: int = 0, draw: int = 0) -> np.ndarray:
    """A whole number below `count` for each sample."""
    site = FIRST_SITE + SITES * number + draw
    return random_integers((BATCH, 1), torch.tensor(seed), site).numpy()[:, 0] % count


def moved(x: np.ndarray, axis: int, places: int) -> np.ndarray:
    """Element i becomes element i + places; zeros come from outside."""
    result, size = np.zeros_like(x), x.shape[axis]
    for i in range(size):
        if 0 <= i + places < size:
            index = [slice(None)] * x.ndim
            source = [slice(None)] * x.ndim
            index[axis], source[axis] = i, i + places
            result[tuple(index)] = x[tuple(source)]
    return result


def in_numpy(x: np.ndarray, text: str, seed: int, number: int = 0) -> np.ndarray:
    kind, *rest = text.split(":")
    if kind == "noise":
        sites = [FIRST_SITE + SITES * number + n for n in range(2)]
        u, v = (uniform_numbers(x.shape, torch.tensor(seed), n).double().numpy() for n in sites)
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * math.pi * v)
        return x + float(rest[0]) * normal
    if kind.startswith("flip"):
        axis = 2 if kind == "flip" else 1
        chosen = draws(seed, 2, number)
        return np.stack([np.flip(s, axis) if c else s for s, c in zip(x, chosen, strict=True)])
    amount, last = int(rest[0]), rest[1:] == ["last"]
    axis = 1 if last else 0
    if kind == "mask":
        starts = draws(seed, x.shape[1 + axis], number)
        lengths = draws(seed, amount + 1, number, 1)
        result = x.copy()
        for sample, start, length in zip(result, starts, lengths, strict=True):
            sample[(slice(None),) * axis + (slice(start, start + length),)] = 0
        return result
    axes = (1, 2) if x.ndim == 4 else (axis,)
    for draw, own in enumerate(axes):
        places = draws(seed, 2 * amount + 1, number, draw) - amount
        x = np.stack([moved(s, own, p) for s, p in zip(x, places, strict=True)])
    return x


@pytest.mark.parametrize(("text", "shape"), ALL)
def test_each_change_is_that_of_numpy(text: str, shape: tuple[int, ...], seed: int) -> None:
    number = seed % (2**31 - 1)
    x = np.random.default_rng(seed).normal(size=(BATCH, *shape))
    given = fitting([text], shape, plain=True)
    result = augmented(torch.from_numpy(x), given, torch.tensor(number)).numpy()
    # Normal numbers are computed in float32.
    assert np.allclose(result, in_numpy(x, text, number), rtol=0, atol=1e-5)
    # The next seeds make other changes. A coin for each of six samples is often the same.
    neighbours = [torch.tensor((number + n) % (2**31 - 1)) for n in range(1, 9)]
    others = [augmented(torch.from_numpy(x), given, own).numpy() for own in neighbours]
    assert any(not np.array_equal(result, other) for other in others)


MANY = 4000


def shares_are(came: np.ndarray, values: range, share: float) -> None:
    """Each of `values` is `share` of all, within 5 standard deviations; there are no others."""
    assert set(came.tolist()) == set(values)
    deviation = math.sqrt(share * (1 - share) / len(came))
    for value in values:
        assert abs((came == value).mean() - share) <= 5 * deviation, value


def test_changes_are_as_frequent_as_documented(seed: int) -> None:
    """Seen in the changed samples alone, without the product's own random numbers."""
    number = torch.tensor(seed % (2**31 - 1))

    def changes(text: str, sample: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(np.broadcast_to(sample, (MANY, *sample.shape)).copy())
        return augmented(x, fitting([text], sample.shape, plain=True), number).numpy()

    for text, picture in (("flip", [[[0.0, 1.0]]]), ("flip-vertical", [[[0.0], [1.0]]])):
        flipped = changes(text, np.array(picture)).reshape(MANY, 2)[:, 0]
        shares_are(flipped, range(2), 1 / 2)
    middle = changes("shift:3", np.arange(9.0))[:, 4]
    shares_are(middle - 4, range(-3, 4), 1 / 7)
    rows, columns = np.divmod(changes("shift:2", np.arange(35.0).reshape(1, 5, 7))[:, 0, 2, 3], 7)
    for places in (rows - 2, columns - 3):
        shares_are(places, range(-2, 3), 1 / 5)
    masked = changes("mask:4", np.ones(9)) == 0
    lengths, starts = masked.sum(1), masked.argmax(1)
    shares_are(starts[lengths > 0], range(9), 1 / 9)
    # A mask that starts later than step 5 may end with the series.
    early = lengths[(lengths == 0) | (starts <= 5)]
    assert set(early.tolist()) == set(range(5))
    shares_are(lengths[(lengths > 0) & (starts <= 5)], range(1, 5), 1 / 4)
    assert abs((lengths == 0).mean() - 1 / 5) <= 5 * math.sqrt(0.16 / MANY)


def test_several_changes_draw_their_own_numbers(seed: int) -> None:
    number = seed % (2**31 - 1)
    texts = ["shift:2", "shift:2", "flip"]
    x = expected = np.random.default_rng(seed).normal(size=(BATCH, *PICTURE))
    for place, text in enumerate(texts):
        expected = in_numpy(expected, text, number, place)
    given = fitting(texts, PICTURE, plain=True)
    result = augmented(torch.from_numpy(x), given, torch.tensor(number)).numpy()
    assert np.array_equal(result, expected)


class Small(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(math.prod(shape), 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(x.flatten(1))))


STEPS = [
    (format, texts, shape)
    for format in ("onnx", "tflite")
    for texts, shape in (
        (("flip", "shift:2", "noise:0.1"), PICTURE),
        (("shift:3:first", "mask:4:first"), SERIES),
        (("mask:4:last", "noise:0.1"), CHANNELS),
    )
]


@pytest.mark.parametrize(
    ("format", "texts", "shape"), half_quick(some_long(STEPS, *STEPS[1:3], *STEPS[4:]))
)
def test_a_step_on_changed_samples(
    format: str, texts: tuple[str, ...], shape: tuple[int, ...], seed: int, tmp_path: Path
) -> None:
    needs_litert(format)
    torch.manual_seed(seed)
    draw, own = np.random.default_rng(seed), seed % 10**6
    x, y = draw.normal(size=(BATCH, *shape)).astype(np.float32), draw.integers(3, size=BATCH)
    model = Small(shape)
    config = TrainingConfig(BATCH, learning_rate=RATE, momentum=0.0, augment=texts)
    submodel = split(model, "full", shape, config)
    read = {s.name: [port.kind for port in s.inputs] for s in submodel.program.signatures}
    assert "seed" in read["train"]
    assert "seed" not in read["predict"] + read["evaluate"]
    bundle = tmp_path / "bundle"
    export(submodel, from_model(model), bundle, format=format)
    train_bundle(bundle, (x, y), tmp_path / "update", seed=own)
    (file,) = (tmp_path / "update").glob("*.safetensors")
    trained = load_file(file)

    # What docs/reference/bundle.md says of the order of samples and of seeds.
    order = np.random.default_rng([own, 0]).permutation(BATCH)
    fed = int(np.random.default_rng([own, 1]).integers(2**31 - 1))
    changed = x[order].astype(np.float64)
    for place, text in enumerate(texts):
        changed = in_numpy(changed, text, fed, place)
    right = copy.deepcopy(model).double()
    before = {n: p.detach().clone().numpy() for n, p in right.named_parameters()}
    loss = functional.cross_entropy(right(torch.from_numpy(changed)), torch.from_numpy(y[order]))
    loss.backward()
    for name, value in right.named_parameters():
        change = RATE * value.grad.numpy()
        off = np.linalg.norm(before[name] - trained[name] - change)
        assert off <= 1e-5 * np.linalg.norm(change) + 2**-22 * np.linalg.norm(before[name])


def test_slices_train_without_it() -> None:
    config = TrainingConfig(augment=("noise:0.1",))
    whole, part = (split(Small((4,)), spec, (4,), config) for spec in ("full", "slice:last"))
    kinds = [
        [port.kind for s in submodel.program.signatures for port in s.inputs]
        for submodel in (whole, part)
    ]
    assert "seed" in kinds[0]
    assert "seed" not in kinds[1]


@pytest.mark.parametrize(
    "text",
    ["", "flop", "flip:2", "shift", "shift:0", "shift:x", "noise:0", "noise:nan", "mask:2:middle"],
)
def test_unknown_changes_are_refused(text: str) -> None:
    with refused("option.invalid-value", option="augment"):
        parse_augmentation(text)
    with refused("option.invalid-value", option="augment"):
        TrainingConfig(augment=(text,))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("flip", SERIES),
        ("shift:5", PICTURE),
        ("shift:2", SERIES),
        ("shift:2:first", PICTURE),
        ("mask:2", PICTURE),
        ("mask:9:first", SERIES),
        ("shift:1", (2, 3, 4, 5)),
    ],
)
def test_changes_that_do_not_fit_are_refused(text: str, shape: tuple[int, ...]) -> None:
    with refused("config.augmentation-misfit", given=text, shape=list(shape)):
        split(Small(shape), "full", shape, TrainingConfig(augment=(text,)))


def test_ids_are_not_changed() -> None:
    tokens = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2))
    config = TrainingConfig(augment=("noise:0.1",))
    with refused("config.augmentation-misfit"):
        split(tokens, "full", (3,), config)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.last(torch.cat([a, b], 1))

    with refused("config.augmentation-misfit"):
        split(pack_inputs(Two(), a=(1,), b=(2,)), "full", (3,), config)
