"""What submodels have a device do, read off their exported graphs, and remembered."""

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from torch import nn

import toolkit
from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Record, Train, uploaded
from exporters.export import compile_graphs
from exporters.graph_cache import cache_folder
from exporters.onnx.graph_workload import signature_work
from exporters.programs.capture import capture
from exporters.programs.captured import Captured
from exporters.programs.program import Report, silent
from exporters.programs.program_identity import digest, environment, sources_digest
from profiles.cost_model import workload
from profiles.cost_model.workload import SignatureWork, Workload
from profiles.errors import EdgeTailorError
from toolkit.aggregation.submodel_strength import strength, trainable
from toolkit.families import family_named
from toolkit.splitting import split
from toolkit.submodels.global_model import from_model
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Submodel, count
from toolkit.submodels.training_config import TrainingConfig


class Known(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A submodel, how strong it is and what it has a device do."""

    submodel: str
    strength: float
    work: Workload


class Impossible(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A submodel that the model cannot give, or that cannot be exported, and why."""

    submodel: str
    reason: str


@dataclass
class Workloads:
    """The workloads of the submodels of one model, kept in `cache` by what they follow from.

    Without `cache` every graph is made again.

    Raises ModelError where the model cannot be recorded.
    """

    model: nn.Module
    sample_shape: tuple[int, ...]
    training: TrainingConfig
    cache: Path | None = field(default_factory=lambda: cache_folder())
    report: Report = silent

    def __post_init__(self) -> None:
        captured = capture(self.model, self.sample_shape)
        # Rates are inputs of the graphs, and epochs are the schedule's: no graph knows them.
        training = replace(self.training, learning_rate=0.0, round_decay=1.0, epochs=1)
        self.key = digest([code_version(), str(training), *content(captured)])

    def remembered(self, spec: str) -> Known | Impossible | None:
        """What the cache has of `spec`. Raises SpecError where that is none, whatever the model."""
        family_named(parse_spec(spec).family)
        if self.cache is None:
            return None
        try:
            return msgspec.json.decode(
                self.place(self.cache, spec).read_bytes(), type=Known | Impossible
            )
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    def of(self, spec: str) -> Known | Impossible:
        """The workload of `spec`: from the cache, or by exporting what trains.

        Raises SpecError where `spec` is none, whatever the model.
        """
        known = self.remembered(spec)
        if known is not None:
            return known
        try:
            known = self.look_at(split(self.model, spec, self.sample_shape, self.training))
        except EdgeTailorError as error:
            known = Impossible(submodel=spec, reason=str(error))
        if self.cache is not None:
            # A plan does not need a place to remember what it saw.
            with suppress(OSError):
                write_file(self.place(self.cache, spec), msgspec.json.encode(known))
        return known

    def place(self, cache: Path, spec: str) -> Path:
        """The file of `spec` in the folder `cache`."""
        return cache / f"{digest([self.key, spec])}.json"

    def look_at(self, submodel: Submodel) -> Known:
        """Strength and workload of `submodel`. Raises ExportError where it cannot be exported."""
        program, batch = submodel.program, self.training.batch_size
        signatures = {signature.name: signature for signature in program.signatures}
        stages = [i.signature for i in program.schedule if isinstance(i, Record)]
        steps = [s for i in program.schedule if isinstance(i, Train) for s in i.steps]
        needed = [signatures[name] for name in (*stages, *(s.signature for s in steps))]
        # An export of this submodel finds these graphs in the cache.
        graphs = compile_graphs(
            dataclasses.replace(program, signatures=tuple(needed)), cache=self.cache is not None
        )

        def work(name: str, times: int = 1) -> SignatureWork:
            return signature_work(signatures[name], batch, times, graphs[name].data)

        recording = [work(name) for name in stages]
        training = [work(s.signature, s.times) for s in steps]
        states = {
            port.state
            for step in steps
            for port in signatures[step.signature].inputs
            if port.kind == "state"
        }
        table = uploaded(program.tensors)
        return Known(
            submodel=str(submodel.spec),
            strength=strength(str(submodel.spec), table, trainable(from_model(self.model).tensors)),
            work=Workload(
                recording=tuple(recording),
                training=tuple(training),
                state=sum(
                    4 * count(e.shape) * (2 if e.role == "personal" else 1)
                    for e in program.tensors
                    if e.name in states
                ),
                down=submodel.bytes,
                up=sum(4 * count(e.shape) for e in table),
            ),
        )


def content(captured: Captured) -> Iterable[str]:
    """What the graphs of all submodels of a model follow from: its own graphs, and shapes.

    Weights that are all zero are not factorized, so that they count as well.
    """
    for graph in (captured.training, captured.inference):
        yield graph.code
        yield from (f"{node.name} {node.meta.get('val')}" for node in graph.graph.nodes)
    for name, tensor in captured.tensors.items():
        yield f"{name} {tuple(tensor.shape)} {bool(tensor.any())} {name in captured.parameters}"


ROOMS_THAT_SPLIT = (
    *("submodels", "families", "channels", "slicing"),
    *("factorization", "factor_layers", "personal"),
)
"""Folders of `toolkit` whose code decides what a submodel's graphs are."""


def code_version() -> str:
    """Changes with whatever may export another graph, or read another workload off it."""
    own = Path(toolkit.__file__).parent
    sources = [Path(__file__), Path(str(workload.__file__))]
    for room in ROOMS_THAT_SPLIT:
        sources += own.glob(f"{room}/*.py")
    texts = (path.read_text(encoding="utf-8") for path in sorted(sources))
    return digest([environment(), sources_digest("exporters"), *texts])
