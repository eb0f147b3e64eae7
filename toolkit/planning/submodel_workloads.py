"""What submodels have a device do, read off their exported graphs, and remembered."""

import hashlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import msgspec
from torch import nn

import exporters
import toolkit
from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Record, Train, uploaded
from exporters.onnx.graph_workload import signature_work
from exporters.programs.capture import capture
from exporters.programs.captured import Captured
from profiles.cost_model import workload
from profiles.cost_model.workload import Workload
from profiles.errors import EdgeTailorError
from toolkit.aggregation.submodel_strength import strength, trainable
from toolkit.families import family_named
from toolkit.splitting import split
from toolkit.submodels.global_model import from_model
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Submodel, count
from toolkit.submodels.training_config import TrainingConfig

logger = logging.getLogger(__name__)


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

    Raises ModelError where the model cannot be recorded.
    """

    model: nn.Module
    sample_shape: tuple[int, ...]
    training: TrainingConfig
    cache: Path = field(default_factory=lambda: cache_folder())

    def __post_init__(self) -> None:
        logger.info("recording the model")
        captured = capture(self.model, self.sample_shape)
        # Rates are inputs of the graphs, and epochs are the schedule's: no graph knows them.
        training = replace(self.training, learning_rate=0.0, round_decay=1.0, epochs=1)
        self.key = digest([code_version(), str(training), *content(captured)])

    def remembered(self, spec: str) -> Known | Impossible | None:
        """What the cache has of `spec`. Raises SpecError where that is none, whatever the model."""
        family_named(parse_spec(spec).family)
        try:
            return msgspec.json.decode(self.place(spec).read_bytes(), type=Known | Impossible)
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
        # A plan does not need a place to remember what it saw.
        with suppress(OSError):
            write_file(self.place(spec), msgspec.json.encode(known))
        return known

    def place(self, spec: str) -> Path:
        """The file of `spec` in the cache."""
        return self.cache / f"{digest([self.key, spec])}.json"

    def look_at(self, submodel: Submodel) -> Known:
        """Strength and workload of `submodel`. Raises ExportError where it cannot be exported."""
        program, batch = submodel.program, self.training.batch_size
        signatures = {signature.name: signature for signature in program.signatures}
        stages = [i.signature for i in program.schedule if isinstance(i, Record)]
        steps = [s for i in program.schedule if isinstance(i, Train) for s in i.steps]
        recording = [signature_work(signatures[name], batch) for name in stages]
        training = [signature_work(signatures[s.signature], batch, s.times) for s in steps]
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


def cache_folder() -> Path:
    """Where workloads are kept: ~/.cache/edgetailor, or below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgetailor"


def digest(parts: Iterable[str]) -> str:
    """SHA-256 of `parts`, none of which runs into the next."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode()
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


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
    versions = [metadata.version(name) for name in ("torch", "onnx", "onnxscript")]
    own = Path(toolkit.__file__).parent
    sources = [Path(__file__), Path(str(workload.__file__))]
    sources += Path(exporters.__file__).parent.rglob("*.py")
    for room in ROOMS_THAT_SPLIT:
        sources += own.glob(f"{room}/*.py")
    return digest([*versions, *(path.read_text(encoding="utf-8") for path in sorted(sources))])
