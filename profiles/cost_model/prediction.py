"""What a submodel takes on a device, before it ever ran there: memory and time, and how sure.

Memory follows from the graphs' liveness and the runtime's measured overhead, time from the graphs'
operations and the rates of a calibration. What may be wrong with either was learned from
`make bench-plan`; a plan goes by the upper bounds.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from profiles.cost_model.operation_rates import Rates
from profiles.cost_model.submodel_choice import Figure
from profiles.cost_model.workload import FREE, KINDS, LOOP, Operation, SignatureWork, Workload
from profiles.documents.calibration_record import Calibration, MemoryOverhead, Timing
from profiles.errors import InputError

MEMORY_ERROR = 0.06
"""How far above its prediction a measured growth of the process may be, relative."""
TIME_ERROR = 0.5
"""How much longer than predicted a step may take, relative; of 37 steps up to four took longer."""
X86_OVERHEAD = MemoryOverhead(idle_bytes=60 * 10**6, session_bytes=10 * 2**20, node_bytes=5300)
"""Measured on x86-64 Linux with onnxruntime 1.31.1: taken for devices that were not calibrated."""
AT_WORK_BYTES = 13 << 20
"""What an agent at work holds besides a calibration's idle one and its graphs: a connection, an
open bundle, data and checkpoints. Measured on x86-64: 6 MB before training, and 6 MB during it."""
TIMED = {*KINDS.values(), "scaling", "broadcast", "accumulated"} - {FREE, LOOP}
"""Kinds that a calibration must have timed."""


@dataclass(frozen=True)
class Prediction:
    """Peak memory of the agent's process (bytes) and time of one batch (seconds; None unknown)."""

    memory: Figure
    step: Figure | None


def predict(work: Workload, calibration: Calibration | None) -> Prediction:
    """What `work` takes on a device of this `calibration`."""
    overhead = calibration.memory if calibration is not None else None
    step = None if calibration is None else Clock(calibration).batch(work.training)
    return Prediction(memory=memory(work, overhead or X86_OVERHEAD), step=step)


def memory(work: Workload, overhead: MemoryOverhead) -> Figure:
    """Peak of the agent's process: while it trains, or while it records a stage if that is more.

    process = idle + session + node_bytes * nodes + arenas + inputs + outputs
    """

    def held(one: SignatureWork) -> int:
        return one.arena + overhead.node_bytes * one.nodes

    batch = max(s.inputs - s.state + s.outputs for s in work.training)
    training = work.state + batch + sum(map(held, work.training))
    stages = [s.inputs + s.outputs + held(s) for s in work.recording]
    growth = max([training, *stages]) + overhead.session_bytes
    return Figure(overhead.idle_bytes + growth, overhead.idle_bytes + growth * (1 + MEMORY_ERROR))


class Clock:
    """Times of operations on one calibrated device.

    Raises InputError where the calibration has not timed every kind of operation.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        timings: dict[str, list[Timing]] = defaultdict(list)
        for timing in calibration.timings:
            timings[timing.kind].append(timing)
        self.rates = {kind: Rates(own) for kind, own in timings.items()}
        if missing := sorted(TIMED - self.rates.keys()):
            raise InputError(
                f"The calibration times every kind of operation; this one lacks "
                f"{', '.join(missing)}. Calibrate the device again."
            )

    def batch(self, signatures: Sequence[SignatureWork]) -> Figure:
        """Seconds of one batch.

        Rates of one kind are wrong together, those of different kinds apart: their errors, known
        from timings predicted by all others, add up like the sides of a right angle.
        """
        kinds: dict[str, float] = defaultdict(float)
        total = 0.0
        for one in signatures:
            around = self.calibration.run_s + self.calibration.port_s * one.ports
            total += one.times * around
            for operation in one.operations:
                seconds = one.times * self.seconds(operation)
                kinds[operation.kind] += seconds
                total += seconds
        doubt = math.hypot(
            *(seconds * self.doubt(kind) for kind, seconds in kinds.items()), TIME_ERROR * total
        )
        return Figure(total, total + doubt)

    def seconds(self, operation: Operation) -> float:
        """Of all runs of one operation."""
        if operation.kind == LOOP:
            return operation.count * operation.sizes[0] * self.calibration.loop_step_s
        if operation.kind == FREE:
            return operation.count * self.calibration.node_s
        return operation.count * self.rates[operation.kind].seconds(operation.sizes)

    def doubt(self, kind: str) -> float:
        """Relative error of the rates of `kind` between its timings."""
        return 0.0 if kind in (FREE, LOOP) else self.rates[kind].doubt
