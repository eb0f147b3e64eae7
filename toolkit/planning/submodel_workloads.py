"""Computes the workloads of submodels from exported graphs, and caches the workloads."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from torch import nn

import toolkit
from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Record, Step, Train, uploaded
from exporters.cache_folder import cache_folder
from exporters.export import compile_graphs
from exporters.objectives.loss_text import is_own
from exporters.onnx.graph_workload import signature_work
from exporters.programs.changed_parameters import writes_of
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.program_identity import digest, environment, sources_digest
from exporters.recording.capture import SharedRecording, capture
from exporters.recording.captured import Captured
from profiles.cost_model import memory_rule, workload
from profiles.cost_model.memory_rule import state_bytes
from profiles.cost_model.workload import SignatureWork, Workload
from profiles.errors import EdgeTailorError
from toolkit.aggregation import submodel_strength
from toolkit.aggregation.submodel_strength import strength, trainable
from toolkit.families import family_named
from toolkit.planning import least_work
from toolkit.splitting import split
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Submodel, element_count

logger = logging.getLogger(__name__)

ESTIMATE = ".estimate"
"""Part of the name of a cache file that holds a lower bound."""


class Known(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A submodel, its strength, and its workload: the work and the traffic of a device.

    If the workload is a lower bound, `activations` is the size in bytes of all outputs of layers
    for one batch. A step keeps most of these outputs.
    """

    submodel: str
    strength: float
    work: Workload
    activations: int = 0


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
            captured = capture(self.model, self.sample_shape, is_own(self.training.loss))
        # The learning rate is an input of the graphs, and the epochs are in the schedule. Both
        # change no graph, so they are left out of the key.
        training = replace(
            self.training, learning_rate=0.0, round_decay=1.0, epochs=1, steps=None, milestones=()
        )
        self.key = digest([code_version(), str(training), *content(captured)])

    def remembered(self, spec: str) -> Known | Impossible | None:
        """The cached result of `spec`, or None. Raises SpecError if `spec` is wrong."""
        family_named(parse_spec(spec).family)
        known, estimate = self.read(self.file_of(spec)), self.remembered_estimate(spec)
        return estimate if known is None and isinstance(estimate, Impossible) else known

    def of(self, spec: str) -> Known | Impossible:
        """Read the workload of `spec` from the cache, or export its training graphs.

        Raises SpecError if `spec` is wrong.
        """
        return self.remembered(spec) or self.keep(spec, self.file_of(spec), self.compute)

    def remembered_estimate(self, spec: str) -> Known | Impossible | None:
        """The cached result of `at_least`, or None."""
        return self.read(self.file_of(spec, ESTIMATE))

    def at_least(self, spec: str) -> Known | Impossible:
        """A lower bound of the workload of `spec`, or the reason why `spec` is not possible.

        Nothing is exported. The strength and the bytes of a round are exact. Raises SpecError if
        `spec` is wrong.
        """
        known = self.remembered_estimate(spec)
        return known or self.keep(spec, self.file_of(spec, ESTIMATE), self.estimate)

    def file_of(self, spec: str, kind: str = "") -> Path | None:
        """The file of `spec` in the cache; None without a cache."""
        return self.cache and self.cache / f"{digest([self.key, spec])}{kind}.json"

    def read(self, file: Path | None) -> Known | Impossible | None:
        """The result in a file of the cache; None if there is none."""
        if file is None:
            return None
        try:
            return msgspec.json.decode(file.read_bytes(), type=Known | Impossible)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    def keep(
        self, spec: str, file: Path | None, compute: Callable[[Submodel], Known]
    ) -> Known | Impossible:
        """Split the submodel `spec`, call `compute` with it, and write the result to `file`."""
        result: Known | Impossible
        try:
            with self.recording:
                submodel = split(self.model, spec, self.sample_shape, self.training)
            result = compute(submodel)
        except EdgeTailorError as error:
            result = Impossible(submodel=spec, reason=str(error))
        if file is not None:
            # The cache only saves time: a plan works without it.
            with suppress(OSError):
                write_file(file, msgspec.json.encode(result))
        return result

    def compute(self, submodel: Submodel) -> Known:
        """Compute strength and workload of `submodel`. Raises ExportError if the export fails."""
        program = submodel.program
        signatures = needed_signatures(program)
        # An export of this submodel finds these graphs in the cache.
        graphs = compile_graphs(
            dataclasses.replace(program, signatures=signatures),
            cache=self.cache is not None,
        )

        def work(signature: ProgramSignature, times: int) -> SignatureWork:
            batch = program.batch_of(signature.name)
            return signature_work(signature, batch, times, graphs[signature.name].data)

        return self.known(submodel, work)

    def estimate(self, submodel: Submodel) -> Known:
        """Compute the strength of `submodel` and a lower bound of its workload."""

        def work(signature: ProgramSignature, times: int) -> SignatureWork:
            # Of the steps of a schedule, those with labels run the recorded model.
            forward = any(port.kind == "labels" for port in signature.inputs)
            macs = submodel.counts.macs if forward else 0
            batch = submodel.program.batch_of(signature.name)
            return least_work.of_signature(signature, batch, times, macs * batch // full)

        full = submodel.program.largest_batch
        activations = 4 * submodel.counts.activations
        return msgspec.structs.replace(self.known(submodel, work), activations=activations)

    def known(
        self, submodel: Submodel, work: Callable[[ProgramSignature, int], SignatureWork]
    ) -> Known:
        """The strength and workload of `submodel`; `work` computes the work of a signature."""
        program = submodel.program
        signatures = {signature.name: signature for signature in program.signatures}
        stages, steps = stages_of(program), steps_of(program)
        ports = [port for step in steps for port in signatures[step.signature].inputs]
        states = {port.state for port in ports if port.kind == "state"}
        sums = [port.shape for port in ports if port.kind == "gradient"]
        table = uploaded(program.tensors)
        return Known(
            submodel=str(submodel.spec),
            strength=strength(str(submodel.spec), table, trainable(from_model(self.model).tensors)),
            work=Workload(
                recording=tuple(work(signatures[stage.signature], 1) for stage in stages),
                training=tuple(
                    work(signatures[step.signature], self.runs_in_batch(step)) for step in steps
                ),
                state=state_bytes(
                    {
                        e.name: 4 * element_count(e.shape)
                        for e in program.tensors
                        if e.name in states
                    },
                    {e.name for e in program.tensors if e.role == "personal"},
                )
                + sum(4 * element_count([size for size in shape if size]) for shape in sums),
                down=submodel.bytes,
                up=sum(4 * element_count(e.shape) for e in table),
            ),
        )

    def runs_in_batch(self, step: Step) -> int:
        """How often a batch runs the signature of `step`."""
        return self.training.batch_size if step.each_sample is True else step.times


def stages_of(program: Program) -> list[Record]:
    """The instructions of `program` that record activations."""
    return [instruction for instruction in program.schedule if isinstance(instruction, Record)]


def steps_of(program: Program) -> list[Step]:
    """The steps that the training of `program` takes on each batch."""
    return [step for i in program.schedule if isinstance(i, Train) for step in i.steps]


def needed_signatures(program: Program) -> tuple[ProgramSignature, ...]:
    """The signatures that a round of training runs, for stages and for steps."""
    signatures = {signature.name: signature for signature in program.signatures}
    stages = [stage.signature for stage in stages_of(program)]
    return tuple(signatures[name] for name in (*stages, *(s.signature for s in steps_of(program))))


def content(captured: Captured) -> Iterable[str]:
    """Yield texts that together determine the graphs of all submodels of a model.

    The texts describe the model's own graphs and the shapes of its tensors. They also say for each
    tensor whether all its numbers are zero, because weights of zeros are not factorized.
    """
    graphs = captured.training, captured.inference
    for graph in filter(None, (*graphs, *map(writes_of, graphs))):
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
    modules = (workload, memory_rule, least_work, submodel_strength)
    sources = [Path(__file__), *(Path(str(module.__file__)) for module in modules)]
    for folder in SPLITTING_FOLDERS:
        sources += own.glob(f"{folder}/*.py")
    texts = (path.read_text(encoding="utf-8") for path in sorted(sources))
    return digest([environment(), sources_digest("exporters"), *texts])
