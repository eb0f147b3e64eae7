"""Steps that compute activations again give the same numbers, bit for bit, in less memory."""

from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from device_agent.formats.graph_forms import BLOCKS, blocked_form, form_file
from device_agent.runtime.blocked_probe import block_size
from device_agent.runtime.onnx_runtime import OnnxSession
from edgetailor import TrainingConfig, export, split
from exporters.export import compile_graphs
from exporters.memory.liveness import execution_order, in_place_of
from exporters.memory.onnx_footprint import SizedGraph, footprint
from exporters.memory.static_shapes import at_batch
from exporters.onnx.forms.blocked_layout import blocked, way_to_rewrite
from exporters.onnx.graph_operations import effort
from exporters.onnx.onnx_writer import to_onnx
from exporters.onnx.recomputed.forward_pass import repeated_share
from exporters.programs.program import ProgramSignature
from parameters import half_quick, some_long
from refusals import refused
from toolkit.submodels.global_model import from_model
from training_steps import drawn

CLASSES = 4
BATCH, SAMPLES = 32, 20
"""What checkpoints are chosen for, and what the graphs run on: more than half of a batch, because a
blocked form may compute with its halves. Those forms also run on whole batches."""


class Residual(nn.Module):
    """Batch norms, dropout and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.relu(self.norm(self.first(x))))
        return torch.relu(self.last(self.second(y)) + x)


class Plain(nn.Module):
    """A shortcut without norms: the runtime joins convolution, sum and ReLU where it can."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) + x)


class Transformed(nn.Module):
    """A layer of a transformer, with its parts in fewer operators than PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.parts, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.parts(self.norm(x)).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Tokens(nn.Module):
    """Two layers of a transformer, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Transformed(), nn.Dropout(0.1), Transformed())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Shared(nn.Module):
    """A convolution, a norm and a linear layer that each occur several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = (nn.Conv2d(n, 16, 3, padding=1) for n in (3, 16))
        self.norm, self.last = nn.BatchNorm2d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = x + F.gelu(self.norm(self.conv(x)))
        x = torch.tanh(self.last(x.permute(0, 2, 3, 1)))
        x = torch.tanh(F.linear(x, self.last.weight.t()))
        return x.mean((1, 2))[:, :CLASSES]


class Normed(nn.Module):
    """A shortcut around a norm, an activation without a blocked form, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm2d(32), nn.Dropout(0.2)
        self.conv = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.drop(F.gelu(self.norm(x))))


def normed() -> nn.Module:
    """In a blocked form, copies of its values may be laid out otherwise and so give other bits."""
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), Normed(), Normed(), Normed(), *end)


def residual() -> nn.Module:
    blocks = [Residual(16) for _ in "123"]
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *end)


def without_norms(count: int = 6) -> nn.Module:
    blocks = [Plain(16) for _ in range(count)]
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *end)


def points() -> nn.Module:
    """Layers of one pixel behind activations that have no blocked form."""
    layers = [(nn.BatchNorm2d(16), nn.LeakyReLU(0.2), nn.Conv2d(16, 16, 1)) for _ in "123"]
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *chain(*layers), *end)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # model, shape of a sample, least segments that run again with recompute=yes
    "residual": (residual, (3, 16, 16), 2),
    "without norms": (without_norms, (3, 16, 16), 1),
    "attention": (Tokens, (16, 32), 1),
    "points": (points, (3, 16, 16), 1),
    "normed": (normed, (3, 20, 20), 1),
}
ARENAS = {
    # largest share of the arena of a step that computes nothing again
    "residual, yes": 0.7,
    "without norms, yes": 0.9,
    "attention, yes": 0.7,
    "points, yes": 0.9,
    "normed, yes": 0.9,
    "residual, some": 0.9,
    "without norms, some": 0.9,
    "attention, some": 0.85,
}
LARGE = {(3, 16, 16): (3, 64, 64), (16, 32): (256, 32)}
"""By default, nothing is computed again for the small samples of these models."""


def steps(
    model: nn.Module, shape: tuple[int, ...], again: str = "yes", **training: object
) -> list[ProgramSignature]:
    """The training step of `model` without and with recomputation."""
    config = TrainingConfig(batch_size=BATCH, weight_decay=0.01, **training)  # type: ignore[arg-type]
    specs = ("full,recompute=no", f"full,recompute={again}")
    return [split(model, spec, shape, config).program.signatures[0] for spec in specs]


def after_three_steps(
    signature: ProgramSignature,
    graph: bytes,
    overwritten: tuple[str, ...],
    file: Path,
    seed: int,
    samples: int = SAMPLES,
) -> dict[str, np.ndarray]:
    """Losses and state after three steps in the agent's runtime, new state over the old."""
    file.write_bytes(graph)
    session = OnnxSession(file, threads=1)
    feeds = drawn(signature, samples, np.random.default_rng(seed))
    inputs = {port.state: port.name for port in signature.inputs if port.state is not None}
    over = {p.name: inputs[p.state] for p in signature.outputs if p.name in overwritten}
    losses = []
    for _ in range(3):
        results = session.run(feeds, over)
        losses.append(results["loss"])
        feeds |= {inputs[p.state]: results[p.name] for p in signature.outputs if p.state}
    return {name: value.copy() for name, value in results.items()} | {"losses": np.array(losses)}


class Graphs:
    """A model by name, its training step, and its graph without and with recomputation."""

    def __init__(self, case: str) -> None:
        self.name, self.again = case.split(", ")
        make, shape, self.segments = MODELS[self.name]
        self.largest_arena = ARENAS[case]
        signatures = steps(make(), LARGE[shape] if self.again == "some" else shape, self.again)
        self.signature = signatures[0]
        self.graphs = [to_onnx(signature) for signature in signatures]


LONG = (
    "normed, yes",
    "points, yes",
    "without norms, yes",
    "attention, yes",
    "residual, some",
    "without norms, some",
)


@pytest.fixture(scope="module", params=half_quick(some_long(ARENAS, *LONG)))
def case(request: pytest.FixtureRequest) -> Graphs:
    return Graphs(request.param)


def test_the_update_is_the_same_bit_for_bit(case: Graphs, seed: int, tmp_path: Path) -> None:
    plain, again = case.graphs
    names = in_place_of(again)
    if case.again == "yes":  # else a small weight may be read late, by what is computed again
        assert {name for name in in_place_of(plain) if name.endswith("weight+")} <= set(names)
    file = tmp_path / "train.onnx"
    expected = after_three_steps(case.signature, plain, (), file, seed)
    for overwritten in ((), names):
        came = after_three_steps(case.signature, again, overwritten, file, seed)
        for name, value in expected.items():
            np.testing.assert_array_equal(came[name], value, err_msg=name)


def test_it_takes_less_memory(case: Graphs) -> None:
    before, after = (footprint(graph, BATCH).arena for graph in case.graphs)
    assert after <= case.largest_arena * before


def test_it_is_known_how_much_is_computed_again(case: Graphs) -> None:
    """It is by how much the work of the step grows, but for what is gained or lost elsewhere."""
    plain, again = (
        sum(map(effort, at_batch(onnx.load_from_string(graph), BATCH).graph))
        for graph in case.graphs
    )
    shares = [repeated_share(SizedGraph(graph, BATCH)) for graph in case.graphs]
    assert shares == [0, pytest.approx(again / plain - 1, abs=0.02)]


def test_a_segment_runs_again_when_a_gradient_has_reached_it(case: Graphs) -> None:
    """Behind the loss: segments apart from each other, with gradients of others between them."""
    if case.again != "yes":
        return  # single values need not be segments
    order = execution_order(at_batch(onnx.load_from_string(case.graphs[1]), BATCH).graph)
    indices = {str(value.name): index for index, node in enumerate(order) for value in node.outputs}
    again = {name: index for name, index in indices.items() if name.endswith("_repeated")}
    products = [n for n, index in again.items() if order[index].op_type in ("Conv", "MatMul")]
    apart = [products[0], *(b for a, b in pairwise(products) if indices[b] > indices[a] + 50)]
    firsts = [indices[name.removesuffix("_repeated")] for name in apart]
    assert len(firsts) >= case.segments
    assert firsts == sorted(firsts, reverse=True)  # the last segment comes first
    assert min(again.values()) > max(firsts)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocked_forms_keep_the_gain(case: Graphs, block: int, seed: int, tmp_path: Path) -> None:
    forms = [blocked(graph, block, BATCH) for graph in case.graphs]
    if case.name == "attention":
        assert forms == [None, None]
        return
    sized = [SizedGraph(graph, BATCH) for graph in case.graphs]
    peaks = [graph.footprint(way_to_rewrite(graph, block)).arena for graph in sized]
    assert peaks[1] <= case.largest_arena * peaks[0]
    if block_size() != block:
        return  # this machine computes other numbers with such blocks
    file = tmp_path / form_file("train.onnx", blocked_form(block))
    for samples in (SAMPLES, BATCH):
        results = [
            after_three_steps(case.signature, form or b"", in_place_of(graph), file, seed, samples)
            for form, graph in zip(forms, case.graphs, strict=True)
        ]
        for key, value in results[0].items():
            np.testing.assert_array_equal(results[1][key], value, err_msg=key)


def test_by_default_some_activations_are_computed_again() -> None:
    """With `yes` as well, although no segment of this net gains anything: single values do."""
    model = Shared()
    specs = ("full", "full,recompute=some", "full,recompute=no", "full,recompute=yes")
    default, some, no, yes = (split(model, s, (3, 32, 32)).program.signatures[0] for s in specs)
    assert default.recompute == some.recompute
    peaks = {
        signature: footprint(to_onnx(signature), BATCH).process for signature in (default, no, yes)
    }
    assert max(peaks[default], peaks[yes]) <= 0.9 * peaks[no]


def test_a_step_that_gains_nothing_stays_as_it_is() -> None:
    plain, again = steps(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES)), (8,))
    assert to_onnx(plain) == to_onnx(again)


def test_checkpoints_are_chosen_for_the_batch_of_the_schedule() -> None:
    """In small batches the nodes that run again take more memory than they save."""
    graphs = {}
    for spec, batch in (("no", BATCH), ("yes", BATCH), ("yes", 2)):
        config = TrainingConfig(batch_size=batch)
        submodel = split(without_norms(3), f"full,recompute={spec}", (3, 8, 8), config)
        graphs[spec, batch] = to_onnx(submodel.program.signatures[0])
    assert graphs["yes", 2] == graphs["no", BATCH]  # graphs serve all batches
    plain, again = (footprint(graphs[spec, BATCH], BATCH).process for spec in ("no", "yes"))
    assert again < plain


def test_only_training_steps_change() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    program = split(model, "pfedme,recompute=yes", (8,)).program
    assert [s.name for s in program.signatures if s.recompute] == ["personal_step", "local_step"]
    assert program.submodel == "pfedme,recompute=yes"


def test_it_passes_verification(tmp_path: Path) -> None:
    model = without_norms(3)
    submodel = split(model, "slice:1.conv,recompute=yes", (3, 16, 16))
    exported = export(submodel, from_model(model), tmp_path / "b")
    assert exported.verdict is not None
    assert exported.verdict.passed
    assert b"_repeated" in exported.graphs["train"].data


def test_tflite_cannot_do_it() -> None:
    compile_graphs(
        split(nn.Sequential(nn.Linear(8, CLASSES)), "full", (8,)).program, format="tflite"
    )
    program = split(nn.Sequential(nn.Linear(8, CLASSES)), "full,recompute=yes", (8,)).program
    with refused("export.recomputation-needs-onnx", submodel="full,recompute=yes", format="tflite"):
        compile_graphs(program, format="tflite")
