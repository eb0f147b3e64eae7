"""Whether a manifest can be run: what it names is there, and nothing of it contradicts the rest."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

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
    Record,
    Signature,
    Step,
    TensorEntry,
    Train,
)
from profiles.errors import BundleError

REPAIR = "Copy or export the bundle again."
MOST_NUMBERS = 2**40
"""A tensor has fewer."""


def check_consistent(manifest: Manifest, origin: Path) -> None:
    """Raise BundleError naming the first thing in the manifest of `origin` that cannot be."""
    for check in (files, tensors, ports, schedule, training):
        for mistake in check(manifest):
            raise BundleError(f"{origin} {mistake}. {REPAIR}")


def files(manifest: Manifest) -> Iterator[str]:
    """Names of files are plain, and all that are needed are listed."""
    for name in manifest.files:
        if name in (MANIFEST, "", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            yield f"lists {name!r}, which is no plain file name"
    for name in (*(s.graph for s in manifest.signatures.values()), WEIGHTS):
        if name not in manifest.files:
            yield f"names the file {name!r}, which it does not list"


def tensors(manifest: Manifest) -> Iterator[str]:
    """Every tensor has a name of its own, a size that a device may hold and a plain origin."""
    if twice := repeated(entry.name for entry in manifest.tensors):
        yield f"describes the tensor {twice!r} twice"
    for entry in manifest.tensors:
        if math.prod(entry.shape) >= MOST_NUMBERS:
            yield f"gives {entry.name!r} the impossible shape {entry.shape}"
        if entry.stands_for is not None and not all(entry.stands_for.split(".")):
            yield f"says that {entry.name!r} stands for {entry.stands_for!r}, which names no tensor"
        if not fits(entry):
            yield f"gives {entry.name!r} the shape {entry.shape} and another for its part"


def fits(entry: TensorEntry) -> bool:
    """Whether the part of the global tensor that `entry` is, if it says which, has its shape."""
    if entry.part is None or entry.factor is not None:
        return True
    return entry.shape == tuple(sum(stop - start for start, stop in axis) for axis in entry.part)


def ports(manifest: Manifest) -> Iterator[str]:
    """Ports have names of their own; those of tensors are like the tensors that they name."""
    table = {entry.name: entry for entry in manifest.tensors}
    for name, signature in manifest.signatures.items():
        for side in (signature.inputs, signature.outputs):
            if twice := repeated(port.name for port in side):
                yield f"gives {name!r} the port {twice!r} twice"
        for port in (*signature.inputs, *signature.outputs):
            entry = table.get(port.state or "")
            if port.kind == "state" and entry is None:
                yield f"has the signature {name!r}, which uses the unknown tensor {port.state!r}"
            elif entry is not None and (port.shape, port.dtype) != (entry.shape, entry.dtype):
                yield f"gives the port {port.name!r} of {name!r} another shape than its tensor"


def schedule(manifest: Manifest) -> Iterator[str]:
    """Instructions run signatures that there are, on data that are there by then."""
    recorded = {SAMPLES}
    for instruction in manifest.schedule:
        for name in signatures_of(instruction):
            if name not in manifest.signatures:
                yield f"runs the unknown signature {name!r}"
        if not isinstance(instruction, Initialise) and instruction.source not in recorded:
            yield f"reads {instruction.source!r} before it is recorded"
        if isinstance(instruction, Record):
            if not instruction.target.isidentifier():
                yield f"records {instruction.target!r}, which is no name of a recording"
            if len(manifest.signatures[instruction.signature].outputs) != 1:
                yield f"records {instruction.signature!r}, which has not one output"
            recorded.add(instruction.target)


def training(manifest: Manifest) -> Iterator[str]:
    """What is uploaded is trained, by steps that are given what they take and report a loss."""
    steps = [s for train in manifest.schedule if isinstance(train, Train) for s in train.steps]
    if not steps:
        yield "trains nothing"
    for step in steps:
        yield from missing_inputs(step, manifest.signatures[step.signature])
    if PREDICT not in manifest.signatures:
        yield f"has no signature {PREDICT!r}"
    judge = [EVALUATE] if EVALUATE in manifest.signatures else []
    for names in ([step.signature for step in steps], judge):
        outputs = [p.name for name in names for p in manifest.signatures[name].outputs]
        if names and LOSS not in outputs:
            yield f"has no output {LOSS!r} in {' or '.join(names)}"
    run = [name for step in manifest.schedule for name in signatures_of(step)]
    replaced = {p.state for name in run for p in manifest.signatures[name].outputs}
    for entry in manifest.tensors:
        if entry.role != "frozen" and entry.name not in replaced:
            yield f"calls {entry.name!r} a {entry.role}, and no step replaces it"


def missing_inputs(step: Step, signature: Signature) -> Iterator[str]:
    """Numbers that the signature of `step` takes and that it does not give."""
    for port in signature.inputs:
        if port.kind == "scalar" and not math.isfinite(step.inputs.get(port.name, math.nan)):
            yield f"gives {step.signature!r} no number for {port.name!r}"


def signatures_of(instruction: Instruction) -> tuple[str, ...]:
    """The signatures that `instruction` runs."""
    if isinstance(instruction, Train):
        return tuple(step.signature for step in instruction.steps)
    return (instruction.signature,)


def repeated(names: Iterable[str]) -> str | None:
    """A name that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
