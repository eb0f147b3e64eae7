"""A slice at every cut point of a model trains and predicts as PyTorch does with the rest frozen.

In the oracle the modules before the cut are in inference mode and their parameters do not train.
"""

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import eager
from edgetailor import TrainingConfig, split
from exporters.export import export
from exporters.recording.capture import SharedRecording, capture
from parameters import half_quick, some_long
from refusals import refused
from toolkit.cutting import cut_points
from toolkit.cutting.cut_points import Cutter
from toolkit.families import check_spec
from toolkit.slicing.cut_choice import choose_cut
from toolkit.submodels.global_model import from_model
from toolkit.submodels.submodel import Submodel

CLASSES, BATCH, WORDS = 3, 4, 11
TRAINING = TrainingConfig(batch_size=BATCH, momentum=0.0)


class Block(nn.Module):
    """A residual block with batch norms and a branch at half the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.nb = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        low = F.avg_pool2d(torch.tanh(self.na(self.a(x))), 2)
        return x + F.interpolate(self.nb(self.b(low)), scale_factor=2.0)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Dense(nn.Module):
    """Each layer reads all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 + 4 * i, 4) for i in range(4))
        self.head = nn.Linear(22, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(torch.tanh(layer(torch.cat(found, 1))))
        return self.head(torch.cat(found, 1))


class Layer(nn.Module):
    """A decoder layer with rotary tables and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
        scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(~mask, -1e9)
        return x + self.out(scores.softmax(-1) @ v)


class Decoder(nn.Module):
    """Reads the token ids again at the end: the class is that of the last token that is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("frequencies", 1.0 / 10 ** torch.arange(4))

    def forward(self, ids: Tensor) -> Tensor:
        n, t = ids.shape
        x, positions = self.embed(ids), torch.arange(t, device=ids.device)
        angles = (positions[:, None] * self.frequencies).repeat(1, 2).expand(n, -1, -1)
        mask = (positions[:, None] >= positions).expand(n, t, t)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        last = ((ids != 0) * positions).argmax(1)
        return self.head(x[torch.arange(n), last])


class Translator(nn.Module):
    """An encoder-decoder: the second embedding reads the token ids after the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.encode = nn.Embedding(WORDS, 6), nn.Linear(6, 6)
        self.target, self.mix = nn.Embedding(WORDS, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        memory = torch.tanh(self.encode(self.source(ids)))
        query = self.mix(self.target(ids.roll(1, 1)))
        return self.head((query @ memory.transpose(1, 2)).softmax(-1).matmul(memory).mean(1))


class StepsFirst(nn.Module):
    """(steps, batch, features), with a long skip and zeros of an earlier activation's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x.transpose(0, 1)))
        second = torch.tanh(self.b(first))
        third = torch.tanh(self.c(second)) + torch.zeros_like(first)
        return self.head((third * first).mean(0))


class TwoHeads(nn.Module):
    """Computes another output last, with a batch norm whose result nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
        self.head, self.other, self.norm = nn.Linear(8, CLASSES), nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return {"logits": self.head(x), "other": self.norm(self.other(x))}


class Noisy(nn.Linear):
    """Runs another operator in training than in prediction."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sin(x) if self.training else x)


class TwoModes(nn.Module):
    """Runs other operators in training than in prediction, before and after layers `c`, `d`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = (nn.Linear(6, 6) for _ in range(3))
        self.b, self.head = Noisy(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(self.a(x)))
        y = self.d(torch.tanh(self.c(x)))
        return self.head(y.cos() + x if self.d.training else y + x)


class Position(nn.Module):
    """A trained table that two layers read: a cut between them keeps it fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 5, 4))
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.expand(x.shape[0], -1, -1)
        x = torch.tanh(self.a(x + table))
        return self.head((torch.tanh(self.b(x)) * table).mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "residual": (
        *(Residual, (2, 4, 4)),
        [
            *(f"blocks.{i}.{name}" for i in range(2) for name in ("a", "na", "b", "nb")),
            "head",
        ],
    ),
    "dense": (Dense, (6,), [*(f"layers.{i}" for i in (1, 2, 3)), "head"]),
    "decoder": (
        *(Decoder, (5,)),
        [*(f"layers.{i}.{name}" for i in range(2) for name in ("norm", "qkv", "out")), "head"],
    ),
    "translator": (Translator, (5,), ["encode", "target", "mix", "head"]),
    "steps-first": (StepsFirst, (4, 5), ["b", "c", "head"]),
    "two-heads": (TwoHeads, (6,), ["b", "head", "other", "norm"]),
    "two-modes": (TwoModes, (6,), ["b", "c", "d", "head"]),
    "position": (Position, (5, 4), ["a", "b", "head"]),
}
CUTS = [(name, module) for name, (_, _, modules) in MODELS.items() for module in modules]


def samples(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        return torch.randint(WORDS, (BATCH, *shape))
    return torch.randn(BATCH, *shape, dtype=torch.float64)


@functools.cache
def recorded(name: str, seed: int) -> tuple[nn.Module, SharedRecording]:
    """A model with random statistics, recorded once for all of its slices."""
    model = built(name, seed)
    return model, SharedRecording(model, MODELS[name][1])


def built(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name][0]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def logits(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output["logits"] if isinstance(output, dict) else output


@pytest.mark.parametrize("name", half_quick(MODELS))
def test_all_cut_points(name: str, seed: int) -> None:
    (model, recording), (_, shape, modules) = recorded(name, seed), MODELS[name]
    with recording:
        assert list(Cutter(capture(model, shape)).points_by_module(BATCH)) == modules


@pytest.mark.parametrize(
    ("name", "module"),
    half_quick(
        some_long(
            CUTS,
            *(cut for cut in CUTS if cut[0] == "decoder" and cut[1] != "layers.1.norm"),
            *(("residual", f"blocks.{block}") for block in ("0.b", "0.nb", "1.a", "1.na")),
        )
    ),
)
def test_a_step_is_that_of_pytorch_with_the_rest_frozen(name: str, module: str, seed: int) -> None:
    (model, recording), shape = recorded(name, seed), MODELS[name][1]
    with recording:
        submodel = split(model, f"slice:{module}", shape, TRAINING)
    torch.manual_seed(seed)
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    twin = copy.deepcopy(model).double()
    x, y = samples(model, shape), torch.randint(CLASSES, (BATCH,))
    recording = eager.recorded(submodel, state, x)
    predicted = eager.call(submodel, "predict", state, x=recording)["output"]
    expected = logits(twin.eval(), x)
    # Several outputs are predicted side by side.
    predicted = predicted[:, : expected.shape[1]]
    torch.testing.assert_close(predicted, expected, rtol=1e-9, atol=1e-9)

    trained = {e.name for e in submodel.program.tensors if e.role == "parameter"}
    assert f"{module}.weight" in trained
    for path, one in twin.named_modules():
        own = {f"{path}.{n}".lstrip(".") for n, _ in one.named_parameters(recurse=False)}
        one.training = bool(own & trained)
    loss = cross_entropy(logits(twin, x), y)
    loss.backward()
    new = eager.call(submodel, "train", state, x=recording, y=y, rate=1.0)
    torch.testing.assert_close(new["loss"], loss.detach(), rtol=1e-9, atol=1e-12)
    for parameter, value in twin.named_parameters():
        if parameter in trained:
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            change = state[parameter] - new[parameter]
            torch.testing.assert_close(change, gradient, rtol=1e-8, atol=1e-10, msg=parameter)
    for entry in submodel.program.tensors:
        if entry.role == "buffer":
            value = twin.state_dict()[entry.name]
            torch.testing.assert_close(new[entry.name], value, msg=entry.name)


def counted(cutter: Cutter, place: int) -> int:
    """The load of the graph after `place`, from the graph itself."""
    fixed = sum(cutter.captured.parameters[name].numel() for name in cutter.fixed_after(place))
    return cutter.load(cutter.trained(place), BATCH) - fixed


@pytest.mark.parametrize("name", half_quick(some_long(MODELS, "decoder")))
def test_the_largest_slice_within_the_capacity_with_the_smallest_recording(
    name: str, seed: int
) -> None:
    (model, recording), (_, shape, _) = recorded(name, seed), MODELS[name]
    with recording:
        cutter = Cutter(capture(model, shape))
    loads = {point.position: counted(cutter, point.position) for point in cutter.points}
    full = cutter.load(cutter.captured.training, BATCH)
    assert [cutter.loads(BATCH)[place] for place in loads] == list(loads.values())
    for load in set(loads.values()):
        came = choose_cut(cutter, check_spec(f"slice:{load / full + 1e-9:.12f}"), BATCH)
        assert loads[came.position] == load
        assert came.recorded == min(p.recorded for p in cutter.points if loads[p.position] == load)
        rows = cutter.frozen(-1, came.position)(samples(model, shape).to(cutter_dtype(cutter)))
        assert rows[0].numel() == came.recorded


def cutter_dtype(cutter: Cutter) -> torch.dtype:
    return torch.int64 if cutter.captured.sample_dtype == "int64" else torch.float32


def test_nothing_but_activations_and_ids_is_recorded() -> None:
    """Rotary tables, masks and positions are computed on both sides."""
    points = Cutter(capture(Decoder(), (5,))).points_by_module(BATCH)
    assert {module: point.recorded for module, point in points.items()} == {
        "layers.0.norm": 5 * 8 + 5,
        "layers.0.qkv": 2 * 5 * 8 + 5,
        "layers.0.out": 2 * 5 * 8 + 5,
        "layers.1.norm": 5 * 8 + 5,
        "layers.1.qkv": 2 * 5 * 8 + 5,
        "layers.1.out": 2 * 5 * 8 + 5,
        "head": 8,
    }


def test_ids_that_float32_cannot_hold_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cut_points.EXACT, "float32", WORDS - 1)  # 2^24 rows need too much memory
    with refused("spec.unknown-cut-point", cut_points=["head"]):
        split(Decoder(), "slice:layers.1", (5,))


def test_ids_that_float16_cannot_hold_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.WORDS", 2**11 + 1)
    with refused("spec.unknown-cut-point", cut_points=["head"]):
        split(Decoder(), "slice:layers.1,recording=float16", (5,))


@pytest.mark.parametrize(
    ("name", "module"),
    some_long([("decoder", "layers.1"), ("residual", "blocks.1.b")], ("decoder", "layers.1")),
)
def test_recorded_rows_in_a_bundle(name: str, module: str, seed: int, tmp_path: Path) -> None:
    """Exporting compares the signatures with PyTorch."""
    model = built(name, seed)
    submodel: Submodel = split(model, f"slice:{module}", MODELS[name][1], TRAINING)
    weights = from_model(model)
    done = export(
        submodel.program, submodel.cut(weights), tmp_path / "b", base=weights.fingerprint()
    )
    assert done.verdict is not None


class Dropped(nn.Module):
    """Layers with a dropout that is a part of its own: it computes nothing when it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.1, self.training)
        return self.last(F.relu(self.second(x)))


def test_a_part_that_computes_nothing_is_exported(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    model = Dropped()
    submodel, weights = split(model, "slice:0.5", (6,), TrainingConfig()), from_model(model)
    verdict = export(
        submodel.program, submodel.cut(weights), tmp_path / "b", base=weights.fingerprint()
    ).verdict
    assert verdict is not None
    assert verdict.passed
