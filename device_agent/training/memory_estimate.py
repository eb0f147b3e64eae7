"""Predicts the memory for training a bundle from the peaks in its manifest.

`peak_bytes` of a signature is the growth of a process that runs only this signature. If several
signatures are open at the same time, the functions here combine their peaks by the rule in
`profiles.cost_model.memory_rule`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from device_agent.formats.manifest import EVALUATE, Dtype, Initialise, Manifest, Port, Record, Train
from profiles.cost_model.memory_rule import (
    RUNTIMES,
    UNKNOWN_RUNTIME,
    SignatureMemory,
    kept_of_peak,
    state_bytes,
    training_growth,
)

WIDTHS: dict[Dtype, int] = {"float32": 4, "int64": 8}
"""Bytes of a number. They are not read from numpy, because loading numpy may exceed the memory
limit."""


def concurrent_peak_bytes(
    manifest: Manifest, names: Sequence[str], kept: Iterable[str] = ()
) -> int | None:
    """Process peak above the idle agent, in bytes, if the signatures `names` are open together.

    `kept` names state tensors that are in memory even if no open signature reads them. Returns None
    if the manifest predicts no peak for one of the signatures.
    """
    opened = memory_together(manifest, names)
    if opened is None:
        return None
    session = session_bytes(manifest)
    sizes = {e.name: size(e.shape, e.dtype) for e in manifest.tensors}
    state = {name: sizes[name] for name in kept}
    replaced: set[str] = set()
    for name in names:
        signature, batch = manifest.signatures[name], batch_of(manifest, name)
        read = {str(p.state): size_of(p, batch) for p in signature.inputs if p.kind == "state"}
        gradients = (p for p in (*signature.inputs, *signature.outputs) if p.kind == "gradient")
        state |= read | {p.name: size_of(p, batch) for p in gradients}
        replaced |= read.keys() & {str(port.state) for port in signature.outputs}
    # A personal model that is only read is not replaced, so there is no second copy of it.
    personal = replaced & {e.name for e in manifest.tensors if e.role == "personal"}
    return training_growth(opened, state_bytes(state, personal), session)


def memory_together(manifest: Manifest, names: Sequence[str]) -> list[SignatureMemory] | None:
    """The memory of each signature in `names`.

    Returns None if the manifest lacks the predicted peak of a signature.
    """
    session = session_bytes(manifest)
    memories = []
    for name in names:
        signature, batch = manifest.signatures[name], batch_of(manifest, name)
        if signature.peak_bytes is None:
            return None
        inputs = sum(size_of(port, batch) for port in signature.inputs)
        state = sum(size_of(port, batch) for port in signature.inputs if is_kept(port))
        new = (port for port in signature.outputs if port.name not in signature.in_place)
        outputs = sum(size_of(port, batch) for port in new)
        kept = kept_of_peak(signature.peak_bytes, inputs, outputs, session)
        memories.append(SignatureMemory(inputs=inputs, outputs=outputs, state=state, kept=kept))
    return memories


def session_bytes(manifest: Manifest) -> int:
    """Bytes that the bundle's runtime loads with the first session of a process."""
    return RUNTIMES.get(manifest.runtime, UNKNOWN_RUNTIME).session_bytes


def training_bytes(manifest: Manifest, validating: bool = False) -> tuple[int, str] | None:
    """Predict the peak memory of the schedule, above the memory of the idle agent.

    Args:
        manifest: The manifest of the bundle.
        validating: Whether each epoch ends with a run of the signature `evaluate`. During this run,
            the agent closes the training signatures but keeps their state.

    Returns:
        The peak in bytes and the signatures that are open at the peak. None if the manifest
        predicts no peak for one of the signatures.
    """
    most, running = 0, "nothing"
    for names, kept in open_together(manifest, validating):
        peak = concurrent_peak_bytes(manifest, names, kept)
        if peak is None:
            return None
        if peak > most:
            most, running = peak, " and ".join(names)
    return most, running


def untouched_bytes(manifest: Manifest, validating: bool = False) -> int:
    """An upper bound of the memory that the runtime requests and does not use.

    A limit on private data (RLIMIT_DATA) counts this memory, although no pages are used for it.
    ONNX Runtime's arena requests memory in regions. Each region is twice as large as the previous
    region. So the last region may be as large as all memory that the arena uses; see
    `exporters/memory/onnx_arena.py`.

    Args:
        manifest: The manifest of the bundle.
        validating: See `training_bytes`.

    Returns:
        Bytes; 0 for other runtimes, or if the manifest predicts no peaks.
    """
    if manifest.runtime != "onnx":
        return 0
    groups = [memory_together(manifest, names) for names, _ in open_together(manifest, validating)]
    return max((sum(memory.kept for memory in group) for group in groups if group), default=0)


def open_together(manifest: Manifest, validating: bool) -> Iterator[tuple[list[str], set[str]]]:
    """Yield each set of signatures that are open together during the schedule.

    Each set is yielded with the names of the state tensors that are also in memory.
    """
    for instruction in manifest.schedule:
        if isinstance(instruction, Record | Initialise):
            yield [instruction.signature], set()
            continue
        names = sorted({step.signature for step in instruction.steps})
        ports = [port for name in names for port in manifest.signatures[name].inputs]
        trained = {str(port.state) for port in ports if port.kind == "state"}
        yield names, set()
        if validating and EVALUATE in manifest.signatures:
            yield [EVALUATE], trained


def open_at_once(manifest: Manifest) -> int:
    """The largest number of sessions that one instruction of the schedule opens together."""
    trains = (i for i in manifest.schedule if isinstance(i, Train))
    return max((len({step.signature for step in i.steps}) for i in trains), default=1)


def is_kept(port: Port) -> bool:
    """Whether the input `port` is in memory all the time: device state, or sums of gradients."""
    return port.kind in ("state", "gradient")


def batch_of(manifest: Manifest, signature: str) -> int:
    """The batch size for which the peak of `signature` is predicted: the schedule's largest size.

    If a signature runs on single samples, the size is 1.
    """
    steps = (s for i in manifest.schedule if isinstance(i, Train) for s in i.steps)
    if any(s.signature == signature and s.each_sample is True for s in steps):
        return 1
    return max((i.batch_size for i in manifest.schedule if isinstance(i, Train)), default=1)


def size_of(port: Port, batch: int) -> int:
    """Bytes of the array of a port for `batch` samples."""
    return size([batch if n is None else n for n in port.shape], port.dtype)


def size(shape: Iterable[int], dtype: Dtype) -> int:
    """Bytes of an array."""
    return math.prod(shape) * WIDTHS[dtype]
