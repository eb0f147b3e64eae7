"""Frozen weights as 8-bit integers with scales: their numbers, and the graphs that hold them."""

import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from device_agent.runtime.onnx_runtime import OnnxSession
from edgetailor import TrainingConfig, split
from exporters.bundle_writer import peak_bytes
from exporters.embedded_weights import with_constants
from exporters.export import compile_graphs, traced, with_forms
from exporters.int8_scales import int8_bytes, rounded, to_int8
from exporters.programs.program import Program
from exporters.programs.program_identity import graphs_key
from exporters.runtime_graph import Graphs
from exporters.verification.verify import verify
from refusals import refused
from toolkit.submodels.global_model import GlobalModel, from_model
from toolkit.submodels.submodel import Submodel

SHAPE, TRAINING = (3, 8, 8), TrainingConfig(batch_size=4)


def model() -> nn.Sequential:
    """A small and a large convolution, a large dense layer, and a classifier."""
    return nn.Sequential(
        OrderedDict(
            small=nn.Conv2d(3, 64, 3, padding=1),
            bn=nn.BatchNorm2d(64),
            act=nn.Tanh(),
            # More than 2^20 bytes as float32: a session does not compute them when it opens.
            large=nn.Conv2d(64, 512, 3, padding=1, stride=4),
            flat=nn.Flatten(),
            dense=nn.Linear(512 * 2 * 2, 700),
            bend=nn.Tanh(),
            classifier=nn.Linear(700, 4),
        )
    )


@pytest.fixture(scope="module")
def whole() -> tuple[nn.Sequential, GlobalModel]:
    torch.manual_seed(0)
    net = model()
    return net, from_model(net)


@pytest.fixture(scope="module")
def plain(whole: tuple[nn.Sequential, GlobalModel]) -> tuple[Submodel, Graphs]:
    return compiled(whole, "slice:classifier")


@pytest.fixture(scope="module")
def eight(whole: tuple[nn.Sequential, GlobalModel]) -> tuple[Submodel, Graphs]:
    return compiled(whole, "slice:classifier,frozen=int8")


def compiled(whole: tuple[nn.Sequential, GlobalModel], spec: str) -> tuple[Submodel, Graphs]:
    """The submodel, and the graphs of its stages with their constants."""
    submodel = split(whole[0], spec, SHAPE, TRAINING)
    graphs = compile_graphs(stages_of(submodel.program))
    return submodel, with_constants(submodel.program, graphs, submodel.cut(whole[1]))


def stages_of(program: Program) -> Program:
    stages = (s for s in program.signatures if s.name.startswith("forward"))
    return replace(program, signatures=tuple(stages))


def random_weight(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (12 * torch.rand(shape[0], generator=generator) - 6)
    return torch.randn(shape, generator=generator) * sizes.reshape(-1, *[1] * (len(shape) - 1))


@pytest.mark.parametrize("shape", [(5, 3), (16, 4, 3, 3), (7, 1, 1, 1), (1, 9, 4)])
def test_the_nearest_of_255_numbers(seed: int, shape: tuple[int, ...]) -> None:
    weight = random_weight(seed, shape)
    rows = weight.double().reshape(shape[0], -1)
    step = rows.abs().amax(1, keepdim=True) / 127
    error = (rounded(weight).double().reshape(shape[0], -1) - rows).abs()
    # The step is rounded up by at most 2^-15 of itself.
    assert bool((error <= step * (1 + 2**-15) / 2).all())
    q, _ = to_int8(weight)
    assert q.dtype == np.int8
    assert np.abs(q.astype(int)).reshape(shape[0], -1).max(1).tolist() == [127] * shape[0]


def test_products_are_exact_and_rounding_twice_changes_nothing(seed: int) -> None:
    weight = random_weight(seed, (200, 40))
    q, scale = to_int8(weight)
    once = rounded(weight)
    np.testing.assert_array_equal(once.double().numpy(), q.astype(np.float64) * scale)
    assert torch.equal(rounded(once), once)
    again, factors = to_int8(once)
    np.testing.assert_array_equal(again, q)
    np.testing.assert_array_equal(factors, scale)


def test_zeros_stay_zeros() -> None:
    weight = rounded(torch.tensor([[0.0, -0.0], [1.0, 0.0]]))
    assert weight[0].tolist() == [0, 0]
    assert weight[1, 1] == 0


def test_what_is_rounded(eight: tuple[Submodel, Graphs], plain: tuple[Submodel, Graphs]) -> None:
    """Weights ahead of the cut; nothing that is trained, and no numbers of batch norms."""
    submodel, _ = eight
    assert submodel.program.int8 == {"small.weight", "large.weight", "dense.weight"}
    assert submodel.program.signatures[-1].inputs == plain[0].program.signatures[-1].inputs
    count = sum(math.prod(e.shape) for e in submodel.program.tensors if e.stored)
    weights = [e.shape for e in submodel.program.tensors if e.name in submodel.program.int8]
    saved = sum(4 * math.prod(shape) - int8_bytes(shape) for shape in weights)
    assert plain[0].bytes == 4 * count
    assert submodel.bytes == 4 * count - saved


def test_constants_are_in_the_order_of_the_inputs(eight: tuple[Submodel, Graphs]) -> None:
    """So a bundle has the same bytes in every process."""
    submodel, graphs = eight
    for signature in stages_of(submodel.program).signatures:
        tensors = onnx.load_from_string(graphs[signature.name].data).graph.initializer
        held = [t.name.split(":")[0] for t in tensors if t.name.endswith(":int8")]
        inputs = [port.name for port in signature.inputs if port.name in submodel.program.int8]
        assert list(dict.fromkeys(held)) == inputs


def test_stages_compute_with_the_rounded_weights(
    whole: tuple[nn.Sequential, GlobalModel], eight: tuple[Submodel, Graphs], tmp_path: Path
) -> None:
    _, graphs = eight
    x = torch.randn(7, *SHAPE)
    activations = x.numpy()
    for name in graphs:
        path = tmp_path / graphs[name].file
        path.write_bytes(graphs[name].data)
        activations = OnnxSession(path, 1).run({"x": activations})["output"]
    twin = model().double().eval()
    twin.load_state_dict(whole[1].tensors)
    with torch.no_grad():
        exact = twin[:-1](x.double())
        for layer in (twin.small, twin.large, twin.dense):
            # The definition in float64, without the rounding of scales: a weight halfway between
            # two numbers may be rounded to the other one.
            rows = layer.weight.abs().flatten(1).amax(1) / 127
            rows = rows.reshape(-1, *[1] * (layer.weight.dim() - 1))
            layer.weight.copy_((layer.weight / rows).round() * rows)
        expected = twin[:-1](x.double())
    off = float((exact - expected).norm())
    assert np.linalg.norm(activations.reshape(expected.shape) - expected.numpy()) < off / 5
    assert off > 1e-3 * float(exact.norm())


def test_a_quarter_of_the_bytes(
    plain: tuple[Submodel, Graphs], eight: tuple[Submodel, Graphs]
) -> None:
    sizes = [sum(graph.size for graph in graphs.values()) for _, graphs in (plain, eight)]
    assert sizes[1] < 0.26 * sizes[0]


def test_no_dense_weight_is_whole_in_memory(
    plain: tuple[Submodel, Graphs], eight: tuple[Submodel, Graphs]
) -> None:
    """Its blocks have at most 2^21 bytes as float32; it has 5,734,400."""
    [name] = [n for n, graph in plain[1].items() if "dense.weight" in graph.held]
    graph = onnx.load_from_string(eight[1][name].data).graph
    blocks = [n for n in graph.node if n.op_type == "DequantizeLinear" and "dense" in n.output[0]]
    assert len(blocks) == 3
    need = [peak_bytes(graphs[name], 4) for _, graphs in (plain, eight)]
    assert need[0] is not None
    assert need[1] is not None
    assert need[1] < need[0]


def test_small_weights_take_the_memory_of_float32(
    plain: tuple[Submodel, Graphs], eight: tuple[Submodel, Graphs]
) -> None:
    """A session multiplies them out when it opens."""
    [name] = [n for n, graph in plain[1].items() if "small.weight" in graph.held]
    assert "large.weight" not in plain[1][name].held
    assert peak_bytes(eight[1][name], 4) == peak_bytes(plain[1][name], 4)


@pytest.mark.parametrize("kind", ["plain", "eight"])
def test_no_other_form_repeats_the_weights(kind: str, request: pytest.FixtureRequest) -> None:
    submodel, graphs = request.getfixturevalue(kind)
    with_others = with_forms(submodel.program, graphs)
    assert any(graph.held for graph in with_others.values())
    assert not any(graph.held and graph.forms for graph in with_others.values())


def test_a_wrong_scale_does_not_pass(
    whole: tuple[nn.Sequential, GlobalModel], eight: tuple[Submodel, Graphs]
) -> None:
    submodel, graphs = eight
    values = submodel.cut(whole[1])
    program = stages_of(submodel.program)
    check = partial(verify, program, values=values, trace=partial(traced, "onnx"))
    assert check(graphs=graphs).passed
    empty = compile_graphs(program)
    for name in ("small.weight", "large.weight", "dense.weight"):
        wrong = values | {name: values[name] * 1.001}
        assert not check(graphs=with_constants(program, empty, wrong)).passed, name


def test_a_verdict_on_float32_weights_is_not_one_on_8_bit_weights(
    plain: tuple[Submodel, Graphs], eight: tuple[Submodel, Graphs]
) -> None:
    """Verdicts are kept under the key of the graphs. What holds no such weight shares them."""
    first, second = plain[0].program, eight[0].program
    for float32, int8 in zip(first.signatures, second.signatures, strict=True):
        keys = [graphs_key(p, [s], "onnx") for p, s in ((first, float32), (second, int8))]
        holds = any(port.name in second.int8 for port in float32.inputs)
        assert None not in keys
        assert (keys[0] != keys[1]) == holds, float32.name


def test_tflite_cannot_hold_them(eight: tuple[Submodel, Graphs]) -> None:
    with refused("export.eight-bit-needs-onnx", format="tflite"):
        compile_graphs(eight[0].program, format="tflite")
