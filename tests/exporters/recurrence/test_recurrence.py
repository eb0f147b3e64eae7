"""Recurrent layers trained with loops over time, compared with torch's layers in float64."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

import oracles
from device_agent.formats.update import TENSORS
from edgetailor import export, split
from exporters.export import Format
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import operators, trace
from exporters.recurrence.loop_operator import STEPS, register
from exporters.recurrence.recurrent_layers import RecurrenceLoops
from layer_cases import TOLERANCE, Case, Row, assert_close
from oracles import Device, Plan
from parameters import half_quick, needs_litert, quarter_quick, some_long
from refusals import refused
from toolkit.models.imdb_bilstm import ImdbBiLSTM, imdb_bilstm
from toolkit.submodels.global_model import from_model
from trainings import train_bundle, training_config

STEPS_OF_TIME, FEATURES, UNITS, BATCH, CLASSES = 6, 3, 4, 5, 3
SHAPE = (STEPS_OF_TIME, FEATURES)
PLAN = Plan(batch_size=4, epochs=2, rate=0.1, momentum=0.9, weight_decay=0.01)
TRAINING = training_config(PLAN)
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "rnn relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
RUNTIMES = ("onnx", "litert")
READS = {"all": (0, 1), "sequence": (0,), "last": (1,)}


class Layer(nn.Module):
    """A recurrent layer as a function of (batch, time, features); `given` first states are learned.

    It returns the results named by `reads` (the sequence, the last states or both) as one row.
    """

    def __init__(
        self, kind: str, reads: str = "all", given: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.layer = KINDS[kind](FEATURES, UNITS, **options)
        count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        names = ("h", "c") if kind == "lstm" else ("h",)
        first = {name: nn.Parameter(torch.randn(count, 1, UNITS)) for name in names if given}
        self.first = nn.ParameterDict(first)
        self.places = READS[reads]

    def forward(self, x: Tensor) -> Tensor:
        given = [self.first[name].expand(-1, x.shape[0], -1) for name in self.first]
        x = x if self.layer.batch_first else x.transpose(0, 1)
        sequence, last = self.layer(x, *([tuple(given)] if len(given) == 2 else given))
        sequence = sequence if self.layer.batch_first else sequence.transpose(0, 1)
        states = [s.transpose(0, 1) for s in (last if isinstance(last, tuple) else (last,))]
        results = [[sequence], states]
        chosen = [value for index in self.places for value in results[index]]
        return torch.cat([value.flatten(1) for value in chosen], 1)


def case_of(model: nn.Module, shape: tuple[int, ...] = SHAPE) -> Case:
    """(x, c, parameters) -> output y, and gradients of sum(c * y) by x and all parameters."""
    return Case.of(Row(lambda: model, shape, offset=0.0, returned=True), record=True)


def assert_same(
    signature: ProgramSignature, came: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    for port in signature.outputs:
        ours, theirs = came[port.name].double(), expected[port.name]
        off, size = float((ours - theirs).norm()), float(theirs.norm())
        assert off <= TOLERANCE * size, f"{port.name} of norm {size:.1e} is off by {off:.1e}"


VARIANTS = [
    {},
    {"reads": "last", "bias": False, "batch_first": True},
    {"reads": "sequence", "given": True, "bidirectional": True},
    {"reads": "last", "given": True, "num_layers": 2, "bidirectional": True},
    {"given": True, "num_layers": 3, "bias": False},
]


@pytest.mark.parametrize(
    ("kind", "variant"),
    # The loops of a plain layer differ in their activation alone, and a GRU has one state, too.
    half_quick(
        some_long(
            itertools.product(KINDS, VARIANTS),
            *((kind, options) for kind in ("gru", "rnn relu") for options in VARIANTS[1:]),
        )
    ),
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_loops_equal_the_layers_in_float64(
    kind: str, variant: dict[str, object], seed: int
) -> None:
    torch.manual_seed(seed)
    case = case_of(Layer(kind, **variant))
    feeds = case.feeds(seed)
    with RecurrenceLoops():
        actual = case.signature.function({name: value.double() for name, value in feeds.items()})
    came = [actual[port.name] for port in case.signature.outputs]
    assert_close(case, came, case.expected(feeds), tolerance=1e-12)


LOWERED = {
    "lstm": lambda: Layer("lstm", batch_first=True),
    "lstm, last states": lambda: Layer("lstm", "last", given=True, bidirectional=True, bias=False),
    "lstm, sequence": lambda: Layer("lstm", "sequence", given=True, batch_first=True),
    "lstm, stacked": lambda: Layer("lstm", given=True, num_layers=2, bidirectional=True),
    "gru": lambda: Layer("gru", batch_first=True),
    "gru, last states": lambda: Layer("gru", "last", given=True, bidirectional=True, bias=False),
    "gru, stacked": lambda: Layer(
        "gru", "sequence", num_layers=2, bidirectional=True, batch_first=True
    ),
    "rnn": lambda: Layer("rnn", given=True, num_layers=2, bidirectional=True),
    "rnn relu": lambda: Layer("rnn relu", batch_first=True, bias=False),
}


@pytest.mark.parametrize(
    ("name", "runtime"),
    quarter_quick(
        some_long(
            itertools.product(LOWERED, RUNTIMES),
            *itertools.product(("lstm, stacked", "gru, stacked"), RUNTIMES),
            *((name, "onnx") for name in ("lstm, last states", "gru", "rnn", "rnn relu")),
            *(("gru, last states", "litert"), ("lstm, last states", "litert")),
            ("lstm, sequence", "litert"),
        )
    ),
)
def test_one_file_runs_any_batch(name: str, runtime: str, seed: int) -> None:
    torch.manual_seed(seed)
    check_batches(case_of(LOWERED[name]()), runtime, seed)


@pytest.mark.parametrize(
    ("kind", "runtime"),
    some_long(
        itertools.product(KINDS, RUNTIMES),
        *itertools.product(KINDS, ("onnx",)),
        *((kind, "litert") for kind in KINDS if kind != "lstm"),
    ),
)
def test_sequences_longer_than_one_litert_call(kind: str, runtime: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Layer(kind, given=True, bidirectional=True)
    check_batches(case_of(model, (19, FEATURES)), runtime, seed)


def check_batches(case: Case, runtime: str, seed: int) -> None:
    """One session of `case` equals autograd for several batch sizes, also repeated ones."""
    run = opened(case.signature, runtime)
    for batch in (2, 8, 8, BATCH):
        feeds = case.feeds(seed, batch)
        came = run(feeds)
        ordered = [came[port.name] for port in case.signature.outputs]
        assert_close(case, ordered, case.expected(feeds))


Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def opened(signature: ProgramSignature, runtime: str) -> Run:
    """Open `signature` in `runtime`; the result maps feeds to all outputs by name."""
    if runtime == "litert":
        return opened_in_litert(signature)
    graph = to_onnx(signature)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = session.run(None, {name: value.numpy() for name, value in feeds.items()})
        return dict(zip(names, map(torch.from_numpy, map(np.asarray, results)), strict=True))

    return run


def opened_in_litert(signature: ProgramSignature) -> Run:
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter
    session = interpreter(model_content=tflite(signature), num_threads=1)
    runner = session.get_signature_runner(signature.name)

    def run(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = runner(**{name: value.numpy() for name, value in feeds.items()})
        return {name: torch.from_numpy(np.asarray(value)) for name, value in results.items()}

    return run


def tflite(signature: ProgramSignature) -> bytes:
    written: bytes = pytest.importorskip("exporters.tflite.tflite_writer").to_tflite([signature])
    return written


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes of `graph`, including those in the bodies of its loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes(attribute.g)


class Reader(nn.Module):
    """A bidirectional LSTM, a GRU and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, UNITS, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * UNITS, UNITS, batch_first=True)
        self.classifier = nn.Linear(UNITS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.gru(self.lstm(x)[0])[0][:, -1])


@pytest.mark.parametrize("format", some_long(["onnx", "tflite"], "tflite"))
def test_a_round_of_the_agent_equals_plain_torch(format: Format, tmp_path: Path, seed: int) -> None:
    needs_litert(format)
    torch.manual_seed(seed)
    model = Reader()
    submodel, out = split(model, "full", SHAPE, TRAINING), tmp_path / "bundle"
    export(submodel, from_model(model), out, format=format, verify=False)
    order = np.random.default_rng(seed)
    x = order.standard_normal((11, *SHAPE), dtype=np.float32)
    device = Device(x, order.integers(CLASSES, size=11), seed=seed % 1000)
    np.savez(tmp_path / "data.npz", x=device.x, y=device.y)
    train_bundle(
        out,
        str(tmp_path / "data.npz"),
        tmp_path / "update",
        threads=1,
        seed=device.seed,
    )
    actual = load_file(tmp_path / "update" / TENSORS)
    old, expected = oracles.state_of(model), oracles.train_full(model, device, PLAN)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        change = (value - old[name]).norm()
        assert (torch.from_numpy(actual[name]).double() - value).norm() <= 1e-4 * change, name


@pytest.mark.parametrize(
    ("spec", "runtime"),
    some_long(
        itertools.product(
            ("slice:lstm,skip=3", "low-rank:0.5,keep=0", "full", "slice:lstm", "width:0.5"),
            RUNTIMES,
        ),
        *itertools.product(("full", "slice:lstm", "width:0.5"), RUNTIMES),
        *itertools.product(("slice:lstm,skip=3",), RUNTIMES),
        ("low-rank:0.5,keep=0", "onnx"),
    ),
)
def test_families_of_a_recurrent_model(spec: str, runtime: str, seed: int) -> None:
    """Every output of every signature. Momentum starts at zero, so that it is the gradient."""
    torch.manual_seed(seed)
    model = ImdbBiLSTM(words=20, width=4)
    submodel = split(model, spec, (STEPS_OF_TIME,), TRAINING)
    values = submodel.cut(from_model(model))
    generator = torch.Generator().manual_seed(seed)
    for signature in submodel.program.signatures:
        feeds = {}
        for port in signature.inputs:
            shape = [n or BATCH for n in port.shape]
            if port.kind == "labels":
                # With both classes in halves, the gradient of the last bias may cancel.
                feeds[port.name] = torch.ones(shape, dtype=torch.int64)
                feeds[port.name][0] = 0
            elif port.dtype == "int64":
                feeds[port.name] = torch.randint(2, shape, generator=generator)
            elif port.kind == "scalar":
                # With a rate near 1, a bias of one number may cancel to its rounding error.
                feeds[port.name] = torch.tensor(1e-3)
            elif port.state is None:
                feeds[port.name] = torch.rand(shape, generator=generator)
            else:
                feeds[port.name] = values.get(port.state, torch.zeros(shape)).detach()
        wide = {n: v.double() if v.is_floating_point() else v for n, v in feeds.items()}
        run = opened(signature, runtime)
        assert_same(signature, run(feeds), signature.function(wide))


def trained_bilstm(steps: int) -> ProgramSignature:
    return split(ImdbBiLSTM(words=20, width=4), "full", (steps,), TRAINING).program.signatures[0]


def bilstm(steps: int) -> ProgramSignature:
    return case_of(Layer("lstm", "last", bidirectional=True), (steps, FEATURES)).signature


@pytest.mark.parametrize("build", some_long([trained_bilstm, bilstm], trained_bilstm))
def test_an_onnx_loop_has_the_same_size_for_more_steps(
    build: Callable[[int], ProgramSignature],
) -> None:
    kinds = []
    for steps in (5, 500):
        model = onnx.load_from_string(to_onnx(build(steps)))
        assert not [node.op_type for node in nodes(model.graph) if node.domain]
        kinds.append([node.op_type for node in nodes(model.graph)])
    assert kinds[0] == kinds[1]
    assert kinds[0].count("Scan") == 4  # two directions, there and back


@pytest.mark.long
def test_a_litert_call_has_the_same_size_for_a_longer_sequence() -> None:
    schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
    counted = []
    for steps in (16, 160):
        submodel = split(ImdbBiLSTM(words=20, width=4), "full", (steps,), TRAINING)
        model = schema.ModelT.InitFromPackedBuf(tflite(submodel.program.signatures[0]))
        codes = [code.builtinCode for code in model.operatorCodes]
        train, *calls = [
            Counter(codes[o.opcodeIndex] for o in g.operators) for g in model.subgraphs
        ]
        assert len(calls) == 4  # two directions, there and back
        assert train.pop(schema.BuiltinOperator.IF) == 4 * steps // 8
        counted.append((train, calls))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("bidirectional", some_long([False, True], True))
@pytest.mark.parametrize("write", some_long([to_onnx, tflite], tflite))
def test_the_same_layer_gives_the_same_bytes(
    write: Callable[[ProgramSignature], bytes], bidirectional: bool
) -> None:
    model = Layer("rnn", "last", bidirectional=bidirectional)
    assert write(case_of(model).signature) == write(case_of(model).signature)


@pytest.mark.long
@pytest.mark.parametrize(("write", "most"), [(to_onnx, 100_000), (tflite, 600_000)])
def test_the_lstm_of_the_paper_is_a_small_graph(
    write: Callable[[ProgramSignature], bytes], most: int
) -> None:
    submodel = split(imdb_bilstm(), "full", (256,), TRAINING)
    train = submodel.program.signatures[0]
    assert train.name == "train"
    assert len(write(train)) < most


def test_a_recurrence_over_the_batch_axis_has_no_tflite_form() -> None:
    pytest.importorskip("ai_edge_litert")

    class Samples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0][:, -1]

    submodel = split(Samples(), "full", SHAPE, TRAINING)
    with refused("export.loop-over-samples", signature="train"):
        tflite(submodel.program.signatures[0])


@pytest.mark.parametrize("kind", half_quick(KINDS))
def test_fading_gradients_are_not_subnormal(kind: str, seed: int) -> None:
    """Processors are about ten times slower with float32's subnormal numbers."""
    torch.manual_seed(seed)
    case = case_of(Layer(kind, "last", batch_first=True))
    feeds = case.feeds(seed) | {"x": torch.randn(BATCH, 400, FEATURES)}
    for name, value in feeds.items():  # a plain layer's gradient may also grow
        if "weight_hh" in name:
            feeds[name] = value / (2 * torch.linalg.matrix_norm(value, 2)).clamp(min=1)
    with RecurrenceLoops():
        actual = case.signature.function(feeds)["x+"]
    assert actual[:, -1].abs().max() > 0
    # 0, or a few of the steps that small numbers are rounded to.
    assert actual[:, 0].abs().max() < 1e-25
    assert not ((actual != 0) & (actual.abs() < torch.finfo(torch.float32).tiny)).any()


def test_an_lstm_with_projections_is_refused() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(FEATURES, UNITS, batch_first=True, proj_size=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0][:, -1]

    with refused("export.lstm-projections"):
        split(Projected(), "full", SHAPE, TRAINING)


def test_two_steps_of_one_name_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Loops called 'lstm' run lstm; gru_backward needs another name"
    ):
        register("lstm", STEPS["gru_back"])


def test_a_traced_layer_is_one_operator_per_pass() -> None:
    signature = case_of(Layer("lstm", batch_first=True)).signature
    assert list(operators(trace(signature))).count("edgetailor::loop") == 2
