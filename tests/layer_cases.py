"""Compares the gradients of a layer, exported as a signature, with those of float64 autograd."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from device_agent.formats.manifest import Dtype, Port, TensorEntry
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import ProgramSignature, samples_port, state_in, state_out
from exporters.programs.tracing import EXAMPLE_BATCH
from exporters.recording.capture import record_current_mode

BATCH = EXAMPLE_BATCH + 2
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """A layer to test and how to draw its inputs.

    Attributes:
        build: Creates the layer.
        shape: Shape of one sample.
        training: Whether the layer is in training mode.
        limit: Draw int64 samples below this number instead of normally distributed ones.
        positive: Draw samples above zero.
        offset: Up to this number is added to every parameter, so that none keeps an initial value
            like 0 or 1. Stacked layers need a smaller offset; otherwise PyTorch's own float32
            gradients are wrong by 1e-5.
        returned: Whether the signature returns the layer's result, too, as `y`.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    training: bool = True
    limit: int | None = None
    positive: bool = False
    offset: float = 1.0
    returned: bool = False


@dataclass(frozen=True)
class Case:
    """A row as a signature (x, c, state) -> (gradients of sum(c * layer(x)), new statistics)."""

    row: Row
    layer: nn.Module
    signature: ProgramSignature

    @classmethod
    def of(cls, row: Row, record: bool = False) -> "Case":
        """Build the case; with `record`, record the layer as models are recorded."""
        layer = row.build().train(row.training)
        for module in layer.modules():
            if hasattr(module, "num_batches_tracked"):
                module.num_batches_tracked = None  # type: ignore[assignment]  # counting batches does not change the result
        parameters = dict(layer.named_parameters())
        buffers = dict(layer.named_buffers())
        with torch.no_grad():
            for value in (*parameters.values(), *buffers.values()):
                value.add_(row.offset * torch.rand(value.shape))
            zeros = torch.zeros(2, *row.shape, dtype=torch.int64 if row.limit else torch.float32)
            width = tuple(copy.deepcopy(layer)(zeros).shape[1:])
        dtype: Dtype = "int64" if row.limit else "float32"
        recorded = record_current_mode(copy.deepcopy(layer), row.shape, dtype) if record else None
        runs = recorded or layer
        moved = [*([] if row.limit else ["x"]), *parameters]

        def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
            statistics = {name: feeds[name].clone() for name in buffers}

            def objective(moving: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
                own = {n: t for n, t in moving.items() if n != "x"}
                x = moving.get("x", feeds["x"])
                output = functional_call(runs, {**own, **statistics}, (x,))
                return (output * feeds["c"]).sum(), output

            moving = {n: feeds[n] for n in moved}
            gradients, (_, output) = grad_and_value(objective, has_aux=True)(moving)
            results = {f"{name}+": t for name, t in {**gradients, **statistics}.items()}
            return {**results, "y": output} if row.returned else results

        state = [entry(n, tuple(t.shape)) for n, t in {**parameters, **buffers}.items()]
        d_x = [] if row.limit else [samples_port(row.shape, "x+")]
        result = [samples_port(width, "y")] if row.returned else []
        signature = ProgramSignature(
            name="gradients",
            inputs=(
                samples_port(row.shape, dtype=dtype),
                samples_port(width, "c"),
                *map(state_in, state),
            ),
            outputs=(*result, *d_x, *map(state_out, state)),
            function=function,
            source=recorded,
        )
        return cls(row, layer, signature)

    def feeds(self, seed: int, batch: int = BATCH) -> dict[str, Tensor]:
        """Random samples and output weights, and the layer's own state, in float32."""
        generator = torch.Generator().manual_seed(seed)
        state = self.layer.state_dict()
        feeds = {
            p.name: state.get(p.name, drawn(p, generator, batch)) for p in self.signature.inputs
        }
        if self.row.limit is not None:
            shape = feeds["x"].shape
            feeds["x"] = torch.randint(self.row.limit, shape, generator=generator)
        if self.row.positive:
            feeds["x"] = feeds["x"].abs() + 0.1
        return feeds

    def expected(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs of the signature, computed by backward() in float64."""
        layer = copy.deepcopy(self.layer).double()
        x = feeds["x"] if self.row.limit else feeds["x"].double().requires_grad_()
        y = layer(x)
        (y * feeds["c"].double()).sum().backward()
        leaves = dict(layer.named_parameters()) | {"x": x}
        expected = {name: value.grad for name, value in leaves.items() if value.grad is not None}
        expected |= {**dict(layer.named_buffers()), "y": y.detach()}
        return [expected[port.name.removesuffix("+")] for port in self.signature.outputs]

    def prediction(self) -> ProgramSignature:
        """The signature (x, state) -> y of the layer without gradients."""
        runs = self.signature.source or self.layer

        def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
            own = {name: t for name, t in feeds.items() if name != "x"}
            return {"y": functional_call(runs, own, (feeds["x"],))}

        inputs = tuple(port for port in self.signature.inputs if port.name != "c")
        (port,) = (port for port in self.signature.inputs if port.name == "c")
        width = tuple(size for size in port.shape[1:] if size is not None)
        return ProgramSignature("predict", inputs, (samples_port(width, "y"),), function)


def entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name=name, role="parameter", dtype="float32", shape=shape)


def drawn(port: Port, generator: torch.Generator, batch: int) -> Tensor:
    return torch.randn([n or batch for n in port.shape], generator=generator)


def assert_close(
    case: Case,
    actual: list[Tensor],
    expected: list[Tensor],
    name: str = "",
    tolerance: float = TOLERANCE,
) -> None:
    for port, ours, theirs in zip(case.signature.outputs, actual, expected, strict=True):
        assert ours.shape == theirs.shape, f"{name} {port.name}"
        # A layer of dead ReLUs has gradients of zero.
        error = float((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-30))
        assert error <= tolerance, f"{name} {port.name} is off by {error:.1e}"


def combined_signature(signatures: Mapping[str, ProgramSignature]) -> ProgramSignature:
    """Combine many signatures into one, because lowering takes seconds even for a small graph."""

    def function(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for name, signature in signatures.items():
            own = {p.name: feeds[f"{name}/{p.name}"] for p in signature.inputs}
            results |= {f"{name}/{k}": t for k, t in signature.function(own).items()}
        return results

    def prefixed(side: str) -> tuple[Port, ...]:
        return tuple(
            Port(name=f"{name}/{p.name}", kind=p.kind, dtype=p.dtype, shape=p.shape)
            for name, signature in signatures.items()
            for p in getattr(signature, side)
        )

    return ProgramSignature("together", prefixed("inputs"), prefixed("outputs"), function)


def check_on_onnxruntime(cases: Mapping[str, Case], seed: int) -> None:
    """Compare all `cases`, in one ONNX graph, with float64 autograd."""
    short = {f"r{number}": case for number, case in enumerate(cases.values())}
    signatures = {name: case.signature for name, case in short.items()}
    session = open_session(to_onnx(combined_signature(signatures)))
    feeds = {name: case.feeds(seed) for name, case in short.items()}
    flat = {f"{n}/{k}": t.numpy() for n, own in feeds.items() for k, t in own.items()}
    known = {port.name for port in session.get_inputs()}
    results = dict(
        zip(
            [o.name for o in session.get_outputs()],
            session.run(None, {name: value for name, value in flat.items() if name in known}),
            strict=True,
        )
    )
    for (short_name, case), name in zip(short.items(), cases, strict=True):
        actual = [
            torch.from_numpy(results[f"{short_name}/{p.name}"]) for p in case.signature.outputs
        ]
        assert_close(case, actual, case.expected(feeds[short_name]), name)


Runs = Callable[[ProgramSignature, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Runs a signature in a runtime; it may get inputs that the signature does not read."""


def in_onnxruntime(
    signature: ProgramSignature, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    session = open_session(to_onnx(signature))
    known = {port.name for port in session.get_inputs()}
    results = session.run(None, {name: value for name, value in feeds.items() if name in known})
    return dict(zip((port.name for port in session.get_outputs()), results, strict=True))


def check_predictions(cases: Mapping[str, Case], seed: int, run: Runs = in_onnxruntime) -> None:
    """Compare the results of all `cases` without gradients, in one graph, with float64."""
    short = {f"r{number}": case for number, case in enumerate(cases.values())}
    signatures = {name: case.prediction() for name, case in short.items()}
    feeds = {name: case.feeds(seed) for name, case in short.items()}
    flat = {f"{n}/{k}": t.numpy() for n, own in feeds.items() for k, t in own.items()}
    results = run(combined_signature(signatures), flat)
    for (short_name, case), name in zip(short.items(), cases, strict=True):
        x = feeds[short_name]["x"]
        with torch.no_grad():
            right = copy.deepcopy(case.layer).double()(x if case.row.limit else x.double())
        came = torch.from_numpy(results[f"{short_name}/y"]).double()
        error = float((came - right).norm() / right.norm())
        assert error <= TOLERANCE, f"{name} is off by {error:.1e}"


def open_session(graph: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
