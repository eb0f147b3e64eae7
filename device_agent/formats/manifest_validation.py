"""Checks that a manifest can be run: everything that it names exists, and its parts agree."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import UNSET

from device_agent.formats.input_range import fits
from device_agent.formats.label_misfit import misfit_of_labels
from device_agent.formats.label_rule import class_axis, label_rule
from device_agent.formats.manifest import (
    EVALUATE,
    LOSS,
    MANIFEST,
    PREDICT,
    SAMPLES,
    WEIGHTS,
    Initialise,
    Instruction,
    Manifest,
    Port,
    Record,
    Signature,
    Step,
    TensorEntry,
    Train,
)
from device_agent.formats.packing import LARGEST_ID, packed_size
from device_agent.formats.private_schedule import keeps_privacy
from profiles.errors import BundleError

REPAIR = "Copy or export the bundle again."
MOST_NUMBERS = 2**40
"""Every tensor has fewer numbers than this."""
CTC_AXES = 3
"""The output of a CTC model is (batch, t, classes)."""
PART_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
"""Names of parts become names of arrays in files."""


def check_consistent(manifest: Manifest, origin: Path) -> None:
    """Raise BundleError for the first contradiction in the manifest of the file `origin`."""
    # The order matters: `_training` looks up signatures after `_schedule` has checked they exist.
    train_or_predict = _training if manifest.output is UNSET else _prediction
    for check in (_files, _tensors, _ports, _schedule, train_or_predict, _private, _preprocessing):
        for error in check(manifest, origin):
            raise error


def _files(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error for file names that lead out of the folder, and for files not listed."""
    for name in manifest.files:
        if name in (MANIFEST, "", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            yield BundleError(
                "{origin} lists {file!r}, which is not a plain file name. {repair}",
                code="bundle.bad-file-name",
                file=name,
                origin=origin,
                repair=REPAIR,
            )
    weights = (WEIGHTS,) if manifest.output is UNSET else ()
    for name in (*(s.graph for s in manifest.signatures.values()), *weights):
        if name not in manifest.files:
            yield BundleError(
                "{origin} uses the file {file!r}, but does not list it in `files`. {repair}",
                code="bundle.unlisted-file",
                file=name,
                origin=origin,
                repair=REPAIR,
            )


def _tensors(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error for tensors with a repeated name, a wrong shape or an invalid global name."""
    if twice := _repeated(entry.name for entry in manifest.tensors):
        yield BundleError(
            "{origin} describes the tensor {tensor!r} twice. {repair}",
            code="bundle.duplicate-tensor",
            tensor=twice,
            origin=origin,
            repair=REPAIR,
        )
    for entry in manifest.tensors:
        # A hostile shape must be refused before anything allocates memory for it.
        if math.prod(entry.shape) >= MOST_NUMBERS:
            yield BundleError(
                "{origin} gives {tensor!r} the impossible shape {shape}. {repair}",
                code="bundle.impossible-shape",
                tensor=entry.name,
                shape=entry.shape,
                origin=origin,
                repair=REPAIR,
            )
        # A name such as layer.weight has no empty parts, but a path such as ../../x does.
        if entry.stands_for is not None and not all(entry.stands_for.split(".")):
            yield BundleError(
                "{origin} says that {tensor!r} stands for {stands_for!r}, which is not a tensor "
                "name. {repair}",
                code="bundle.bad-global-name",
                tensor=entry.name,
                stands_for=entry.stands_for,
                origin=origin,
                repair=REPAIR,
            )
        if not _part_fits(entry):
            yield BundleError(
                "{origin}: {tensor!r} has the shape {shape}, but the part of the global tensor "
                "that `part` selects has another shape. {repair}",
                code="bundle.wrong-part",
                tensor=entry.name,
                origin=origin,
                shape=entry.shape,
                repair=REPAIR,
            )


def _part_fits(entry: TensorEntry) -> bool:
    """Whether the ranges in `entry.part`, if there are any, have the shape of the tensor."""
    if entry.part is None or entry.factor is not None:
        return True
    return entry.shape == tuple(sum(stop - start for start, stop in axis) for axis in entry.part)


def _ports(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error for repeated ports, and for ports that contradict themselves or a tensor."""
    table = {entry.name: entry for entry in manifest.tensors}
    for name, signature in manifest.signatures.items():
        for side in (signature.inputs, signature.outputs):
            if twice := _repeated(port.name for port in side):
                yield BundleError(
                    "{origin} lists the input or output {port!r} of {signature!r} twice. {repair}",
                    code="bundle.duplicate-port",
                    signature=name,
                    port=twice,
                    origin=origin,
                    repair=REPAIR,
                )
        for port in (*signature.inputs, *signature.outputs):
            if port.range and not fits(port.range, math.prod(n for n in port.shape[1:] if n)):
                yield BundleError(
                    "{origin}: the `range` of the input or output {port!r} of {signature!r} does "
                    "not fit its shape. {repair}",
                    code="bundle.wrong-port",
                    signature=name,
                    port=port.name,
                    origin=origin,
                    repair=REPAIR,
                )
            if port.parts is not UNSET and not _parts_fit(port):
                yield BundleError(
                    "{origin}: the `parts` of {port!r} of {signature!r} do not fit its shape or "
                    "type, or have bad names. {repair}",
                    code="bundle.wrong-parts",
                    signature=name,
                    port=port.name,
                    origin=origin,
                    repair=REPAIR,
                )
            entry = table.get(port.state or "")
            if port.kind == "state" and entry is None:
                yield BundleError(
                    "{origin} has the signature {signature!r}, which uses the unknown tensor "
                    "{tensor!r}. {repair}",
                    code="bundle.unknown-tensor",
                    signature=name,
                    tensor=port.state,
                    origin=origin,
                    repair=REPAIR,
                )
            elif entry is not None and (port.shape, port.dtype) != (entry.shape, entry.dtype):
                yield BundleError(
                    "{origin}: the input or output {port!r} of {signature!r} differs in shape or "
                    "type from its tensor. {repair}",
                    code="bundle.wrong-port",
                    signature=name,
                    port=port.name,
                    origin=origin,
                    repair=REPAIR,
                )


def _parts_fit(port: Port) -> bool:
    """Whether `port` holds its parts side by side, and all parts have different names."""
    names = [part.name for part in port.packed]
    numbered = all(part.limit is None or part.limit <= LARGEST_ID for part in port.packed)
    named = names == [""] or all(PART_NAME.fullmatch(name) for name in names)
    return (
        port.kind in ("samples", "labels")
        and bool(names)
        and len(set(names)) == len(names)
        and named
        and numbered
        and (port.dtype, port.shape) == ("float32", (None, packed_size(port.packed)))
    )


def _schedule(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error for instructions that run or read something that does not exist yet."""
    # The order of the schedule matters: an instruction may only read what an earlier one recorded.
    recorded, trained = {SAMPLES}, False
    for instruction in manifest.schedule:
        # Other instructions release the tensors that were trained.
        if trained and not isinstance(instruction, Train):
            yield BundleError(
                "{origin} runs {signature!r} after the training, but the training must come last. "
                "{repair}",
                code="bundle.after-training",
                signature=instruction.signature,
                origin=origin,
                repair=REPAIR,
            )
        trained = trained or isinstance(instruction, Train)
        for name in _signatures_of(instruction):
            if name not in manifest.signatures:
                yield BundleError(
                    "{origin} runs the unknown signature {signature!r}. {repair}",
                    code="bundle.unknown-signature",
                    signature=name,
                    origin=origin,
                    repair=REPAIR,
                )
        if not isinstance(instruction, Initialise) and instruction.source not in recorded:
            yield BundleError(
                "{origin} reads the recorded activations {source!r} before they are recorded. "
                "{repair}",
                code="bundle.unrecorded-source",
                source=instruction.source,
                origin=origin,
                repair=REPAIR,
            )
        if isinstance(instruction, Record):
            # The name becomes a file name, so it must not leave the folder of recordings.
            if not instruction.target.isidentifier():
                yield BundleError(
                    "{origin}: a file of recorded activations cannot have the name {recording!r}. "
                    "Its name may have only letters, digits and underscores. {repair}",
                    code="bundle.bad-recording-name",
                    recording=instruction.target,
                    origin=origin,
                    repair=REPAIR,
                )
            if instruction.target in recorded:
                yield BundleError(
                    "{origin} records activations under the name {recording!r} twice. Each name "
                    "may be used once. {repair}",
                    code="bundle.repeated-recording",
                    recording=instruction.target,
                    origin=origin,
                    repair=REPAIR,
                )
            if len(manifest.signatures[instruction.signature].outputs) != 1:
                yield BundleError(
                    "{origin} records the output of {signature!r}. This signature must have "
                    "exactly one output. {repair}",
                    code="bundle.wrong-recording",
                    signature=instruction.signature,
                    origin=origin,
                    repair=REPAIR,
                )
            recorded.add(instruction.target)


def _training(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error if the schedule does not train all uploaded tensors and report a loss."""
    steps = [s for train in manifest.schedule if isinstance(train, Train) for s in train.steps]
    if not steps:
        yield BundleError(
            "{origin} has no training instruction in its schedule. {repair}",
            code="bundle.no-training",
            origin=origin,
            repair=REPAIR,
        )
    for step in steps:
        yield from _missing_inputs(step, manifest.signatures[step.signature], origin)
    if PREDICT not in manifest.signatures:
        yield BundleError(
            "{origin} has no signature {signature!r}. {repair}",
            code="bundle.missing-signature",
            signature=PREDICT,
            origin=origin,
            repair=REPAIR,
        )
    evaluating = [EVALUATE] if EVALUATE in manifest.signatures else []
    for names in ([step.signature for step in steps], evaluating):
        outputs = [p.name for name in names for p in manifest.signatures[name].outputs]
        if names and LOSS not in outputs:
            yield BundleError(
                "{origin} has no output {output!r} in {places}. {repair}",
                code="bundle.missing-output",
                output=LOSS,
                signatures=names,
                origin=origin,
                places=" or ".join(names),
                repair=REPAIR,
            )
    run = [name for step in manifest.schedule for name in _signatures_of(step)]
    replaced = {p.state for name in run for p in manifest.signatures[name].outputs}
    for entry in manifest.tensors:
        if entry.role != "frozen" and entry.name not in replaced:
            yield BundleError(
                "{origin} gives {tensor!r} the role {role!r}, but no signature in the schedule "
                "computes a new value of this tensor. {repair}",
                code="bundle.untrained-tensor",
                tensor=entry.name,
                role=entry.role,
                origin=origin,
                repair=REPAIR,
            )


def _private(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error if a sample could reach the update without being clipped and noised."""
    if not keeps_privacy(manifest):
        yield BundleError(
            "{origin} has `privacy`, gradients or a step for each sample. In this case, its "
            "schedule must have a single instruction, with `privacy` and at least two steps. The "
            "first step runs on each sample, reads no `classes`, and returns only the loss and "
            "gradients. The other steps read only these gradients, numbers and tensors. {repair}",
            code="bundle.not-private",
            origin=origin,
            repair=REPAIR,
        )


def _prediction(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error unless the bundle only predicts: stages in a row that end with `predict`."""
    names = [*(i.signature for i in manifest.schedule if isinstance(i, Record)), PREDICT]
    if (
        sorted(manifest.signatures) != sorted(names)
        or any(_kinds(s) != ["samples", "samples"] for s in manifest.signatures.values())
        or manifest.tensors
        or not _in_a_row(manifest.schedule)
    ):
        yield BundleError(
            "{origin} has `output`, so it must only predict. Its schedule must run the stages and "
            "then {signature!r}, each on the output of the one before. Each signature must have "
            "one input and one output, and the bundle must have no tensors. {repair}",
            code="bundle.not-for-inference",
            signature=PREDICT,
            origin=origin,
            repair=REPAIR,
        )
    elif not _ports_fit(manifest, [manifest.signatures[name] for name in names]):
        yield BundleError(
            "{origin}: an input or output of {signature!r}, or of a stage before it, has a wrong "
            "shape or type. It must fit the neighbouring stages, and the samples, the classes "
            "({classes}) and the key `output` of the manifest. {repair}",
            code="bundle.wrong-prediction",
            signature=PREDICT,
            classes=manifest.classes,
            origin=origin,
            repair=REPAIR,
        )


def _kinds(signature: Signature) -> list[str]:
    """The kinds of the inputs and outputs of `signature`."""
    return [port.kind for port in (*signature.inputs, *signature.outputs)]


def _in_a_row(schedule: Sequence[Instruction]) -> bool:
    """Whether `schedule` is a row of recordings.

    The first stage reads the samples; each later stage reads what the stage before it recorded.
    """
    source = SAMPLES
    for instruction in schedule:
        if not isinstance(instruction, Record) or instruction.source != source:
            return False
        source = instruction.target
    return True


def _ports_fit(manifest: Manifest, stages: Sequence[Signature]) -> bool:
    """Whether the ports of an inference bundle agree with each other and with the manifest."""
    shape: tuple[int | None, ...] = (None, *manifest.sample_shape)
    dtype = manifest.sample_dtype
    for stage in stages:
        (samples,), (result,) = stage.inputs, stage.outputs
        if (samples.shape, samples.dtype) != (shape, dtype):
            return False
        shape, dtype = result.shape, result.dtype
        if dtype != "float32" or shape[:1] != (None,) or None in shape[1:]:
            return False
    sizes = shape
    if manifest.output in ("numbers", "outputs", "independent"):
        return True
    axes = len(sizes)
    if axes == 1:  # a single logit without an axis for its class
        return manifest.output == "sigmoid" and manifest.classes == 1
    return (
        axes > class_axis(axes)
        and sizes[class_axis(axes)] == manifest.classes
        and (manifest.output == "sigmoid") == (manifest.classes == 1)
        and (manifest.output != "ctc" or axes == CTC_AXES)
    )


def _missing_inputs(step: Step, signature: Signature, origin: Path) -> Iterator[BundleError]:
    """Yield an error for each scalar input of the signature for which `step` has no number."""
    for port in signature.inputs:
        if port.kind == "scalar" and not math.isfinite(step.inputs.get(port.name, math.nan)):
            yield BundleError(
                "{origin} has no number for the input {input!r} of {signature!r}. {repair}",
                code="bundle.missing-input",
                signature=step.signature,
                input=port.name,
                origin=origin,
                repair=REPAIR,
            )


def _signatures_of(instruction: Instruction) -> tuple[str, ...]:
    """The signatures that `instruction` runs."""
    if isinstance(instruction, Train):
        return tuple(step.signature for step in instruction.steps)
    return (instruction.signature,)


def _repeated(names: Iterable[str]) -> str | None:
    """A name that occurs more than once; None if there is no such name."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _preprocessing(manifest: Manifest, origin: Path) -> Iterator[BundleError]:
    """Yield an error if samples from files do not fit the model."""
    if manifest.preprocessing is None:
        return
    wrong = misfit_of_labels(
        manifest.preprocessing, label_rule(manifest), manifest.sample_shape, manifest.sample_dtype
    )
    if wrong is not None:
        yield BundleError(
            "{origin}: the `preprocessing` does not fit the model: {reason}. {repair}",
            code="bundle.bad-preprocessing",
            reason=wrong,
            origin=origin,
            repair=REPAIR,
        )
