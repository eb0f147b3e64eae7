"""Trials of runtimes that are made up, or timed by a clock of the test; no other process runs."""

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from device_agent.formats.bundle import Bundle
from device_agent.training.memory_limits import OPTION, Ceiling, Usage
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials.fastest_runtime import Measure, Work, with_fastest_runtime
from device_agent.training.trials.runtime_trial import Request, Trial, try_runtime

OWN, OTHER = "onnx", "openvino"
IDLE = Usage(resident=60_000_000, space=0, data=0)
LONG = Work(starts=1, recorded=100, trained=10_000)


@dataclass
class Clocked:
    """Makes trials in this process. Its clocks tick `tick_s[runtime]` whenever they are read."""

    tick_s: dict[str, float]
    tried: list[Request] = field(default_factory=list)

    def __call__(self, request: Request) -> Trial:
        self.tried.append(request)
        ticks = count()
        return try_runtime(request, lambda: next(ticks) * self.tick_s[request.runtime])


@dataclass
class Made:
    """Makes up trials in which a batch takes `batch_s[runtime]`."""

    batch_s: dict[str, float]
    tried: list[Request] = field(default_factory=list)

    def __call__(self, request: Request) -> Trial:
        self.tried.append(request)
        return Trial(train_s=self.batch_s[request.runtime], losses=(1.0,))


def never(request: Request) -> Trial:
    raise AssertionError(f"{request.runtime} is tried")


def choose(
    bundle: Bundle,
    file: Path,
    measure: Measure,
    work: Work = LONG,
    limits: list[Ceiling] | None = None,
    options: TrainingOptions | None = None,
) -> str:
    """The runtime that is chosen; without `limits`, memory is no obstacle."""
    no_limit = [Ceiling(OPTION, 10**12, IDLE.resident)]
    chosen = with_fastest_runtime(
        bundle,
        work,
        options or TrainingOptions(threads=1),
        limits or no_limit,
        IDLE,
        file,
        measure=measure,
    )
    assert (chosen.folder, chosen.sha256) == (bundle.folder, bundle.sha256)
    return chosen.manifest.runtime
