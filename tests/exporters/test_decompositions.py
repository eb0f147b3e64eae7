"""Gradients through the decomposition table, against float64 autograd, one row a case."""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from device_agent.manifest import Port, TensorEntry
from exporters import decompositions
from exporters.objectives import cross_entropy
from exporters.onnx_writer import to_onnx
from exporters.optimizers import SGD, Adam, Optimizer
from exporters.program import ProgramSignature, metric, samples, scalar, state_in, state_out
from exporters.tracing import EXAMPLE_BATCH, operators, trace
from profiles.errors import ExportError

BATCH = EXAMPLE_BATCH + 2
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """A layer, the shape of one sample, and whether it is in train mode."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    training: bool = True


class Mean(nn.Module):
    """Mean over the image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def conv2d(i: int, o: int, kernel: int | tuple[int, int], **options: object) -> partial[nn.Module]:
    return partial(nn.Conv2d, i, o, kernel, **options)


def conv1d(i: int, o: int, kernel: int, **options: object) -> partial[nn.Module]:
    return partial(nn.Conv1d, i, o, kernel, **options)


ROWS = {
    "conv2d": Row(conv2d(3, 4, 3), (3, 6, 7)),
    "conv2d padding": Row(conv2d(3, 4, 3, padding=1), (3, 6, 7)),
    "conv2d more padding than kernel": Row(conv2d(2, 3, 2, padding=3), (2, 4, 5)),
    "conv2d uneven padding": Row(conv2d(3, 4, 3, padding=(0, 2)), (3, 6, 5)),
    "conv2d same": Row(conv2d(3, 4, 3, padding="same"), (3, 6, 5)),
    "conv2d no bias": Row(conv2d(3, 4, 3, padding=1, bias=False), (3, 6, 7)),
    "conv2d stride": Row(conv2d(3, 4, 3, stride=2, padding=1), (3, 6, 6)),
    "conv2d stride, rest left over": Row(conv2d(3, 4, 3, stride=3), (3, 8, 7)),
    "conv2d stride above kernel": Row(conv2d(3, 4, 2, stride=3), (3, 9, 7)),
    "conv2d uneven stride": Row(conv2d(3, 4, 3, stride=(1, 2), padding=1), (3, 5, 8)),
    "conv2d dilation": Row(conv2d(3, 4, 3, dilation=2, padding=2), (3, 7, 6)),
    "conv2d uneven dilation": Row(conv2d(3, 4, 3, dilation=(1, 2)), (3, 5, 8)),
    "conv2d stride, padding, dilation": Row(
        conv2d(2, 3, (3, 2), stride=(2, 3), padding=(2, 1), dilation=(2, 3)), (2, 9, 10)
    ),
    "conv2d groups": Row(conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 6)),
    "conv2d groups, stride, dilation": Row(
        conv2d(6, 3, 3, groups=3, stride=2, padding=2, dilation=2), (6, 8, 7)
    ),
    "conv2d depthwise": Row(conv2d(4, 4, 3, groups=4, padding=1), (4, 6, 5)),
    "conv2d depthwise with multiplier": Row(conv2d(3, 6, 3, groups=3, stride=2), (3, 7, 7)),
    "conv2d 1x1": Row(conv2d(3, 5, 1), (3, 4, 6)),
    "conv2d 1x1 stride": Row(conv2d(3, 5, 1, stride=2), (3, 5, 6)),
    "conv2d kx1": Row(conv2d(3, 2, (3, 1), padding=(1, 0)), (3, 6, 5)),
    "conv2d 1xk": Row(conv2d(2, 4, (1, 3), padding=(0, 1), stride=(1, 2)), (2, 4, 7)),
    "conv2d even kernel": Row(conv2d(3, 4, (2, 4), padding=(1, 2)), (3, 6, 7)),
    "conv2d kernel of the image": Row(conv2d(2, 4, (4, 5)), (2, 4, 5)),
    "conv2d one channel": Row(conv2d(1, 1, 3, padding=1), (1, 4, 4)),
    "conv1d": Row(conv1d(3, 4, 3, padding=1), (3, 9)),
    "conv1d stride, dilation": Row(conv1d(3, 4, 3, stride=2, padding=2, dilation=2), (3, 10)),
    "conv1d groups, even kernel": Row(conv1d(4, 6, 4, groups=2), (4, 9)),
    "batch norm 2d": Row(partial(nn.BatchNorm2d, 3), (3, 4, 5)),
    "batch norm 2d, not affine": Row(partial(nn.BatchNorm2d, 3, affine=False), (3, 4, 5)),
    "batch norm 2d, momentum and eps": Row(
        partial(nn.BatchNorm2d, 3, eps=0.1, momentum=0.3), (3, 4, 5)
    ),
    "batch norm 2d, predicting": Row(partial(nn.BatchNorm2d, 3), (3, 4, 5), training=False),
    "batch norm 1d": Row(partial(nn.BatchNorm1d, 6), (6,)),
    "batch norm 1d over time": Row(partial(nn.BatchNorm1d, 6), (6, 5)),
    "batch norm 1d, predicting": Row(partial(nn.BatchNorm1d, 6), (6,), training=False),
    "relu": Row(nn.ReLU, (3, 4, 5)),
    "gelu": Row(nn.GELU, (3, 4, 5)),
    "gelu by tanh": Row(partial(nn.GELU, approximate="tanh"), (3, 4, 5)),
    "silu": Row(nn.SiLU, (3, 4, 5)),
    "tanh": Row(nn.Tanh, (3, 4, 5)),
    "sigmoid": Row(nn.Sigmoid, (3, 4, 5)),
    "linear": Row(partial(nn.Linear, 5, 3), (5,)),
    "linear no bias": Row(partial(nn.Linear, 5, 3, bias=False), (5,)),
    "linear over a sequence": Row(partial(nn.Linear, 5, 3), (4, 5)),
    "mean over the image": Row(Mean, (3, 4, 5)),
    "adaptive mean": Row(partial(nn.AdaptiveAvgPool2d, 1), (3, 4, 5)),
    "max pooling": Row(partial(nn.MaxPool2d, 2), (3, 4, 6)),
    "max pooling, overlapping": Row(partial(nn.MaxPool2d, 3, 2, 1), (3, 7, 8)),
    "log-softmax": Row(partial(nn.LogSoftmax, 1), (6,)),
}
REFUSED = {
    "avg_pool2d_backward": Row(partial(nn.AvgPool2d, 2), (3, 4, 6)),
    "_adaptive_avg_pool2d_backward": Row(partial(nn.AdaptiveAvgPool2d, 2), (3, 4, 6)),
    "convolution_backward": Row(partial(nn.ConvTranspose2d, 3, 4, 3), (3, 4, 5)),
}


@dataclass(frozen=True)
class Case:
    """A row as a signature (x, c, state) -> (gradients of sum(c * layer(x)), new statistics)."""

    layer: nn.Module
    signature: ProgramSignature

    @classmethod
    def of(cls, row: Row) -> "Case":
        layer = row.build().train(row.training)
        for module in layer.modules():
            if hasattr(module, "num_batches_tracked"):
                module.num_batches_tracked = None  # counting is no part of a layer's function
        parameters = dict(layer.named_parameters())
        buffers = dict(layer.named_buffers())
        with torch.no_grad():
            for value in (*parameters.values(), *buffers.values()):
                value.add_(torch.rand(value.shape))
            width = tuple(layer(torch.zeros(2, *row.shape)).shape[1:])

        def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
            statistics = {name: feeds[name].clone() for name in buffers}

            def objective(moving: Mapping[str, Tensor]) -> Tensor:
                own = {n: t for n, t in moving.items() if n != "x"}
                output = functional_call(layer, {**own, **statistics}, (moving["x"],))
                return (output * feeds["c"]).sum()

            gradients, _ = grad_and_value(objective)({n: feeds[n] for n in ("x", *parameters)})
            return {f"{name}+": t for name, t in {**gradients, **statistics}.items()}

        state = [entry(n, tuple(t.shape)) for n, t in {**parameters, **buffers}.items()]
        signature = ProgramSignature(
            name="gradients",
            inputs=(samples(row.shape), samples(width, "c"), *map(state_in, state)),
            outputs=(samples(row.shape, "x+"), *map(state_out, state)),
            function=function,
        )
        return cls(layer, signature)

    def feeds(self, seed: int) -> dict[str, Tensor]:
        """Random samples and the layer's own state, float32."""
        generator = torch.Generator().manual_seed(seed)
        state = self.layer.state_dict()
        return {p.name: state.get(p.name, drawn(p, generator)) for p in self.signature.inputs}

    def expected(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs by loss.backward() in float64."""
        layer = copy.deepcopy(self.layer).double()
        x = feeds["x"].double().requires_grad_()
        (layer(x) * feeds["c"].double()).sum().backward()
        found = {name: value.grad for name, value in layer.named_parameters()} | {"x": x.grad}
        found |= dict(layer.named_buffers())
        return [found[port.name.removesuffix("+")] for port in self.signature.outputs]


def entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name=name, role="parameter", dtype="float32", shape=shape)


def drawn(port: Port, generator: torch.Generator) -> Tensor:
    return torch.randn([n or BATCH for n in port.shape], generator=generator)


def assert_close(case: Case, came: list[Tensor], expected: list[Tensor]) -> None:
    for port, ours, theirs in zip(case.signature.outputs, came, expected, strict=True):
        assert ours.shape == theirs.shape, port.name
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert error <= TOLERANCE, f"{port.name} is off by {error:.1e}"


@pytest.mark.parametrize("name", ROWS)
def test_traced_gradient(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    case = Case.of(ROWS[name])
    feeds = case.feeds(seed)
    graph = trace(case.signature)
    assert_close(case, graph(*feeds.values()), case.expected(feeds))
    assert not [op for op in operators(graph) if "backward" in op]


def together(cases: Mapping[str, Case]) -> ProgramSignature:
    """Many signatures as one: lowering costs seconds however small the graph is."""

    def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = {}
        for name, case in cases.items():
            own = {p.name: feeds[f"{name}/{p.name}"] for p in case.signature.inputs}
            results |= {f"{name}/{k}": t for k, t in case.signature.function(own).items()}
        return results

    def prefixed(side: str) -> tuple[Port, ...]:
        return tuple(
            Port(name=f"{name}/{p.name}", kind=p.kind, dtype=p.dtype, shape=p.shape)
            for name, case in cases.items()
            for p in getattr(case.signature, side)
        )

    return ProgramSignature("together", prefixed("inputs"), prefixed("outputs"), function)


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
    "smooth activations": ("gelu", "gelu by tanh", "tanh", "sigmoid", "log-softmax"),
    "relu and pooling": ("relu", "max pooling, overlapping", "adaptive mean", "linear"),
    "silu": ("silu",),
    "sequence": ("linear over a sequence",),
}


@pytest.mark.parametrize("group", LOWERED)
def test_lowered_gradient(group: str, seed: int) -> None:
    torch.manual_seed(seed)
    names = LOWERED[group]
    cases = {f"r{number}": Case.of(ROWS[name]) for number, name in enumerate(names)}
    session = open_session(to_onnx(together(cases)))
    feeds = {name: case.feeds(seed) for name, case in cases.items()}
    flat = {f"{n}/{k}": t.numpy() for n, own in feeds.items() for k, t in own.items()}
    results = dict(
        zip([o.name for o in session.get_outputs()], session.run(None, flat), strict=True)
    )
    for name, case in cases.items():
        came = [torch.from_numpy(results[f"{name}/{p.name}"]) for p in case.signature.outputs]
        assert_close(case, came, case.expected(feeds[name]))


def open_session(graph: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("operator", REFUSED)
def test_what_has_no_forward_form_is_refused_by_name(operator: str) -> None:
    with pytest.raises(ExportError, match=rf"'gradients' .*aten::{re.escape(operator)}\b"):
        trace(Case.of(REFUSED[operator]).signature)


def test_cross_entropy_and_its_gradient(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits, labels = 30 * torch.randn(7, 5, generator=draw), torch.randint(5, (7,), generator=draw)

    def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradient, loss = grad_and_value(lambda z: cross_entropy(z, feeds["y"]))(feeds["x"])
        return {"loss": loss, "gradient": gradient}

    label_port = Port(name="y", kind="labels", dtype="int64", shape=(None,))
    signature = ProgramSignature(
        "loss", (samples((5,)), label_port), (metric("loss"), samples((5,), "gradient")), function
    )
    loss, gradient = trace(signature)(logits, labels)
    wide = logits.double().requires_grad_()
    expected = nn.functional.cross_entropy(wide, labels)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert wide.grad is not None
    assert (gradient.double() - wide.grad).norm() <= TOLERANCE * wide.grad.norm()


def test_two_forms_of_one_operator_are_refused_by_both_names() -> None:
    (operator, form), *_ = decompositions.convolution.FORMS.items()
    with pytest.raises(ValueError, match=f"decomposed twice.*{form.__name__} and"):
        decompositions.merge((decompositions.convolution.FORMS, {operator: form}))


def test_own_forms_come_ahead_of_pytorchs() -> None:
    table = decompositions.table()
    for group in decompositions.GROUPS:
        for operator, form in group.items():
            assert table[operator] is form


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
def test_optimizer_is_pytorchs(name: str, seed: int) -> None:
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
        new = optimizer.update(values, gradients, state, torch.tensor(0.05, dtype=torch.float64))
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
    """One signature, built and exported two times."""
    row = Row(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU()), (2, 5, 5))
    torch.manual_seed(0)
    first = to_onnx(Case.of(row).signature)
    torch.manual_seed(1)  # weights are no part of a graph
    return first, to_onnx(Case.of(row).signature)


def test_same_signature_gives_the_same_bytes(twice: tuple[bytes, bytes]) -> None:
    assert twice[0] == twice[1]


def test_graph_says_nothing_of_where_it_was_made(twice: tuple[bytes, bytes]) -> None:
    data = twice[0]
    assert not re.search(rb"[/\\]\w+[/\\]\w+|\.py\b|torch", data)
    model = onnx.load_from_string(data)
    graph = model.graph
    holders = (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output)
    for holder in holders:
        assert not holder.metadata_props
        assert not holder.doc_string
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    assert {node.domain for node in graph.node} <= {""}
    assert not model.functions
    assert not [i.name for i in graph.initializer if i.external_data]
    assert not [n.op_type for n in graph.node if n.op_type in ("BatchNormalization", "If", "Loop")]


def test_ports_are_the_signatures_in_order(twice: tuple[bytes, bytes]) -> None:
    session = open_session(twice[0])
    assert [i.name for i in session.get_inputs()][:2] == ["x", "c"]
    assert session.get_outputs()[0].name == "x+"
    assert session.get_inputs()[0].shape[0] == session.get_outputs()[0].shape[0]
    assert isinstance(session.get_inputs()[0].shape[0], str)


def test_learning_rate_is_an_input(seed: int) -> None:
    entries = (entry("w", (3,)),)

    def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        new = SGD().update({"w": feeds["w"]}, {"w": feeds["w"]}, {}, feeds["rate"])
        return {"w+": new["w"]}

    signature = ProgramSignature(
        "step", (scalar("rate"), state_in(entries[0])), (state_out(entries[0]),), function
    )
    session = open_session(to_onnx(signature))
    w = np.random.default_rng(seed).normal(size=3).astype(np.float32)
    for rate in (0.5, 0.25):
        (new,) = session.run(None, {"rate": np.asarray(rate, np.float32), "w": w})
        np.testing.assert_allclose(new, w * (1 - rate), rtol=1e-6)
