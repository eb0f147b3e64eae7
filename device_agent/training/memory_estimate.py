"""What running a bundle's signatures takes above the idle agent, from what the manifest predicts.

A signature's `peak_bytes` is that of a process which runs nothing else. What several of them that
are open together share is held once: the runtime's first session, the state, the batch.
"""

import math
from collections.abc import Iterable, Sequence

from device_agent.formats.manifest import EVALUATE, Dtype, Initialise, Manifest, Port, Record, Train

SESSION_BYTES = {"onnx": 10 << 20, "litert": 14 << 20}
"""Code and tables that the first session of a process brings into memory, whatever its graph."""
WIDTHS: dict[Dtype, int] = {"float32": 4, "int64": 8}
"""Bytes of a number; numpy, which knows them, takes more memory than a limit may allow."""


def concurrent_peak_bytes(
    manifest: Manifest, names: Sequence[str], kept: Iterable[str] = ()
) -> int | None:
    """Growth of the process at its peak while the signatures `names` are open together, bytes.

    growth = session + state + max(other inputs + outputs) + arenas and nodes of each, where the
    tensors `kept` are in memory besides, and a personal model that is trained as it was before,
    too. None where the manifest predicts nothing for one of them.
    """
    session, batch = SESSION_BYTES.get(manifest.runtime, 0), batch_of(manifest)
    state: dict[str, int] = {}
    replaced: set[str] = set()
    passing = own = 0
    for name in names:
        signature = manifest.signatures[name]
        if signature.peak_bytes is None:
            return None
        inputs = sum(size_of(port, batch) for port in signature.inputs)
        outputs = sum(size_of(port, batch) for port in signature.outputs)
        read = {str(p.state): size_of(p, batch) for p in signature.inputs if p.kind == "state"}
        state |= read
        replaced |= read.keys() & {str(port.state) for port in signature.outputs}
        passing = max(passing, inputs - sum(read.values()) + outputs)
        own += max(0, signature.peak_bytes - session - inputs - outputs)
    sizes = {e.name: size(e.shape, e.dtype) for e in manifest.tensors}
    before = replaced & {e.name for e in manifest.tensors if e.role == "personal"}
    besides = [*before, *(set(kept) - state.keys())]
    held = sum(state.values()) + sum(sizes[name] for name in besides)
    return session + held + passing + own


def training_bytes(manifest: Manifest, validating: bool = False) -> tuple[int, str] | None:
    """The most that any instruction of the schedule takes, in bytes, and what runs then.

    With `validating` the signature `evaluate` counts too, in the place of those that train. None
    where the manifest does not predict it for each of them.
    """
    groups: list[tuple[list[str], set[str]]] = []
    for instruction in manifest.schedule:
        if isinstance(instruction, Record | Initialise):
            groups.append(([instruction.signature], set()))
            continue
        names = sorted({step.signature for step in instruction.steps})
        ports = [port for name in names for port in manifest.signatures[name].inputs]
        trained = {str(port.state) for port in ports if port.kind == "state"}
        groups.append((names, set()))
        if validating and EVALUATE in manifest.signatures:
            groups.append(([EVALUATE], trained))
    most, running = 0, "nothing"
    for names, kept in groups:
        found = concurrent_peak_bytes(manifest, names, kept)
        if found is None:
            return None
        if found > most:
            most, running = found, " and ".join(names)
    return most, running


def open_at_once(manifest: Manifest) -> int:
    """The most of the runtime's sessions that an instruction of the schedule keeps open."""
    trains = (i for i in manifest.schedule if isinstance(i, Train))
    return max((len({step.signature for step in i.steps}) for i in trains), default=1)


def batch_of(manifest: Manifest) -> int:
    """Samples of the batch that peaks are predicted for: the largest that trains."""
    return max((i.batch_size for i in manifest.schedule if isinstance(i, Train)), default=1)


def size_of(port: Port, batch: int) -> int:
    """Bytes of a port's array for `batch` samples."""
    return size([batch if n is None else n for n in port.shape], port.dtype)


def size(shape: Iterable[int], dtype: Dtype) -> int:
    """Bytes of an array."""
    return math.prod(shape) * WIDTHS[dtype]
