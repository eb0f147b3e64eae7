"""The new model of a closed round, until a committee of devices has judged it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from device_agent.formats.evaluation_counts import EvaluationCounts
from device_agent.formats.manifest import FileEntry
from toolkit.aggregation.committee import Committee, rise


@dataclass(frozen=True)
class Candidate:
    """A model that is not the global model yet, and the devices that judge it.

    Attributes:
        bundles: Its bundles, by submodel.
        before: The evaluation of the previous model by each member of the committee.
        answers: The evaluation of this model by each member that has answered.
    """

    bundles: Mapping[str, Mapping[str, FileEntry]]
    before: Mapping[str, EvaluationCounts]
    answers: dict[str, EvaluationCounts] = field(default_factory=dict)

    def votes(self) -> Committee:
        """The votes that have come."""
        found = {device: rise(self.before[device], own) for device, own in self.answers.items()}
        rises = {device: value for device, value in found.items() if value is not None}
        return Committee(len(self.before), rises)
