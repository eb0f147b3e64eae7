"""Prediction of a submodel's memory and time on a device, with upper bounds.

Memory is computed from the lifetimes of the tensors in the graphs and from the measured overhead of
the runtime. Time is computed from the operations of the graphs and the rates of a calibration. Each
upper bound adds a relative error, which `make bench-plan` has measured. A plan compares the upper
bounds with the budgets.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from profiles.cost_model.memory_rule import (
    IN_BROWSER,
    UNCALIBRATED,
    WEB_RUNTIME,
    SignatureMemory,
    kept_bytes,
    training_growth,
    upper_bound,
)
from profiles.cost_model.operation_rates import Rates
from profiles.cost_model.submodel_choice import Figure
from profiles.cost_model.workload import (
    AT_BEST,
    BLOCKED,
    FREE,
    KINDS,
    LOOP,
    PRODUCTS,
    WINOGRAD_GAIN,
    Operation,
    SignatureWork,
    Workload,
    amount,
)
from profiles.documents.calibration_record import Calibration, MemoryOverhead, Timing
from profiles.errors import InputError

TIME_ERROR = 0.5
"""A step may take this share longer than predicted. At most 4 of 37 measured steps took longer."""
TIMED = {*KINDS.values(), "scaling", "broadcast", "accumulated"} - {FREE, LOOP}
"""Kinds of operations that a calibration must have timed."""


@dataclass(frozen=True)
class Prediction:
    """Process peak of the agent (bytes) and time of one batch (seconds; None if unknown)."""

    memory: Figure
    step: Figure | None


def predict(
    work: Workload, calibration: Calibration | None, budget: float | None = None
) -> Prediction:
    """Predict memory and time of `work`.

    Args:
        work: The workload of a submodel.
        calibration: The calibration of the device. Without a calibration, the memory overhead of
            x86-64 is used and the time is unknown.
        budget: Limit of the process peak in bytes. The agent can run a graph in a faster form that
            needs more memory. If this form may exceed the budget, the plain form is predicted. If a
            web page measured the calibration, the budget is ignored.

    Raises:
        InputError: The calibration has not timed every kind of operation.
    """
    if calibration is None:
        return Prediction(memory=predict_memory(work, UNCALIBRATED), step=None)
    assumed = IN_BROWSER if in_browser(calibration) else UNCALIBRATED
    model, overhead = TimeModel(calibration), calibration.memory or assumed
    faster = model.fastest(work)
    limit = math.inf if budget is None or in_browser(calibration) else budget
    if predict_memory(faster, overhead).upper <= limit:
        work = faster
    return Prediction(memory=predict_memory(work, overhead), step=model.batch(work.training))


def in_browser(calibration: Calibration) -> bool:
    """Whether a web page has measured `calibration`. A page cannot measure its memory."""
    return calibration.runtime.startswith(WEB_RUNTIME)


def predict_memory(work: Workload, overhead: MemoryOverhead) -> Figure:
    """Predict the process peak of the agent, with an upper bound.

    The agent reaches the peak when it trains or when it records a stage. `memory_rule` states the
    rule. The signatures of the training are open at the same time, but only one stage is open at a
    time.
    """

    def growth(signatures: Sequence[SignatureWork], state: int) -> int:
        held = [
            SignatureMemory(
                inputs=signature.inputs,
                outputs=signature.outputs,
                state=signature.state,
                kept=kept_bytes(signature.arena, signature.nodes, overhead.node_bytes)
                + (overhead.array_copies - 1) * (signature.inputs + signature.outputs),
            )
            for signature in signatures
        ]
        return training_growth(held, state, overhead.session_bytes)

    # Recording stages run before training, so only the largest of them matters.
    stages = [growth([stage], stage.state) for stage in work.recording]
    most = max([growth(work.training, work.state), *stages])
    return Figure(overhead.idle_bytes + most, overhead.idle_bytes + upper_bound(most))


class TimeModel:
    """Predicts the time of operations on one calibrated device.

    Raises InputError if the calibration has not timed every kind of operation.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        timings: dict[str, list[Timing]] = defaultdict(list)
        for timing in calibration.timings:
            timings[timing.kind].append(timing)
        self.rates = {kind: Rates(own) for kind, own in timings.items()}
        if missing := sorted(TIMED - self.rates.keys()):
            raise InputError(
                "The calibration must time every kind of operation; this one lacks {kinds}. "
                "Calibrate the device again.",
                code="calibration.missing-kinds",
                kinds=missing,
            )

    def batch(self, signatures: Sequence[SignatureWork]) -> Figure:
        """Predict the time of one batch in seconds.

        Within one kind, the errors of the rates are fully correlated, so they add up. Between
        kinds, the errors are independent, so the total error is the root of the sum of their
        squares. If the device was too slow to time all cases, TIME_ERROR is divided by the share of
        the timed cases.
        """
        kinds: dict[str, float] = defaultdict(float)
        total = 0.0
        for signature in signatures:
            # Every run costs a fixed time, and additional time for each array that enters or
            # leaves.
            around = (
                self.calibration.run_s
                + self.calibration.port_s * signature.ports
                + self.calibration.byte_s * (signature.inputs + signature.outputs)
            )
            total += signature.times * around
            for operation in self.operations(signature):
                seconds = signature.times * self.seconds(operation)
                kinds[operation.kind] += seconds
                total += seconds
        doubt = math.hypot(
            *(seconds * self.doubt(kind) for kind, seconds in kinds.items()),
            TIME_ERROR / self.calibration.timed_share * total,
        )
        return Figure(total, total + doubt)

    def fastest(self, work: Workload) -> Workload:
        """Return `work`. If Winograd's form of the graphs is faster, the result has this form."""
        if self.has_blocks:
            return work
        other = in_winograd_form(work)
        own_s, other_s = (self.batch(candidate.training).value for candidate in (work, other))
        return other if other_s < (1 - WINOGRAD_GAIN) * own_s else work

    @property
    def has_blocks(self) -> bool:
        """Whether the device's runtime has convolutions in blocked layout."""
        return self.rates.keys() >= set(BLOCKED)

    def operations(self, work: SignatureWork) -> tuple[Operation, ...]:
        """The operations of `work`, in the form that the device runs."""
        return work.blocked if work.blocked and self.has_blocks else work.operations

    def seconds(self, operation: Operation) -> float:
        """Time of all runs of one operation in seconds."""
        if operation.kind == LOOP:
            return operation.count * operation.sizes[0] * self.calibration.loop_step_s
        if operation.kind == FREE:
            return operation.count * self.calibration.node_s
        if operation.kind == AT_BEST:
            return operation.count * operation.sizes[0] * self.shortest_product_s
        return operation.count * self.rates[operation.kind].seconds(operation.sizes)

    @cached_property
    def shortest_product_s(self) -> float:
        """The shortest time of a multiply-accumulate in any timing, in seconds."""
        return min(
            timing.seconds / amount(timing.kind, timing.sizes)
            for timing in self.calibration.timings
            if timing.kind in (*PRODUCTS, *BLOCKED)
        )

    def doubt(self, kind: str) -> float:
        """Relative error of a rate of this kind between its timings."""
        return 0.0 if kind in (FREE, LOOP, AT_BEST) else self.rates[kind].doubt


def in_winograd_form(work: Workload) -> Workload:
    """Return `work` with Winograd's form of each graph. A graph without this form stays plain."""

    def form(signature: SignatureWork) -> SignatureWork:
        if signature.winograd is None:
            return signature
        return msgspec.structs.replace(
            signature, **msgspec.structs.asdict(signature.winograd), winograd=None
        )

    return msgspec.structs.replace(
        work,
        recording=tuple(map(form, work.recording)),
        training=tuple(map(form, work.training)),
    )
