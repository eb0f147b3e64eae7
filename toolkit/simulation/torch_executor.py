"""Trains a client in this process as the agent does, with PyTorch in place of the runtime.

Batches, their order, seeds, recordings and the personal model come from the agent's code. Only the
graphs are not exported: PyTorch runs the traced signatures.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.fx import GraphModule

from device_agent.data.local_data import LocalData
from device_agent.formats.bundle import Bundle
from device_agent.formats.evaluation_counts import Evaluation, EvaluationCounts, EvaluationRequest
from device_agent.formats.manifest import FORMAT_VERSION, Manifest, Signature, TensorEntry, Train
from device_agent.formats.update import UpdateRecord
from device_agent.training.activation_cache import Recording, RecordingInMemory
from device_agent.training.batching import held_out
from device_agent.training.bundle_training import personal_tensors, trained_update
from device_agent.training.personal_model import personal_entries
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions
from exporters.int8_scales import int8_bytes
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.tracing import trace_for_torch
from exporters.recording.inputs.unknown_ids import is_wrong_id, unknown_ids
from profiles.errors import DataError, InputError
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.one_step_submodel import scale_learning_rates
from toolkit.submodels.rolling_window import in_round
from toolkit.submodels.submodel import Submodel

Arrays = dict[str, np.ndarray]
NOWHERE = Path()
"""Takes the place of the folders of a bundle and of a training, which do not exist here."""


class TorchSession:
    """Runs a traced signature in PyTorch on `device`. Implements the agent's `Session` protocol."""

    def __init__(self, signature: ProgramSignature, device: str = "cpu") -> None:
        self._device = device
        self._graph: GraphModule = trace_for_torch(signature, device)
        self._inputs = [port.name for port in signature.inputs]
        self._outputs = [port.name for port in signature.outputs]
        self.inputs, self.outputs = frozenset(self._inputs), frozenset(self._outputs)

    def run(self, feeds: Mapping[str, np.ndarray], over: Mapping[str, str] | None = None) -> Arrays:
        """See `Session`. `over` is ignored: no input is overwritten."""
        with torch.inference_mode():
            given = (torch.from_numpy(feeds[name]).to(self._device) for name in self._inputs)
            try:
                results = self._graph(*given)
            except Exception as error:
                if is_wrong_id(error):
                    raise unknown_ids(error) from error
                raise
        return {n: value.cpu().numpy() for n, value in zip(self._outputs, results, strict=True)}


@dataclass(frozen=True)
class MemoryBundle(Bundle):
    """A bundle in memory, without files, for a client. `values` are its weights."""

    values: Mapping[str, np.ndarray]

    @cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The tensor table, by name."""
        return {entry.name: entry for entry in self.manifest.tensors}

    @property
    def has_personal_model(self) -> bool:
        """Whether the client keeps tensors from round to round."""
        return bool(personal_entries(self.manifest))

    def entry(self, name: str) -> TensorEntry:
        """See Bundle."""
        return self.entries[name]

    def load(self, names: Iterable[str]) -> Arrays:
        """The stored tensors `names`. Do not write to them."""
        return {name: self.values[name] for name in names}


class ClientUpdate(NamedTuple):
    """The update of a client, the tensors that it keeps, and the last evaluation of its model."""

    record: UpdateRecord
    tensors: Arrays
    personal: Arrays
    validation: Evaluation | None


@dataclass
class TorchExecutor:
    """Trains clients of one submodel on `device`. Signatures are traced at their first use."""

    submodel: Submodel
    device: str = "cpu"
    sessions: dict[str, TorchSession] = field(default_factory=dict, init=False)

    def bundle(self, model: GlobalModel, rate_factor: float, round_: int) -> MemoryBundle:
        """The bundle that clients receive in a round that starts from `model`.

        Args:
            model: The global model.
            rate_factor: Factor of all learning rates of the round.
            round_: The round, from 1.
        """
        submodel = in_round(self.submodel, round_)
        values = {
            name: value.detach().contiguous().numpy() for name, value in submodel.cut(model).items()
        }
        program = scale_learning_rates(submodel.program, rate_factor)
        return MemoryBundle(NOWHERE, manifest_of(program), "", values)

    def train(
        self,
        bundle: MemoryBundle,
        local: LocalData,
        seed: int,
        personal: Mapping[str, np.ndarray],
        validation: float,
        asked: EvaluationRequest | None = None,
        most_batches: int | None = None,
    ) -> ClientUpdate:
        """Train one client.

        Args:
            bundle: The bundle that it receives in this round.
            local: Its samples.
            seed: Its seed in this round.
            personal: The personal tensors of its last round; empty before its first.
            validation: Share of its samples that it holds out, unless it has too few samples.
            asked: The evaluation that the federation asks for, if devices judge its models.
            most_batches: The batches for which it has time; None if its time is not limited.

        Raises:
            UpdateError: The training diverged.
        """
        options = TrainingOptions(seed=seed, validation=validation, evaluation=asked)
        noise = np.random.default_rng([seed, 2]).bytes
        run = TorchRun(bundle, local, NOWHERE, options, dict(personal), random_bytes=noise)
        with suppress(DataError):
            run.held_out = held_out(len(local), options.held_out)
        run.executor, run.most_batches = self, most_batches
        run.run_schedule()
        last = run.position.validation[-1] if run.position.validation else None
        return ClientUpdate(*trained_update(run), personal_tensors(run), last)

    def judge(
        self, bundle: MemoryBundle, local: LocalData, asked: EvaluationRequest
    ) -> EvaluationCounts:
        """Evaluate the model of `bundle` on the samples that a client keeps apart.

        Raises DataError if it has too few samples for that.
        """
        options = TrainingOptions(evaluation=asked)
        run = TorchRun(bundle, local, NOWHERE, options, {})
        run.held_out, run.executor = held_out(len(local), options.held_out), self
        return run.judge()

    def session(self, name: str) -> TorchSession:
        """The session of the signature `name`."""
        if name not in self.sessions:
            signatures = {
                signature.name: signature for signature in self.submodel.program.signatures
            }
            self.sessions[name] = TorchSession(signatures[name], self.device)
        return self.sessions[name]


@dataclass
class TorchRun(ScheduleRun):
    """The agent's training without files. It takes its sessions from `executor`.

    It has time for `most_batches`; None if its time is not limited.
    """

    executor: TorchExecutor = field(init=False)
    most_batches: int | None = field(default=None, init=False)

    def has_time(self) -> bool:
        """See ScheduleRun. The time is simulated."""
        return self.most_batches is None or self.position.steps < self.most_batches

    def session(self, name: str) -> TorchSession:
        """See SignatureRuns."""
        return self.executor.session(name)

    def open_recording(self, name: str, done: int) -> Recording:
        """Keep the recording in memory, because a client's training is short."""
        dtype = self.recorded_by(name).dtype
        return RecordingInMemory(len(self.local), self.recorded_shape(name), dtype)

    def report_epoch(self, instruction: Train) -> None:
        """Report nothing, because a simulation reports only rounds."""


def manifest_of(program: Program) -> Manifest:
    """The manifest of `program` for a bundle without files."""
    return Manifest(
        version=FORMAT_VERSION,
        submodel=program.submodel,
        runtime="torch",
        base="",
        sample_shape=program.sample_shape,
        classes=program.classes,
        sample_dtype=program.sample_dtype,
        sample_limit=program.sample_limit,
        signatures={
            signature.name: Signature(graph="", inputs=signature.inputs, outputs=signature.outputs)
            for signature in program.signatures
        },
        tensors=program.tensors,
        schedule=program.schedule,
        files={},
    )


def sent_bytes(tensors: Mapping[str, np.ndarray], int8: Collection[str] = ()) -> int:
    """Size of `tensors` in bytes when they are sent.

    Tensors whose names are in `int8` are sent as 8-bit integers and scales.
    """
    return sum(
        int8_bytes(array.shape) if name in int8 else array.nbytes for name, array in tensors.items()
    )


def check_device(name: str) -> None:
    """Raise InputError if PyTorch cannot use the device `name`."""
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(
            "PyTorch cannot compute on the device {device!r}: {reason}. Give another device, such "
            "as cpu or cuda:0.",
            code="simulation.device",
            device=name,
            reason=reason,
        ) from None
