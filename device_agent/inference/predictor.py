"""Predicts with a bundle: the public class `edgetailor.Predictor`."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import UNSET

from device_agent.data.array_files import PIECE_BYTES, as_array
from device_agent.data.data_checks import check_samples
from device_agent.data.local_data import named_arrays
from device_agent.data.packed_arrays import packed_array
from device_agent.data.unlabelled import OnError, UnlabelledFile, read_unlabelled
from device_agent.formats.bundle import open_bundle
from device_agent.formats.label_rule import class_axis
from device_agent.formats.manifest import (
    PREDICT,
    SAMPLES,
    Initialise,
    Manifest,
    Record,
    Signature,
    Train,
)
from device_agent.formats.manifest_validation import REPAIR
from device_agent.formats.packing import output_parts, pack, sample_parts, unpack
from device_agent.inference.probabilities import (
    class_names,
    decode_sequence,
    output_meaning,
    probabilities,
)
from device_agent.runtime.runtime_choice import Session, open_session
from device_agent.system.process_memory import map_large_blocks
from device_agent.training.memory_estimate import batch_of, concurrent_peak_bytes, size_of
from device_agent.training.memory_limits import Ceiling, ceilings
from device_agent.training.memory_refusal import check_need
from device_agent.training.personal_model import personal_entries, read_personal_model
from device_agent.training.signature_runs import check_ports
from profiles.cost_model.memory_rule import TRAINING_RESERVE_BYTES as RESERVE
from profiles.errors import BundleError, InputError

log = logging.getLogger(__name__)
CHUNK = 64
"""The most samples that pass all stages together, unless a batch is larger."""
SHOWN_NUMBERS = 8
"""The most numbers of a sample that a text shows."""

Tensors = dict[str, np.ndarray]
OpenStage = tuple[Session, Signature, Tensors]


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample of a file.

    Attributes:
        file: Name of the file, with the sample's number if the file has several samples.
        values: Probabilities (classes,), or the numbers of a regression. If the model has several
            outputs, they are side by side in one row.
        outputs: Several outputs by name; empty for a single output.
    """

    file: str
    values: np.ndarray
    outputs: dict[str, np.ndarray] = field(default_factory=dict)


class Predictor:
    """A model that predicts on this device, without any training framework.

    Use this in a program on a device, with a released model or with any other bundle. A training
    bundle predicts with the model from which its training starts, or with a personal model. Several
    threads may use one object. Their calls run one after another.

    Attributes:
        bundle: The opened bundle.
        classes: Names of the classes, in the order of the probabilities; empty for a regression.
        meaning: The kind of the model's output: `softmax`, `sigmoid`, `ctc`, `numbers`,
            `independent` or `outputs`.
        outputs: The outputs of a model that returns several; empty for a single output.
        predicted_bytes: The predicted memory in bytes, in addition to the memory of this process;
            None if the bundle has no prediction.

    Examples:
        >>> import tempfile
        >>> import edgetailor as et
        >>> import numpy as np
        >>> model = et.load_model("toolkit.models:digits_cnn")
        >>> submodel = et.split(model, "full", sample_shape=(1, 8, 8))
        >>> folder = f"{tempfile.mkdtemp()}/bundle"
        >>> _ = et.export(submodel, et.GlobalModel(model.state_dict()), folder, verify=False)
        >>> predictor = et.Predictor(folder)
        >>> predictor.predict(np.zeros((3, 1, 8, 8), np.float32)).shape
        (3, 10)
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        personal: str | Path | None = None,
        threads: int = 0,
        max_memory: int | None = None,
    ) -> None:
        """Open the bundle in `folder`.

        Args:
            folder: An inference bundle or a training bundle.
            personal: The file of the personal model that this device has trained with a `cp` or
                `pfedme` bundle. Predictions then use it instead of the global model.
            threads: Threads of the runtime. 0 means one for each core.
            max_memory: Bytes of memory that this process may use.

        Raises:
            BundleError: The bundle is incomplete, damaged or of another format version.
            InputError: `personal` is not a personal model of this bundle.
            LimitError: The model needs more memory than this process may use.
        """
        self.bundle = open_bundle(Path(folder))
        manifest = self.bundle.manifest
        self.classes = class_names(manifest)
        self.meaning = output_meaning(manifest)
        self.outputs = output_parts(manifest, PREDICT)
        self._has_personal = personal is not None
        self._personal = {} if personal is None else self._read(Path(personal))
        self._threads, self._lock = threads, threading.Lock()
        self._stages = stages(manifest)
        limits = ceilings(max_memory)
        self._keeps_open, self.predicted_bytes = self._fit(limits)
        if not self._keeps_open:
            map_large_blocks()  # otherwise a closed stage may keep its memory
        self._opened: dict[str, OpenStage] = {}

    def _fit(self, limits: Sequence[Ceiling]) -> tuple[bool, int | None]:
        """Decide whether all stages stay open, and predict the memory. Raises LimitError."""
        manifest = self.bundle.manifest
        single = (*self._stages, *initialising(manifest))
        alone = [concurrent_peak_bytes(manifest, [name]) for name in single]
        highest = None if None in alone else max(peak for peak in alone if peak is not None)
        together = concurrent_peak_bytes(manifest, self._stages)
        if not limits and manifest.output is not UNSET and len(self._stages) > 1:
            return False, highest  # stages are deployed to devices with little memory
        if not limits or (together is not None and self._fits(together, limits)):
            return True, together
        # A slice can predict with one stage in memory at a time.
        need = None if highest is None else (highest + RESERVE, " or ".join(single))
        check_need(need, manifest, limits)
        return False, highest

    def _fits(self, peak: int, limits: Sequence[Ceiling]) -> bool:
        return all(peak + RESERVE <= limit.left for limit in limits)

    def predict(self, x: np.ndarray | Mapping[str, np.ndarray]) -> np.ndarray:
        """Predict samples.

        The model runs on batches of the size for which the bundle was exported, so that it needs no
        more than the predicted memory.

        Args:
            x: Samples (n, *sample shape), prepared as for training. The type is float32, or int64
                (also int32) for models that look up embeddings. If the model has several inputs,
                pass a dictionary with the array of each input.

        Returns:
            Probabilities (n, classes), with more axes if the model predicts for positions. For a
            regression, this is the model's output. If the model has several outputs, they are side
            by side, (n, k); see `predict_outputs`.

        Raises:
            DataError: The samples do not fit the model.
        """
        manifest = self.bundle.manifest
        arrays = named_arrays(SAMPLES, x, sample_parts(manifest))
        return self.predict_packed(
            as_array(packed_array(SAMPLES, arrays, sample_parts(manifest), "data"))
        )

    def predict_outputs(self, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Predict samples with a model that returns several outputs.

        Args:
            x: Samples in the form that `predict` takes.

        Returns:
            The array (n, *output shape) of each output, by name. If the model returns a tuple, the
            names are "0", "1" and so on. A single output has the name "output". If the loss treats
            an output as classes, its array has a probability for each class.

        Raises:
            DataError: The samples do not fit the model.
        """
        values = self.predict(x)
        return unpack(values, self.outputs) if self.outputs else {"output": values}

    def predict_packed(self, x: np.ndarray) -> np.ndarray:
        """Predict samples like `predict`. Several inputs are side by side in one array."""
        manifest = self.bundle.manifest
        if manifest.sample_dtype == "int64" and x.dtype == np.int32:
            x = x.astype(np.int64)
        check_samples(
            x, manifest.sample_shape, "data", manifest.sample_dtype, manifest.sample_limit
        )
        # Activations between stages take memory. Only stages that open again for each group need
        # a group of several batches.
        batch = batch_of(manifest, PREDICT)
        group = batch if self._keeps_open else group_of(manifest, self._stages)
        parts = []
        with self._lock:
            for start in range(0, len(x), group):
                values = x[start : start + group]
                for name in self._stages:
                    values = self._run_stage(name, values, batch)
                parts.append(values)
        values = np.concatenate(parts)
        if not self.outputs:
            return probabilities(values, self.meaning)
        own = unpack(values, self.outputs)
        return pack(
            {o.name: probabilities(own[o.name], o.output or "numbers") for o in self.outputs},
            self.outputs,
        )

    def _run_stage(self, name: str, samples: np.ndarray, batch: int) -> np.ndarray:
        """Run the stage `name` on batches of at most `batch` samples.

        A stage that does not stay open is freed when this method returns, before the next stage
        opens.
        """
        stage = self._open(name)
        return joined(
            [
                self._run(stage, samples[start : start + batch])
                for start in range(0, len(samples), batch)
            ]
        )

    def predict_files(
        self, source: str | Path, *, on_error: OnError | None = None
    ) -> Iterator[Prediction]:
        """Predict the samples of a file or folder. Labels are not needed.

        Args:
            source: An .npy file with samples, an .npz file with `x`, or a folder with x.npy. If the
                bundle has `preprocessing`, a picture, a CSV file, or a folder of pictures or of CSV
                files is also allowed.
            on_error: Called with the DataError of each file in a folder that cannot be used. The
                other files are still predicted. Without `on_error`, the first such error is raised.

        Yields:
            The prediction for each sample.

        Raises:
            DataError: A file cannot be read or does not fit the model.
            InputError: Pictures need a package that is not installed.
        """
        for files in self._groups(self.samples(Path(source), on_error)):
            values = self.predict_packed(joined([file.x for file in files]))
            titles = (file.title(index) for file in files for index in range(len(file.x)))
            for title, own in zip(titles, values, strict=True):
                outputs = unpack(own[None], self.outputs)
                yield Prediction(title, own, {name: v[0] for name, v in outputs.items()})

    def _groups(self, files: Iterable[UnlabelledFile]) -> Iterator[list[UnlabelledFile]]:
        """Join files to larger groups, so that graphs are opened less often."""
        most = 1 if self._keeps_open else group_of(self.bundle.manifest, self._stages)
        waiting: list[UnlabelledFile] = []
        for file in files:
            waiting.append(file)
            if sum(len(file.x) for file in waiting) >= most:
                yield waiting
                waiting = []
        if waiting:
            yield waiting

    def decode(self, values: np.ndarray) -> list[str]:
        """Decode the probabilities (t, classes) of a CTC model to a sequence of labels.

        The result is the most probable path: repeated classes are merged, then the blank is
        removed.
        """
        return [self.classes[label] for label in decode_sequence(values)]

    def describe(self, values: np.ndarray) -> str:
        """Describe the prediction for one sample: its class and probability, or its numbers."""
        if self.outputs:
            named = unpack(values.reshape(1, -1), self.outputs).items()
            return "; ".join(f"{name}: {_numbers(own)}" for name, own in named)
        if self.meaning in ("numbers", "outputs"):
            return _numbers(values)
        if self.meaning == "independent":
            likely = zip(self.classes, values.reshape(-1), strict=True)
            return " ".join(name for name, answer in likely if answer > 0.5) or "none"
        if self.meaning == "ctc":
            return " ".join(self.decode(values))
        if values.ndim > 1:
            most = values.argmax(class_axis(values.ndim + 1) - 1).reshape(-1)[:SHOWN_NUMBERS]
            return " ".join(self.classes[label] for label in most)
        most_probable = int(values.argmax())
        return f"{self.classes[most_probable]}  {values[most_probable]:.1%}"

    def samples(self, source: Path, on_error: OnError | None = None) -> Iterator[UnlabelledFile]:
        """Read the files at `source` as samples. Raises the errors of `predict_files`."""
        manifest = self.bundle.manifest
        return read_unlabelled(
            source,
            manifest.preprocessing,
            manifest.sample_shape,
            on_error,
            sample_parts(manifest),
        )

    def _read(self, file: Path) -> Tensors:
        if not personal_entries(self.bundle.manifest):
            raise InputError(
                "{folder} has no personal model: its submodel is {submodel!r}. Only cp and pfedme "
                "bundles have one.",
                code="state.no-personal-model",
                folder=str(self.bundle.folder),
                submodel=self.bundle.manifest.submodel,
            )
        return read_personal_model(file, self.bundle.manifest)

    def _open(self, name: str) -> OpenStage:
        """Open the stage `name` with the tensors that it reads, or return the open stage."""
        if name in self._opened:
            return self._opened[name]
        signature = self.bundle.manifest.signatures[name]
        graph = self.bundle.graph(name)
        session = open_session(self.bundle.manifest.runtime, graph, name, self._threads)
        check_ports(session, signature, f"{graph}, signature {name!r}")
        stage = session, signature, self._tensors(signature)
        if self._keeps_open:
            self._opened[name] = stage
        return stage

    def _tensors(self, signature: Signature) -> Tensors:
        """The tensors that `signature` reads: personal ones, and others from the bundle."""
        entries = {entry.name: entry for entry in self.bundle.manifest.tensors}
        wanted = sorted({port.state for port in signature.inputs if port.state is not None})
        # Without a personal model, compute the first one from the global model, as in round 1.
        if any(not entries[name].stored and name not in self._personal for name in wanted):
            for name in initialising(self.bundle.manifest):
                session, first, tensors = self._open(name)
                results = session.run({p.name: tensors[str(p.state)] for p in first.inputs})
                self._personal |= {str(p.state): results[p.name] for p in first.outputs}
                self._opened.pop(name, None)
        own = {name: self._personal[name] for name in wanted if name in self._personal}
        buffers = [name for name in wanted if entries[name].role == "buffer"]
        if own and self._has_personal and any(name not in own for name in buffers):
            log.warning(
                "The personal model has no statistics of its own, because an earlier version wrote "
                "it. Until it is trained again, it predicts with the global statistics, which is "
                "less exact."
            )
        stored = [name for name in wanted if name not in own]
        return own | (self.bundle.load(stored) if stored else {})

    def _run(self, stage: OpenStage, samples: np.ndarray) -> np.ndarray:
        session, signature, tensors = stage
        feeds = {
            port.name: samples if port.state is None else tensors[port.state]
            for port in signature.inputs
        }
        port = signature.outputs[0]
        output = session.run(feeds)[port.name]
        expected = (len(samples), *port.shape[1:])
        if output.shape != expected:
            raise BundleError(
                "{folder}: a graph computes {output!r} with the shape {shape}, but the manifest "
                "says {expected}. {repair}",
                code="bundle.wrong-result",
                folder=str(self.bundle.folder),
                output=port.name,
                shape=output.shape,
                expected=expected,
                repair=REPAIR,
            )
        return output


def _numbers(values: np.ndarray) -> str:
    """The first numbers of an output as text."""
    shown = " ".join(f"{number:.4g}" for number in values.reshape(-1)[:SHOWN_NUMBERS])
    return f"{shown} ..." if values.size > SHOWN_NUMBERS else shown


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The samples of all `parts`. A single part is not copied, because it may exceed the memory."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def group_of(manifest: Manifest, names: Sequence[str]) -> int:
    """The number of samples in a group, which passes all stages before the next group starts.

    Stages that do not stay open are opened again for each group. A group has at most `CHUNK`
    samples, and each stage's output for a group takes at most half of `PIECE_BYTES`. If one batch
    exceeds these limits, the group is one batch.
    """
    largest = max(size_of(manifest.signatures[name].outputs[0], 1) for name in names)
    return max(batch_of(manifest, PREDICT), min(CHUNK, PIECE_BYTES // 2 // max(1, largest)))


def stages(manifest: Manifest) -> Sequence[str]:
    """The signatures that predict, in order: the stages that record activations, then `predict`."""
    trains = [i for i in manifest.schedule if isinstance(i, Train)]
    records = {i.target: i for i in manifest.schedule if isinstance(i, Record)}
    names: list[str] = []
    source = trains[0].source if trains else next(reversed(records), "")
    while source in records:
        names.insert(0, records[source].signature)
        source = records[source].source
    return (*names, PREDICT)


def initialising(manifest: Manifest) -> Sequence[str]:
    """The signatures that compute the first personal model from the global model."""
    return [i.signature for i in manifest.schedule if isinstance(i, Initialise)]
