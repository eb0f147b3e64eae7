"""Lets a committee of devices judge the new model of a round before it is published.

See `toolkit/aggregation/committee.py`. During the judging, the database does not know the new
model. If the coordinator is killed, the round is aggregated again, and another committee judges the
new model.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping

from profiles.errors import EdgeTailorError
from profiles.text_formatting import counted
from toolkit.aggregation.committee import Committee
from toolkit.coordinator.closing.round_aggregation import RoundAggregation
from toolkit.coordinator.closing.round_models import Model
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.rounds.candidate import Candidate
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts
from toolkit.coordinator.storage.coordinator_store import Bundle

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often the end of the judging is checked, in seconds."""
CANDIDATE = 0
"""The round number under which the bundles of a new model are stored. No round has this number, so
that a rejected model is never offered for training after a restart."""


def decided_by_committee(
    coordinator: Coordinator,
    model: Model,
    folding: RoundAggregation,
    counts: Mapping[str, DeviceCounts],
    when_room: Callable[[Callable[[], None]], None],
    stopping: threading.Event,
) -> int | None:
    """Let a committee judge the `model` of the closed round, which `folding` has aggregated.

    A rejected model is judged again without the updates that point against most other updates. If
    this model is also rejected, all updates are left out.

    Returns how many updates are in the model; None if the program ends before the decision. See
    `CommitteeJudging` for the other arguments.
    """
    judging = CommitteeJudging(coordinator, model, counts, when_room)
    accepted = judging.accepts(stopping)
    if accepted is False and judging.may_ask_again and folding.without_disagreeing(judging.reason):
        accepted = judging.accepts(stopping)
    if accepted is None:
        return None
    if accepted:
        return folding.inside
    judging.tell_rejected()
    return folding.reject(judging.reason)


class CommitteeJudging:
    """Lets a random committee judge the new `model` of the closed round.

    If the model changes afterwards, the same committee can judge it again, until the same deadline.

    Args:
        coordinator: The coordinator.
        model: The new model.
        counts: The counts that came with the updates of the round. Only these devices can be
            members, because they have evaluated the model before the round.
        when_room: Calls a function that writes, and repeats the call while the disk is full.

    Attributes:
        votes: The last votes.
        reason: The committee's decision as text.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        model: Model,
        counts: Mapping[str, DeviceCounts],
        when_room: Callable[[Callable[[], None]], None],
    ) -> None:
        self.votes, self.reason = Committee(0), ""
        self._coordinator, self._model, self._when_room = coordinator, model, when_room
        self._before = {d: own.before for d, own in counts.items() if own.before.counted}
        self._until: float | None = None
        self._submodels: dict[str, str] = {}
        self._bundles: dict[str, Bundle] = {}

    def accepts(self, stopping: threading.Event) -> bool | None:
        """Whether the committee accepts the model; None if the program ends before its decision."""
        if self._until is None:
            self._until = self._coordinator.clock() + self._coordinator.rounds.deadline_s
            self._draw()
        self._when_room(self._make_bundles)
        votes = self._votes(stopping, self._until)
        if votes is None:
            return None
        self.votes, self.reason = votes, votes.text()
        logger.info("Round %d: %s.", self._coordinator.rounds.round, self.reason)
        return votes.accepts

    @property
    def may_ask_again(self) -> bool:
        """Whether the committee has rejected the model, and there is time left."""
        assert self._until is not None
        return self.votes.rejects and self._coordinator.clock() < self._until

    def tell_rejected(self) -> None:
        """Tell the operator that all updates of the round are left out."""
        text = (
            f"Round {self._coordinator.rounds.round}: {self.reason}. All its updates are left out."
        )
        logger.warning(text)
        votes, worse = len(self.votes.rises), self.votes.worse
        self._coordinator.notify("round-rejected", text, votes=votes, worse=worse)

    def _votes(self, stopping: threading.Event, until: float) -> Committee | None:
        """Ask the members, and wait for their votes."""
        coordinator, rounds = self._coordinator, self._coordinator.rounds
        members = [device for device, name in self._submodels.items() if name in self._bundles]
        candidate = Candidate(self._bundles, {d: self._before[d] for d in members})
        with coordinator.lock:
            coordinator.candidate = candidate
            rounds.ask_committee(members, until)
        text = "Round %d: a committee of %s judges the new model."
        logger.info(text, rounds.round, counted(len(members), "device"))
        while not stopping.is_set():
            with coordinator.lock:
                votes, over = candidate.votes(), rounds.judging_is_over(coordinator.clock())
                if over or votes.is_decided:
                    rounds.end_judging()
                    return votes
            coordinator.changed.wait(TICK_S)
            coordinator.changed.clear()
        return None

    def _draw(self) -> None:
        """Draw the members, which no device can foresee."""
        coordinator = self._coordinator
        most = coordinator.config.evaluation.committee
        assert most is not None
        with coordinator.lock:
            present = coordinator.rounds.present
            able = sorted(self._before.keys() & present)
            for name in secrets.SystemRandom().sample(able, min(most, len(able))):
                device = coordinator.store.registry.device(name)
                self._submodels[name] = coordinator.submodel(device)

    def _make_bundles(self) -> None:
        """Make the bundles that the members evaluate: the bundles of the next round."""
        made = self._coordinator.store.set_bundles(CANDIDATE, self._files(), CANDIDATE)
        self._bundles = {submodel: files for submodel, files in made.items() if files}

    def _files(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield each submodel of the members with the files of its bundle, if it has any."""
        for submodel in sorted(set(self._submodels.values())):
            try:
                files = self._model.bundle(submodel, self._coordinator.rounds.round + 1)
            except EdgeTailorError as error:
                logger.warning("The new model has no bundle %s to judge: %s", submodel, error)
                files = {}
            yield submodel, files
