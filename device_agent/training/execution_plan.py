"""How this device trains a bundle: the form of its graphs, its threads, sessions and memory.

`plan_execution` creates the plan before the training. The form check and the training follow it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from device_agent.formats.bundle import Bundle, training_of
from device_agent.formats.graph_forms import form_of
from device_agent.training.form_choice import in_device_form
from device_agent.training.memory_estimate import open_at_once, untouched_bytes
from device_agent.training.memory_limits import Ceiling, Usage, ceilings, enforce_memory_limit
from device_agent.training.memory_refusal import check_fits, fits, spare_bytes
from device_agent.training.training_options import TrainingOptions


@dataclass(frozen=True)
class ExecutionPlan:
    """How this device trains a bundle.

    Attributes:
        bundle: The bundle with its graphs in the form that this device runs.
        plain: The opened bundle with its plain graphs.
        options: Threads, seed, validation and the owner's memory limit.
        idle: Memory of this process before its first training.
        limits: All memory limits of this process.
    """

    bundle: Bundle
    plain: Bundle
    options: TrainingOptions
    idle: Usage
    limits: tuple[Ceiling, ...]

    @property
    def form(self) -> str | None:
        """The form of the training graphs; None if they are plain."""
        graphs = (self.bundle.graph(step.signature) for step in training_of(self.bundle).steps)
        return next((form for graph in graphs if (form := form_of(graph.name))), None)

    def in_plain_form(self) -> Self:
        """Copy the plan with the plain graphs.

        Plain graphs need no more memory than other forms.
        """
        return replace(self, bundle=self.plain)

    @property
    def spare_bytes(self) -> int:
        """The predicted memory in bytes that the training leaves free."""
        return spare_bytes(self.bundle.manifest, self.options.validating, self.limits)

    @contextmanager
    def limited_memory(self) -> Iterator[None]:
        """Enforce the owner's limit: an allocation beyond it raises MemoryError."""
        manifest = self.bundle.manifest
        with enforce_memory_limit(
            self.options.max_memory,
            self.options.threads,
            open_at_once(manifest),
            self.idle,
            untouched_bytes(manifest, self.options.validating),
        ):
            yield


def plan_execution(
    bundle: Bundle, options: TrainingOptions, idle: Usage, begun: str | None = None
) -> ExecutionPlan:
    """Plan how this device trains `bundle`: in the device's form if it fits, otherwise plain.

    Args:
        bundle: The opened bundle.
        options: Options of the training.
        idle: Memory of this process before its first training.
        begun: The form with which a killed training must continue; None if the training is new.

    Raises:
        BundleError: The bundle only predicts.
        DoesNotFitError: The training is predicted to exceed a memory limit.
    """
    training_of(bundle)
    limits = ceilings(options.max_memory, idle)
    formed = in_device_form(bundle, begun)
    if not fits(formed.manifest, options.validating, limits):
        formed = bundle
    check_fits(formed.manifest, options.validating, limits)
    return ExecutionPlan(formed, bundle, options, idle, tuple(limits))
