"""One round of a simulation: its updates, and the model that they make."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from device_agent.formats.protocol.fleet import FederatedEvaluation, Limited
from device_agent.privacy.gaussian_noise import gaussian
from toolkit.aggregation.limits.reference import Reference
from toolkit.aggregation.partial_aggregates.partial import decode_partial
from toolkit.aggregation.privacy.budget import RoundNoise
from toolkit.aggregation.rules.rule_aggregation import RuleAggregation
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.stale_updates import merge_stale, staleness_weight
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation
from toolkit.evaluation_sums import Evaluation, mean_evaluation
from toolkit.simulation.chunks import TrainedChunk
from toolkit.simulation.engines.engine import Engine
from toolkit.simulation.judging.client_committee import ClientCommittee
from toolkit.simulation.judging.client_judge import ClientJudge
from toolkit.simulation.judging.client_limits import ClientLimits
from toolkit.simulation.judging.update_files import UpdateFiles

if TYPE_CHECKING:
    from toolkit.simulation.rounds import Simulation

logger = logging.getLogger(__name__)


class OneRound(TrainedChunk):
    """The sums of a round's chunks so far, and the evaluations of clients that train alone.

    Attributes:
        files: The updates of the round, if its model is judged. Then there are no sums.
        judge: The judge of the model, which also aggregates the round again for a committee.
        limited_updates: What limits and judge changed, by client; None if there are neither limits
            nor a judge.
        left_out: Why an update was left out, by client; None if the model is not judged.
        reference: The reference for the limits of the next round; None without limits.
    """

    def __init__(self, simulation: "Simulation", number: int) -> None:
        super().__init__()
        self.simulation, self.number = simulation, number
        federation = simulation.federation
        self.aggregation = federation.new_aggregation()
        self.alone: list[Evaluation] = []
        self.staleness: list[int] = []
        self.noise = simulation.noise()
        self.within: float | None = None
        self.limits: ClientLimits | None = None
        whole = simulation.judged or simulation.committee is not None
        self.files = UpdateFiles() if whole else None
        self.judge: ClientJudge | None = None
        self.limited_updates: dict[int, Limited] | None = None
        self.left_out: dict[int, str] | None = None
        self.reference: Reference | None = None
        if federation.policy.bounds and simulation.config.simulation.baseline is None:
            self.reference = simulation.folder.reference()
            self.limits = None if whole else ClientLimits(self.reference)

    def train(
        self, engine: Engine, version: int, newest: bytes, clients: Sequence[tuple[int, str]]
    ) -> None:
        """Let `engine` train `clients` from the model of round `version`, and add their updates.

        `newest` is the model of the round before this one.
        """
        simulation, staleness = self.simulation, self.number - 1 - version
        reference = None if self.limits is None else self.limits.reference
        federation = simulation.federation
        chunks = simulation.chunks(clients, reference, self.files is not None)
        self.staleness += [staleness] * len(clients)
        if not staleness:
            for chunk in engine.map(self.number, newest, chunks):
                self.keep(chunk, self.aggregation)
                self.evaluations |= chunk.evaluations
            if self.limits is not None:
                self.limits.add_waiting(self.aggregation)
            return
        model = simulation.folder.model_of(version)
        federation.load(model)
        stale = Aggregation(federation.model, federation.policy)
        for chunk in engine.map(version + 1, model, chunks):
            self.keep(chunk, stale)
        if self.limits is not None:
            self.limits.add_waiting(stale)
            self.limits.weaken([client for client, _ in clients], staleness_weight(staleness))
        federation.model = self.aggregation.model
        assert isinstance(self.aggregation, Aggregation)  # the file refuses other rules
        merge_stale(self.aggregation, stale, staleness)

    def keep(self, chunk: TrainedChunk, aggregation: Aggregation | RuleAggregation) -> None:
        """Add a chunk to `aggregation`, and write the tensors and models that its clients keep."""
        folder = self.simulation.folder
        for client, reason in chunk.diverged.items():
            logger.warning("Client %d is left out of round %d: %s", client, self.number, reason)
        for client, tensors in chunk.personal.items():
            folder.keep_personal(client, self.number, tensors)
        for client, own in chunk.own.items():
            folder.keep_own_model(client, self.number, own.model)
            self.alone.append(own.evaluation)
        if self.limits is not None:
            self.limits.note(chunk.figures, chunk.limited)
        for client, update in chunk.updates.items():
            if self.files is not None:
                self.files.add(client, update)
            elif chunk.is_limited or self.limits is None:
                aggregation.add_checked(*update)
            else:
                self.limits.keep(client, update)
        if chunk.partial is not None:
            assert isinstance(aggregation, Aggregation)
            partial = decode_partial(chunk.partial, aggregation.model, aggregation.policy)
            aggregation.merge(partial)
        self.diverged |= chunk.diverged
        self.votes += chunk.votes
        self.bytes_down += chunk.bytes_down
        self.bytes_up += chunk.bytes_up
        self.judged += chunk.judged
        self.correct += chunk.correct

    def federated_evaluation(self) -> FederatedEvaluation | None:
        """How the round's clients judge the newest model; None if nobody asks them.

        Clients that received an earlier model are not counted.
        """
        kinds = self.simulation.kinds
        counts = [
            DeviceCounts(kinds[client], evaluation.before, evaluation.after)
            for client, evaluation in sorted(self.evaluations.items())
        ]
        return federated_evaluation(self.number, counts)

    def evaluated(self, before: bytes) -> Evaluation:
        """Make the next global model and evaluate it. Without updates, the model does not change.

        If clients train alone, returns the mean of their evaluations. `before` is the model before
        the round.
        """
        federation = self.simulation.federation
        if self.files is not None:
            return self.judged_model(self.files, before)
        if self.alone:
            return mean_evaluation(self.alone)
        if self.noise is not None:
            self.take_noised(self.noise)
        elif self.aggregation.updates:
            if self.limits is not None:
                self.limits.limit_statistics(self.aggregation)
            if self.simulation.timetable is None:
                federation.take(self.aggregation)
            else:
                assert isinstance(self.aggregation, Aggregation)
                federation.take_stale(self.aggregation)
        if self.limits is not None:
            self.limited_updates = self.limits.limited
            self.reference = self.limits.next_reference()
        return federation.evaluation(*self.simulation.held_out)

    def judged_model(self, files: UpdateFiles, before: bytes) -> Evaluation:
        """Make the next global model without the updates that make it worse, and evaluate it."""
        federation, held_out = self.simulation.federation, self.simulation.held_out
        judges = self.simulation.judged
        self.judge = ClientJudge(federation, before, held_out, files, self.reference, judges=judges)
        evaluation = self.judge.aggregate()
        for client, reason in self.judge.left_out.items():
            logger.warning("Client %d is left out of round %d: %s", client, self.number, reason)
        self.take_figures(self.judge)
        if self.simulation.committee is None:
            files.remove()
        return evaluation

    def take_figures(self, judge: ClientJudge) -> None:
        """Note what `judge` left out and limited."""
        self.left_out, self.reference = judge.left_out, judge.reference
        self.limited_updates = judge.limited

    def accepted(
        self,
        committee: ClientCommittee,
        specs: Mapping[int, str],
        before: bytes,
        evaluation: Evaluation,
    ) -> Evaluation:
        """Let the `committee` decide about the new model, whose evaluation is `evaluation`.

        A rejected model is judged again without the updates that point against most other updates.
        If this model is also rejected, the model `before` the round is restored.

        Returns the evaluation of the model that is kept.
        """
        judge = self.judge
        assert judge is not None  # a round with a committee keeps its updates
        counts = {n: c.before for n, c in self.evaluations.items() if n not in judge.left_out}
        votes = committee.judge(self.number, specs, counts)
        if votes.rejects and (again := judge.without_disagreeing(votes.text())) is not None:
            votes, evaluation = committee.judge(self.number, specs, counts), again
        judge.files.remove()
        self.take_figures(judge)
        if votes.accepts:
            return evaluation
        logger.warning("Round %d is left out: %s", self.number, votes.text())
        out = dict.fromkeys(specs.keys() - self.diverged.keys(), votes.text())
        self.left_out, self.limited_updates, self.reference = out | judge.left_out, None, None
        federation = self.simulation.federation
        federation.load(before)
        return federation.evaluation(*self.simulation.held_out)

    def take_noised(self, noise: RoundNoise) -> None:
        """Use the noised sum of the clipped changes; there may be no changes."""
        assert isinstance(self.aggregation, Aggregation)  # the file refuses other rules
        simulation = self.simulation
        # The last number separates these draws from all others.
        draw = np.random.default_rng([simulation.config.simulation.seed, self.number, 4])
        expected = simulation.selection.expected
        simulation.federation.take_noised(
            self.aggregation, expected, self.number, noise.deviation, draw.bytes
        )
        self.within = noise.share_within(self.votes, float(gaussian((), draw.bytes)))
