"""The cache of graphs: a hit gives the same bundle, and only what changes a graph changes a key."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
from torch import Tensor, nn

from bundles import SAMPLE_SHAPE, tiny_model
from commands import evaluate_there, forked
from device_agent.formats.manifest import MANIFEST
from edgetailor import TrainingConfig, split
from exporters import export as exporting
from exporters.cache_folder import cache_folder
from exporters.export import Format, compile_graphs, export, with_forms
from exporters.graph_cache import GraphCache, default_cache
from exporters.memory.onnx_footprint import Footprint
from exporters.programs import program_identity
from exporters.programs.program import Program, ProgramSignature, Tensors, samples_port
from exporters.programs.program_identity import graphs_key
from exporters.programs.tracing import trace
from exporters.recording.capture import SharedRecording
from exporters.runtime_graph import Graph
from exporters.verification.verdict import Verdict
from parameters import half_quick, needs_litert, some_long
from toolkit.submodels.global_model import from_model

SPECS = (
    *("full", "low-rank:0.5,keep=0", "width:0.5", "pfedme", "cp:2.0"),
    *("slice:classifier", "slice:hidden+low-rank:0.5"),
)


class Net(nn.Module):
    """(N, 1, 6, 6) -> (N, 3), with a buffer that is not saved and so is a constant of graphs."""

    def __init__(self, shift: float = 0.0, dropout: float = 0.25) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        )
        self.hidden, self.drop = nn.Linear(288, 32), nn.Dropout(dropout)
        self.classifier = nn.Linear(32, 3)
        self.register_buffer("shift", torch.full((32,), shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.drop(torch.tanh(self.hidden(self.body(x)) + self.shift)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("EDGETAILOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


def keys(program: Program, format: Format = "onnx", **changes: object) -> dict[str, str]:
    """The key of every signature of `program` alone."""
    by_name = {s.name: graphs_key(program, [s], format) for s in program.signatures}
    assert None not in by_name.values()
    return {name: str(key) for name, key in by_name.items()}


@cache
def recorded() -> tuple[nn.Module, SharedRecording]:
    net = Net()
    return net, SharedRecording(net, SAMPLE_SHAPE)


@cache
def program_of(spec: str = "full", net: nn.Module | None = None, **training: object) -> Program:
    """The program of `spec` on `net`, by default on one net with random weights."""
    config = TrainingConfig(**training)  # type: ignore[arg-type]
    if net is not None:
        return split(net, spec, SAMPLE_SHAPE, config).program
    net, recording = recorded()
    with recording:
        return split(net, spec, SAMPLE_SHAPE, config).program


def traced(program: Program) -> dict[str, tuple[str, list[Tensor]]]:
    """What a writer lowers of each signature: the traced code and the constants in it."""
    graphs = {signature.name: trace(signature) for signature in program.signatures}
    return {
        name: (
            graph.code,
            [getattr(graph, str(n.target)) for n in graph.graph.find_nodes(op="get_attr")],
        )
        for name, graph in graphs.items()
    }


@pytest.mark.parametrize("spec", some_long(SPECS, *SPECS[1:]))
def test_weights_change_neither_key_nor_graph(spec: str) -> None:
    """Two models with other weights: weights that the key omits must be inputs of the graphs."""
    first, second = program_of(spec), program_of(spec, Net())
    assert keys(first) == keys(second)
    graphs, twins = traced(first), traced(second)
    for name, (code, constants) in graphs.items():
        assert code == twins[name][0]
        torch.testing.assert_close(constants, twins[name][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "training",
    [
        {"momentum": 0.8},
        {"weight_decay": 0.01},
        {"optimizer": "adam"},
        {"optimizer": "nesterov"},
        {"proximal": 0.1},
        {"masked": True},
        {"loss": "mse"},
        {"batch_norm": "static"},
    ],
    ids=str,
)
def test_training_options_that_change_the_step_change_its_key(training: dict[str, object]) -> None:
    assert keys(program_of())["train"] != keys(program_of(**training))["train"]


def test_recomputation_changes_the_key_of_training_alone() -> None:
    plain, again = keys(program_of()), keys(program_of("full,recompute=yes"))
    assert [name for name in plain if plain[name] != again[name]] == ["train"]


@pytest.mark.parametrize(
    "training", [{"learning_rate": 0.3}, {"epochs": 7}, {"batch_size": 5}, {"round_decay": 0.5}]
)
def test_options_of_the_schedule_change_no_key(training: dict[str, float]) -> None:
    assert keys(program_of()) == keys(program_of(**training))


def test_constants_of_the_model_change_all_keys() -> None:
    """A buffer that is not saved is no input: its numbers are in the graphs."""
    plain, shifted = keys(program_of()), keys(program_of(net=Net(shift=0.5)))
    assert [name for name in plain if plain[name] == shifted[name]] == []


def test_the_rate_of_dropout_changes_the_key_of_training() -> None:
    assert keys(program_of())["train"] != keys(program_of(net=Net(dropout=0.5)))["train"]


@pytest.mark.parametrize(
    "other",
    some_long(
        ["low-rank:0.4,keep=0", "width:0.25", "cp:3.0", "pfedme,penalty=3", "slice:classifier"],
        *("low-rank:0.4,keep=0", "cp:3.0"),
    ),
)
def test_other_sizes_have_other_keys(other: str) -> None:
    specs = {"low-rank": "low-rank:0.5,keep=0", "pfedme": "pfedme", "slice": "full"}
    family = re.split("[:,]", other)[0]
    first = keys(program_of(specs.get(family, f"{family}:2.0" if family == "cp" else "width:0.5")))
    step = "train" if "train" in first else "personal_step"
    assert first[step] != keys(program_of(other))[step]


def test_format_code_and_libraries_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of()
    different = {graphs_key(program, program.signatures, format) for format in get_args(Format)}

    def key_with(name: str, value: Callable[..., object]) -> str | None:
        with monkeypatch.context() as patch:
            patch.setattr(program_identity, name, value)
            return graphs_key(program, program.signatures, "onnx")

    different.add(key_with("library_versions", lambda: (("torch", "0"),)))
    different.add(key_with("sources_digest", lambda package: f"another {package}"))
    different.add(graphs_key(replace(program, classes=9), program.signatures, "onnx"))
    torch.set_default_dtype(torch.float64)
    try:
        different.add(graphs_key(program, program.signatures, "onnx"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert None not in different
    assert len(different) == 6


def test_ports_and_functions_change_the_key() -> None:
    program = program_of()
    (step, predict, _) = program.signatures
    variants = [
        step,
        replace(step, name="other"),
        replace(step, inputs=step.inputs[::-1]),
        replace(step, outputs=step.outputs[::-1]),
        replace(step, function=predict.function),
    ]
    assert len({graphs_key(program, [variant], "onnx") for variant in variants}) == len(variants)


def test_a_callers_own_function_has_no_key(folder: Path) -> None:
    """It may call code that no key covers; its graphs are made each time."""

    def double(feeds: Tensors) -> dict[str, Tensor]:
        return {"output": 2 * feeds["x"]}

    signature = ProgramSignature(
        "double", (samples_port((3,)),), (samples_port((3,), "output"),), double
    )
    program = Program("double", (3,), 3, (signature,), (), ())
    assert graphs_key(program, program.signatures, "onnx") is None
    assert compile_graphs(program)["double"].operators == 1
    assert not folder.exists()


def test_keys_are_the_same_in_another_process() -> None:
    """Also with another order of sets, which follows from the hash seed."""
    expression = "[keys(program_of(spec)) for spec in ('cp:2.0', 'slice:classifier')]"
    ours, theirs = Pipe(duplex=False)
    child = forked(evaluate_there, Path(__file__).parent, "test_graph_cache", expression, theirs)
    theirs.close()
    seeded, printed = ours.recv()
    child.join()
    assert seeded != hash("edgetailor") or "PYTHONHASHSEED" in os.environ
    assert printed == repr(eval(expression))


def bundle(out: Path) -> dict[str, bytes]:
    """The files of the bundle at `out`."""
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize(
    ("spec", "format"),
    half_quick(
        some_long(
            [("full", "onnx"), ("slice:classifier", "onnx"), ("full", "tflite")],
            ("slice:classifier", "onnx"),
        )
    ),
)
def test_a_cached_export_writes_the_same_bundle(
    spec: str, format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_litert(format)
    net = Net()
    submodel, weights = split(net, spec, SAMPLE_SHAPE), from_model(net)
    program, values = submodel.program, submodel.cut(weights)
    fresh = export(program, values, tmp_path / "a", base="", format=format)
    assert (fresh.reused, fresh.verified_earlier) == (frozenset(), False)

    def never(*arguments: object) -> None:
        raise AssertionError("a cached export computes nothing that follows from the graphs")

    for name in ("lower", "verify", "SizedGraph", "forms"):
        monkeypatch.setattr(exporting, name, never)
    again = export(program, values, tmp_path / "b", base="", format=format)
    assert again.reused == {signature.name for signature in program.signatures}
    assert again.verified_earlier
    assert again.verdict == fresh.verdict
    assert bundle(tmp_path / "a") == bundle(tmp_path / "b")
    assert MANIFEST in bundle(tmp_path / "a")
    for name, graph in fresh.graphs.items():
        twin = again.graphs[name]
        assert graph == twin
        assert (graph.forms, graph.figures) == (twin.forms, twin.figures)
        assert [form.footprint for form in graph.forms.values()] == [
            form.footprint for form in twin.forms.values()
        ]
        assert [graph.footprint(n) for n in (1, 7)] == [
            again.graphs[name].footprint(n) for n in (1, 7)
        ]


@pytest.fixture
def program() -> Program:
    """Predictions of a small model."""
    whole = split(tiny_model()[0], "full", SAMPLE_SHAPE).program
    return replace(whole, signatures=whole.signatures[1:2])


def test_no_cache_reads_and_writes_nothing(program: Program, folder: Path) -> None:
    compile_graphs(program, cache=False)
    assert not folder.exists()


def stages(program: Program) -> list[str]:
    """What an export of the graphs of `program` reports."""
    heard: list[str] = []
    compile_graphs(program, heard.append)
    return heard


@pytest.fixture
def step() -> tuple[Program, dict[str, Graph]]:
    """A training step that has other forms, for batches of 5 samples, and its plain graph."""
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 3))
    whole = split(net, "full", SAMPLE_SHAPE, TrainingConfig(batch_size=5)).program
    program = replace(whole, signatures=whole.signatures[:1])
    return program, compile_graphs(program)


def test_forms_and_figures_are_kept_for_each_batch_size(
    step: tuple[Program, dict[str, Graph]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plain = step
    cache = GraphCache(folder)
    fresh = with_forms(program, plain, cache)["train"]
    assert fresh.forms
    assert fresh.figures is not None
    assert cache.with_figures(plain["train"], 6) is None
    changed = replace(plain["train"], data=plain["train"].data + b" ")
    assert cache.with_figures(changed, 5) is None
    again = cache.with_figures(plain["train"], 5)
    assert again is not None
    assert (again.forms, again.figures) == (fresh.forms, fresh.figures)
    for name, value in (
        ("library_versions", lambda: (("onnx", "0"),)),
        ("sources_digest", lambda package: f"another {package}"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(program_identity, name, value)
            assert cache.with_figures(plain["train"], 5) is None


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "changed"])
def test_damaged_figures_are_computed_again(
    damage: bytes | None, step: tuple[Program, dict[str, Graph]], folder: Path
) -> None:
    program, plain = step
    cache = GraphCache(folder)
    fresh = with_forms(program, plain, cache)["train"]
    [file] = folder.glob("*.figures")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    again = with_forms(program, plain, cache)["train"]
    assert (again.forms, again.figures) == (fresh.forms, fresh.figures)
    assert file.read_bytes() == whole


def test_figures_count_towards_the_limit(
    step: tuple[Program, dict[str, Graph]], folder: Path
) -> None:
    program, plain = step
    with_forms(program, plain, GraphCache(folder))
    assert {path.suffix for path in folder.iterdir()} == {".graphs", ".figures"}
    complete = with_forms(program, plain)["train"]
    GraphCache(folder, limit_bytes=1).keep_figures(complete)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "changed"])
def test_a_damaged_entry_is_written_again(
    damage: bytes | None, program: Program, folder: Path
) -> None:
    assert stages(program) == ["lowering predict"]
    assert stages(program) == []
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    assert stages(program) == ["lowering predict"]
    assert entry.read_bytes() == whole
    assert stages(program) == []


def test_an_entry_of_another_version_counts_as_absent(program: Program, folder: Path) -> None:
    compile_graphs(program)
    (entry,) = folder.iterdir()
    content = msgspec.msgpack.encode({"runtime": "onnx", "graphs": []})
    entry.write_bytes(program_identity.hashlib.sha256(content).digest() + content)
    assert stages(program) == ["lowering predict"]


def test_a_folder_that_cannot_be_written_stops_no_export(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGETAILOR_CACHE", str(tmp_path / "file"))
    assert compile_graphs(program)["predict"].operators


def verdict(error: float) -> Verdict:
    return Verdict(error, "predict", "output", 1, tolerance=5e-3)


def test_a_verdict_is_of_these_very_graphs(program: Program, folder: Path) -> None:
    cache, graphs = GraphCache(folder), compile_graphs(program, cache=False)
    cache.keep_verdict("key", graphs, verdict(0.001))
    assert cache.verdict("key", graphs) == verdict(0.001)
    assert cache.verdict("other", graphs) is None
    changed = {name: replace(graph, data=graph.data + b" ") for name, graph in graphs.items()}
    assert cache.verdict("key", changed) is None


def test_verification_runs_again_when_asked(program: Program, tmp_path: Path) -> None:
    """And for graphs that were made without being verified."""
    model, _ = tiny_model()
    values = split(model, "full", SAMPLE_SHAPE).cut(from_model(model))
    heard: list[str] = []

    def exported(name: str, check: bool | None) -> exporting.ExportedBundle:
        heard.clear()
        out = tmp_path / name
        return export(program, values, out, base="", check=check, report=heard.append)

    assert exported("a", False).verdict is None
    assert not exported("b", None).verified_earlier
    assert heard == ["verifying against PyTorch"]
    assert exported("c", None).verified_earlier
    assert heard == []
    assert not exported("d", True).verified_earlier
    assert heard == ["verifying against PyTorch"]
    skipped = exported("e", False)
    assert (skipped.verdict, skipped.verified_earlier) == (None, False)


def no_footprint(batch: int) -> Footprint:
    """Not asked for."""
    raise AssertionError


def test_the_least_recently_used_entries_are_deleted(folder: Path) -> None:
    def graph(letter: str) -> dict[str, Graph]:
        data = letter.encode() * 1000
        return {letter: Graph("onnx", letter, data, 1, 1000, no_footprint)}

    cache = GraphCache(folder, limit_bytes=2500)
    for number, letter in enumerate("ab"):
        cache.store(letter, graph(letter))
        os.utime(folder / f"{letter}.graphs", (number, number))
    assert cache.load("a") is not None  # now the more recently used one
    cache.store("c", graph("c"))
    assert {path.stem for path in folder.iterdir()} == {"a", "c"}


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("EDGETAILOR_CACHE", "/own")
    assert (cache_folder(), default_cache().folder) == (Path("/own"), Path("/own/graphs"))
    monkeypatch.delenv("EDGETAILOR_CACHE")
    assert cache_folder() == Path("/xdg/edgetailor")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/pi")
    assert cache_folder() == Path("/home/pi/.cache/edgetailor")
