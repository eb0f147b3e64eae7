"""Gradients computed with the decomposition table, against float64 autograd."""

import re
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import grad_and_value
from torch.fx import GraphModule

from device_agent.formats.manifest import Port
from exporters import decompositions
from exporters.decompositions.activation import HARD_SIGMOID
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.plain_or_transposed import ONNX_RUNTIME
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import (
    ProgramSignature,
    metric_port,
    samples_port,
    scalar_port,
    state_in,
    state_out,
)
from exporters.programs.tracing import operators, trace
from exporters.programs.training.losses import cross_entropy
from exporters.programs.training.optimizers import SGD, Adam, Optimizer
from exporters.tflite.grouped_convolutions import CONVOLUTIONS
from exporters.tflite.tflite_decompositions import FORMS as TFLITE
from layer_cases import (
    TOLERANCE,
    Case,
    Row,
    assert_close,
    check_on_onnxruntime,
    entry,
    open_session,
)
from operator_rows import COMBINED
from operator_rows import ROWS as GROUPED
from parameters import half_quick, quarter_quick, some_long

aten = torch.ops.aten


class Mean(nn.Module):
    """Mean over the axes of the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


ROWS = {
    **GROUPED["convolution"],
    **GROUPED["batch norm"],
    "layer norm": Row(partial(nn.LayerNorm, 5), (3, 4, 5)),
    "layer norm over two axes": Row(partial(nn.LayerNorm, (4, 5)), (3, 4, 5)),
    "layer norm without a shift": Row(partial(nn.LayerNorm, 5, bias=False), (3, 4, 5)),
    "layer norm without weights": Row(
        partial(nn.LayerNorm, (3, 4, 5), elementwise_affine=False), (3, 4, 5)
    ),
    "relu": Row(nn.ReLU, (3, 4, 5)),
    "gelu": Row(nn.GELU, (3, 4, 5)),
    "gelu by tanh": Row(partial(nn.GELU, approximate="tanh"), (3, 4, 5)),
    "silu": Row(nn.SiLU, (3, 4, 5)),
    "tanh": Row(nn.Tanh, (3, 4, 5)),
    "sigmoid": Row(nn.Sigmoid, (3, 4, 5)),
    **GROUPED["linear"],
    "mean over the image": Row(Mean, (3, 4, 5)),
    "adaptive mean": Row(partial(nn.AdaptiveAvgPool2d, 1), (3, 4, 5)),
    "max pooling": Row(partial(nn.MaxPool2d, 2), (3, 4, 6)),
    "max pooling, overlapping": Row(partial(nn.MaxPool2d, 3, 2, 1), (3, 7, 8)),
    "log-softmax": Row(partial(nn.LogSoftmax, 1), (6,)),
}


# Recorded and lowered, these are run by both runtimes in the tests of every operator.
ELSEWHERE = [
    name
    for name in GROUPED["convolution"]
    if "groups" not in name and name not in COMBINED["convolution"]
]


# Those are traced with the decompositions of both runtimes below.
WITH_A_RUNTIME = [name for name in COMBINED["convolution"] if "groups" not in name]


@pytest.mark.parametrize("name", quarter_quick(some_long(ROWS, *ELSEWHERE, *WITH_A_RUNTIME)))
def test_traced_gradient(name: str, seed: int) -> None:
    check_traced(ROWS[name], seed, {})


RUNTIMES = {"onnxruntime": ONNX_RUNTIME, "litert": CONVOLUTIONS}


# Of groups, three kinds are enough: test_operator_support.py and test_tflite.py run these, too.
GROUPS = ("conv2d few outputs, groups", "conv1d groups, even kernel")


@pytest.mark.parametrize(
    "name",
    quarter_quick(some_long([name for name in ROWS if "conv" in name], *ELSEWHERE, *GROUPS)),
)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_traced_gradient_with_decompositions_of_a_runtime(
    runtime: str, name: str, seed: int
) -> None:
    graph = check_traced(ROWS[name], seed, RUNTIMES[runtime])
    convolutions = graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    if runtime == "litert":
        assert not [node for node in convolutions if node.args[6]]


def check_traced(row: Row, seed: int, own: Decompositions) -> GraphModule:
    torch.manual_seed(seed)
    case = Case.of(row)
    feeds = case.feeds(seed)
    graph = trace(case.signature, own)
    assert_close(case, graph(*feeds.values()), case.expected(feeds))
    assert not [op for op in operators(graph) if "backward" in op]
    return graph


# Whether the layer, the gradient of its input and that of its weight are transposed.
CHEAPER = {"conv2d few outputs": [True, False, False], "conv2d few inputs": [False, True, False]}


@pytest.mark.parametrize("name", CHEAPER)
def test_convolutions_become_the_cheaper_of_two(name: str) -> None:
    graph = trace(Case.of(ROWS[name]).signature, ONNX_RUNTIME)
    convolutions = graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert [node.args[6] for node in convolutions] == CHEAPER[name]


KINKED: dict[OpOverload, tuple[object, ...]] = {
    aten.hardswish_backward.default: (),
    aten.hardsigmoid_backward.default: (),
    aten.hardtanh_backward.default: (-3.0, 3.0),
    aten.leaky_relu_backward.default: (0.2, False),
    aten.threshold_backward.default: (0,),
}


@pytest.mark.parametrize("own", [{}, HARD_SIGMOID, TFLITE], ids=["masks", "operator", "tflite"])
@pytest.mark.parametrize("operator", KINKED, ids=lambda operator: operator._opname)
def test_gradients_at_their_kinks(operator: OpOverload, own: Decompositions) -> None:
    x = torch.tensor([-3.1, -3.0, -2.9, 0.0, 2.9, 3.0, 3.1], dtype=torch.float64)
    grad = torch.arange(1.0, 8.0, dtype=torch.float64)
    options = KINKED[operator]
    form = {**decompositions.table(), **own}.get(operator, operator)
    torch.testing.assert_close(form(grad, x, *options), operator(grad, x, *options))


LOWERED = {
    "convolutions": (
        "conv2d padding",
        "conv2d stride, padding, dilation",
        "conv2d groups, stride, dilation",
        "conv2d depthwise",
        "conv2d even kernel",
        "conv1d stride, dilation",
    ),
    "normalisation": ("batch norm 2d", "batch norm 1d over time", "batch norm 1d, predicting"),
    "layer norm": ("layer norm", "layer norm over two axes", "layer norm without weights"),
    "smooth activations": ("gelu", "gelu by tanh", "tanh", "sigmoid", "log-softmax"),
    "relu and pooling": ("relu", "max pooling, overlapping", "adaptive mean", "linear"),
    "silu": ("silu",),
    "sequence": ("linear over a sequence",),
}


@pytest.mark.parametrize(
    "group", half_quick(some_long(LOWERED, "convolutions", "normalisation", "sequence"))
)
def test_lowered_gradient(group: str, seed: int) -> None:
    torch.manual_seed(seed)
    names = LOWERED[group]
    cases = {name: Case.of(ROWS[name]) for name in names}
    check_on_onnxruntime(cases, seed)


def test_cross_entropy_and_its_gradient(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits, labels = 30 * torch.randn(7, 5, generator=draw), torch.randint(5, (7,), generator=draw)

    def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradient, loss = grad_and_value(lambda z: cross_entropy(z, feeds["y"]))(feeds["x"])
        return {"loss": loss, "gradient": gradient}

    label_port = Port(name="y", kind="labels", dtype="int64", shape=(None,))
    signature = ProgramSignature(
        "loss",
        (samples_port((5,)), label_port),
        (metric_port("loss"), samples_port((5,), "gradient")),
        function,
    )
    loss, gradient = trace(signature)(logits, labels)
    wide = logits.double().requires_grad_()
    expected = nn.functional.cross_entropy(wide, labels)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert wide.grad is not None
    assert (gradient.double() - wide.grad).norm() <= TOLERANCE * wide.grad.norm()


def test_two_decompositions_of_one_operator_are_refused_by_both_names() -> None:
    (operator, decomposition), *_ = decompositions.convolution.DECOMPOSITIONS.items()
    with pytest.raises(ValueError, match=f"decomposed twice.*{decomposition.__name__} and"):
        decompositions.merge((decompositions.convolution.DECOMPOSITIONS, {operator: decomposition}))


def test_own_decompositions_override_pytorchs() -> None:
    table = decompositions.table()
    for group in decompositions.GROUPS:
        for operator, decomposition in group.items():
            assert table[operator] is decomposition


OPTIMIZERS: dict[str, tuple[Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SGD(), torch.optim.SGD),
    "decay": (SGD(weight_decay=0.1), partial(torch.optim.SGD, weight_decay=0.1)),
    "momentum": (
        SGD(momentum=0.9, weight_decay=0.1),
        partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        SGD(momentum=0.8, nesterov=True, weight_decay=0.01),
        partial(torch.optim.SGD, momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    "adam": (Adam(), torch.optim.Adam),
    "adam, decay": (
        Adam(weight_decay=0.3),
        partial(torch.optim.Adam, weight_decay=0.3),
    ),
    "adamw": (
        Adam(weight_decay=0.3, decoupled=True),
        partial(torch.optim.AdamW, weight_decay=0.3),
    ),
    "adam, other betas": (
        Adam(betas=(0.5, 0.9), eps=1e-3),
        partial(torch.optim.Adam, betas=(0.5, 0.9), eps=1e-3),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_pytorchs(name: str, seed: int) -> None:
    optimizer, build = OPTIMIZERS[name]
    draw = torch.Generator().manual_seed(seed)
    entries = [entry("w", (4, 3)), entry("b", (2,))]
    values = {e.name: torch.randn(e.shape, generator=draw, dtype=torch.float64) for e in entries}
    theirs = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    reference = build(theirs.values(), lr=0.05)
    state = {e.name: torch.zeros(e.shape, dtype=torch.float64) for e in optimizer.state(entries)}
    for _ in range(6):
        gradients = {n: torch.randn(v.shape, generator=draw).double() for n, v in values.items()}
        for name_, parameter in theirs.items():
            parameter.grad = gradients[name_].clone()
        reference.step()
        rate = torch.tensor(0.05, dtype=torch.float64)
        given = {n: rate * g if optimizer.scaled else g for n, g in gradients.items()}
        new = optimizer.update(values, given, state, rate)
        assert new.keys() == values.keys() | state.keys()
        values, state = {n: new[n] for n in values}, {n: new[n] for n in state}
    for name_, value in values.items():
        torch.testing.assert_close(value, theirs[name_].detach(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("build", [SGD, partial(Adam, decoupled=True)], ids=["sgd", "adamw"])
def test_undecayed_parameters_have_no_weight_decay(build: Callable[..., Optimizer]) -> None:
    optimizer = build(weight_decay=0.5, undecayed=frozenset({"w"}))
    ones, zeros = torch.ones(2), torch.zeros(2)
    kept = optimizer.state([entry("w", (2,)), entry("b", (2,))])
    state = {e.name: torch.zeros(e.shape) for e in kept}
    new = optimizer.update(
        {"w": ones, "b": ones}, {"w": zeros, "b": zeros}, state, torch.tensor(1.0)
    )
    assert torch.equal(new["w"], ones)
    assert torch.equal(new["b"], ones / 2)


@pytest.fixture(scope="module")
def twice() -> tuple[bytes, bytes]:
    """The same signature, built and exported twice."""
    row = Row(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU()), (2, 5, 5))
    torch.manual_seed(0)
    first = to_onnx(Case.of(row).signature)
    torch.manual_seed(1)  # graphs do not depend on weights
    return first, to_onnx(Case.of(row).signature)


def test_same_signature_gives_the_same_bytes(twice: tuple[bytes, bytes]) -> None:
    assert twice[0] == twice[1]


def test_a_graph_holds_no_paths_and_no_other_metadata(twice: tuple[bytes, bytes]) -> None:
    data = twice[0]
    assert not re.search(rb"[/\\]\w+[/\\]\w+|\.py\b|torch", data)
    model = onnx.load_from_string(data)
    graph = model.graph
    assert [entry.key for entry in model.metadata_props] == ["in_place"]
    assert not model.doc_string
    holders = (graph, *graph.node, *graph.initializer, *graph.input, *graph.output)
    for holder in holders:
        assert not holder.metadata_props
        assert not holder.doc_string
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    assert {node.domain for node in graph.node} <= {""}
    assert not model.functions
    assert not [i.name for i in graph.initializer if i.external_data]
    assert not [n.op_type for n in graph.node if n.op_type in ("If", "Loop")]
    # No statistics are computed by ONNX's operator: its running variance is biased.
    norms = [n for n in graph.node if n.op_type == "BatchNormalization"]
    assert norms
    assert all(len(n.output) == 1 for n in norms)
    assert not [a for n in norms for a in n.attribute if a.name == "training_mode" and a.i]


def test_ports_have_the_order_of_the_signature(twice: tuple[bytes, bytes]) -> None:
    session = open_session(twice[0])
    assert [i.name for i in session.get_inputs()][:2] == ["x", "c"]
    assert session.get_outputs()[0].name == "x+"
    assert session.get_inputs()[0].shape[0] == session.get_outputs()[0].shape[0]
    assert isinstance(session.get_inputs()[0].shape[0], str)


def test_learning_rate_is_an_input(seed: int) -> None:
    entries = (entry("w", (3,)),)

    def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradient = feeds["rate"] * feeds["w"]
        new = SGD().update({"w": feeds["w"]}, {"w": gradient}, {}, feeds["rate"])
        return {"w+": new["w"]}

    signature = ProgramSignature(
        "step", (scalar_port("rate"), state_in(entries[0])), (state_out(entries[0]),), function
    )
    session = open_session(to_onnx(signature))
    w = np.random.default_rng(seed).normal(size=3).astype(np.float32)
    for rate in (0.5, 0.25):
        (new,) = session.run(None, {"rate": np.asarray(rate, np.float32), "w": w})
        np.testing.assert_allclose(new, w * (1 - rate), rtol=1e-6)
