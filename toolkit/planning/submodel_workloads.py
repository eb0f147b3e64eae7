"""Computes the workloads of submodels from exported graphs, and caches the workloads."""

import dataclasses
import logging
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
from exporters.programs.program_identity import digest, environment, sources_digest
from exporters.recording.capture import SharedRecording, capture
from exporters.recording.captured import Captured
from profiles.cost_model import memory_rule, workload
from profiles.cost_model.memory_rule import state_bytes
from profiles.cost_model.workload import SignatureWork, Workload
from profiles.errors import EdgeTailorError
from toolkit.aggregation.submodel_strength import strength, trainable
from toolkit.families import family_named
from toolkit.splitting import split
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Submodel, element_count

logger = logging.getLogger(__name__)


class Known(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A submodel, its strength, and its workload: what a device has to compute and transfer."""

    submodel: str
    strength: float
    work: Workload


class Impossible(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A submodel that is not possible for the model or cannot be exported, and the reason."""

    submodel: str
    reason: str


@dataclass
class Workloads:
    """The workloads of the submodels of one model.

    The cache key of a workload has everything that determines the workload: the model's graphs, the
    training options and the versions of the code.

    Attributes:
        model: The whole model.
        sample_shape: Shape of one sample, without the batch.
        training: The hyper-parameters of local training.
        cache: The folder of the cache. None builds every graph again.

    Raises:
        ModelError: The model cannot be recorded.
    """

    model: nn.Module
    sample_shape: tuple[int, ...]
    training: TrainingConfig
    cache: Path | None = field(default_factory=lambda: cache_folder())

    def __post_init__(self) -> None:
        logger.info("recording the model")
        self.recording = SharedRecording(self.model, self.sample_shape)
        with self.recording:
            captured = capture(self.model, self.sample_shape)
        # The learning rate is an input of the graphs, and the schedule holds the epochs. So they
        # change no graph and are left out of the key.
        training = replace(
            self.training, learning_rate=0.0, round_decay=1.0, epochs=1, steps=None, milestones=()
        )
        self.key = digest([code_version(), str(training), *content(captured)])

    def remembered(self, spec: str) -> Known | Impossible | None:
        """The cached result of `spec`, or None. Raises SpecError if `spec` is wrong."""
        family_named(parse_spec(spec).family)
        if self.cache is None:
            return None
        try:
            return msgspec.json.decode(
                self.file_of(self.cache, spec).read_bytes(), type=Known | Impossible
            )
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    def of(self, spec: str) -> Known | Impossible:
        """Read the workload of `spec` from the cache, or export its training graphs.

        Raises SpecError if `spec` is wrong.
        """
        known = self.remembered(spec)
        if known is not None:
            return known
        try:
            with self.recording:
                submodel = split(self.model, spec, self.sample_shape, self.training)
            known = self.compute(submodel)
        except EdgeTailorError as error:
            known = Impossible(submodel=spec, reason=str(error))
        if self.cache is not None:
            # The cache only saves time: a plan works without it.
            with suppress(OSError):
                write_file(self.file_of(self.cache, spec), msgspec.json.encode(known))
        return known

    def file_of(self, cache: Path, spec: str) -> Path:
        """The file of `spec` in the folder `cache`."""
        return cache / f"{digest([self.key, spec])}.json"

    def compute(self, submodel: Submodel) -> Known:
        """Compute strength and workload of `submodel`. Raises ExportError if the export fails."""
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
                state=state_bytes(
                    {
                        e.name: 4 * element_count(e.shape)
                        for e in program.tensors
                        if e.name in states
                    },
                    {e.name for e in program.tensors if e.role == "personal"},
                ),
                down=submodel.bytes,
                up=sum(4 * element_count(e.shape) for e in table),
            ),
        )


def content(captured: Captured) -> Iterable[str]:
    """Yield texts that together determine the graphs of all submodels of a model.

    They describe the model's own graphs and the shapes of its tensors. For each tensor they also
    say whether it has a number that is not zero, because a weight of zeros is not factorized.
    """
    for graph in (captured.training, captured.inference):
        yield graph.code
        yield from (f"{node.name} {node.meta.get('val')}" for node in graph.graph.nodes)
    for name, tensor in captured.tensors.items():
        yield f"{name} {tuple(tensor.shape)} {bool(tensor.any())} {name in captured.parameters}"


SPLITTING_FOLDERS = (
    *("submodels", "cutting", "families", "channels", "slicing"),
    *("factorization", "factor_layers", "personal"),
)
"""Folders of `toolkit` whose code determines the graphs of a submodel."""


def code_version() -> str:
    """A hash of all code and libraries that determine graphs or workloads."""
    own = Path(toolkit.__file__).parent
    sources = [Path(__file__), *(Path(str(m.__file__)) for m in (workload, memory_rule))]
    for folder in SPLITTING_FOLDERS:
        sources += own.glob(f"{folder}/*.py")
    texts = (path.read_text(encoding="utf-8") for path in sorted(sources))
    return digest([environment(), sources_digest("exporters"), *texts])
