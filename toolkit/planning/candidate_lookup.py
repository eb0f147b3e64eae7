"""Finds the memory and time that a device needs for each submodel, first roughly, then exactly."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from profiles.cost_model.memory_rule import AGENT_RESERVE_BYTES as RESERVE
from profiles.cost_model.prediction import predict
from profiles.cost_model.submodel_choice import Candidate, Figure
from profiles.documents.device_profile import DeviceProfile
from profiles.progress import Report
from toolkit.aggregation.submodel_strength import most_strength
from toolkit.planning.strongest_first import Depth, Entry, unknown
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads


@dataclass
class Lookup:
    """Finds figures of submodels for one device, at the depths that `strongest_first.py` defines.

    Attributes:
        device: The device's profile.
        workloads: The workloads of the model's submodels.
        memory: The budget of memory, in bytes.
        progress: Called with the name of each stage when it begins.
        known: The workloads that were computed or are in the cache.
        impossible: The submodels that turned out to be impossible.
        told: Whether `progress` was called before.
    """

    device: DeviceProfile
    workloads: Workloads
    memory: float | None
    progress: Report
    known: dict[str, Known] = field(default_factory=dict)
    impossible: list[Impossible] = field(default_factory=list)
    told: bool = False

    def listed(self, specs: Iterable[str]) -> Iterator[Entry]:
        """The entries of `specs`, each with the most exact figures that the cache has."""
        for spec in dict.fromkeys(specs):
            if (known := self.workloads.remembered(spec)) is not None:
                depth = Depth.COMPUTED
            elif (known := self.workloads.remembered_estimate(spec)) is not None:
                depth = Depth.ESTIMATED
            else:
                yield Entry(spec, Depth.LISTED, unknown(spec, most_strength(spec)))
                continue
            if (entry := self.entry(spec, depth, known)) is not None:
                yield entry

    def __call__(self, entry: Entry) -> Entry | None:
        """Look at `entry` one step deeper; None if its submodel is impossible."""
        if entry.depth is Depth.LISTED:
            self.tell(f"estimating {entry.spec}")
            return self.entry(entry.spec, Depth.ESTIMATED, self.workloads.at_least(entry.spec))
        known = self.workloads.remembered(entry.spec)
        if known is None:
            self.tell(f"exporting {entry.spec}, seconds to a minute")
            known = self.workloads.of(entry.spec)
        return self.entry(entry.spec, Depth.COMPUTED, known, entry.recomputes)

    def tell(self, stage: str) -> None:
        """Report a `stage`. Before the first stage, also report the folder of the results."""
        if not self.told and self.workloads.cache is not None:
            self.progress(f"results are kept in {self.workloads.cache}")
        self.told = True
        self.progress(stage)

    def entry(
        self, spec: str, depth: Depth, result: Known | Impossible, recomputes: bool = False
    ) -> Entry | None:
        """The entry of a `result` at `depth`; None if the submodel is impossible."""
        if isinstance(result, Impossible):
            if not recomputes:
                self.impossible.append(result)
            return None
        if depth is Depth.COMPUTED:
            self.known[spec] = result
        figures = candidate(result, self.device, self.memory)
        return Entry(spec, depth, figures, recomputes, result.activations)


def candidate(known: Known, device: DeviceProfile, budget: float | None = None) -> Candidate:
    """Predict the memory and time that the agent needs to train `known` on `device`.

    An agent can run a graph in several forms. With a `budget` in bytes, the prediction assumes that
    the agent does not use forms that may exceed the budget.
    """
    left = None if budget is None else budget - RESERVE
    predicted = predict(known.work, device.calibration, left)
    memory = Figure(predicted.memory.value + RESERVE, predicted.memory.upper + RESERVE)
    return Candidate(
        submodel=known.submodel,
        strength=known.strength,
        memory=memory,
        step=predicted.step,
        traffic=known.work.down + known.work.up,
    )
