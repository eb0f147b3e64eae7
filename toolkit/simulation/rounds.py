"""Runs the rounds of a simulation: chooses clients, trains them and averages their updates."""

import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.formats.evaluation_counts import DIVERGED
from device_agent.formats.protocol.fleet import FederatedEvaluation, Limited, SpentPrivacy
from device_agent.privacy.gaussian_noise import gaussian
from profiles.errors import UpdateError
from profiles.text_formatting import counted
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.limits.reference import Reference
from toolkit.aggregation.model_judge import Bar, Quality
from toolkit.aggregation.partial_aggregates.partial import decode_partial
from toolkit.aggregation.privacy.budget import PrivacyPlan, RoundNoise
from toolkit.aggregation.rules.rule_aggregation import RuleAggregation, new_aggregation
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.stale_updates import merge_stale, staleness_weight
from toolkit.coordinator.rounds.compared_rounds import Figure, stops_early
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation
from toolkit.evaluation_sums import Evaluation, mean_evaluation
from toolkit.simulation.attacks.hostile_clients import (
    HostileTraining,
    Known,
    hostile_clients,
    known_to,
)
from toolkit.simulation.attendance import Attendance, Turnout
from toolkit.simulation.chunks import Chunk, Client, TrainedChunk, shared_out
from toolkit.simulation.client_judge import ClientJudge
from toolkit.simulation.client_limits import ClientLimits
from toolkit.simulation.client_selection import Choices, ClientSelection
from toolkit.simulation.engines.engine import Engine
from toolkit.simulation.partition import Parts
from toolkit.simulation.results import RoundResult, RunFolder
from toolkit.simulation.simulation_config import SimulationConfig
from toolkit.simulation.timetable import Timetable

logger = logging.getLogger(__name__)


@dataclass
class Simulation:
    """The state of a simulation. The clients' samples are rows of `samples`.

    Attributes:
        config: The federation's file.
        folder: The folder of the results.
        federation: The global model.
        samples: All samples that clients train on.
        held_out: Samples and labels to evaluate the global model.
        specs: The submodel of each client.
        choices: Maps a client's submodel to the submodels from which it draws one in each round.
        parts: The rows of each client in `samples`.
        attendance: Which of a round's clients deliver an update; None for all.
        timetable: The clients of each round, if rounds are asynchronous.
        kinds: The name of the kind of each client, for a federated evaluation.
        observers: Called with the result of each finished round.
        selection: Selects the clients of each round.
        hostile: The numbers of the hostile clients.
        plan: Differential privacy for clients; None without it.
        first: The quality of the model before round 1; None if new models are not judged.
    """

    config: SimulationConfig
    folder: RunFolder
    federation: Federation
    samples: LocalData
    held_out: tuple[np.ndarray, np.ndarray]
    specs: Sequence[str]
    choices: Choices
    parts: Parts
    attendance: Attendance | None = None
    timetable: Timetable | None = None
    kinds: Sequence[str] = ()
    observers: Sequence[Callable[[RoundResult], None]] = ()
    first: Quality | None = None
    selection: ClientSelection = field(init=False)
    hostile: frozenset[int] = field(init=False)
    plan: PrivacyPlan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        samples = [len(part) for part in self.parts]
        self.selection = ClientSelection(
            self.config, self.specs, samples, self.choices, self.kinds, self.candidates
        )
        table = self.config.simulation
        privacy, probability = self.config.device_privacy, self.selection.probability
        if privacy is not None:
            self.plan = privacy.plan(probability, self.config.last_round)
        self.hostile = hostile_clients(table.hostile, len(self.specs), table.seed)

    def run(self, engine: Engine) -> None:
        """Run the rounds that are not finished yet."""
        done = len(self.folder.history)
        if self.timetable is not None:
            self.folder.keep_first_model(self.federation.save())
        last = self.config.last_round
        assert last is not None  # load_simulation refuses others
        if done >= last or self._ends():
            logger.info("All %d rounds are finished already", done)
            return
        if done:
            logger.info("Continuing after round %d", done)
        for round_ in range(done + 1, last + 1):
            self.run_round(round_, engine)
            if (reason := self._ends()) is not None:
                logger.info("The rounds end after round %d: %s", round_, reason)
                return

    def _ends(self) -> str | None:
        """Why no other round follows before the last one; None if one follows."""
        if self._stops_early():
            patience = counted(self.config.early_stopping or 0, "round")
            return f"no model was better for {patience}."
        plan, probability = self.plan, self.selection.probability
        if plan is None or plan.allows_another(self._spent_before(), probability):
            return None
        return "another round would exceed the privacy budget."

    def spent(self, within: float | None) -> SpentPrivacy | None:
        """What is spent with the round after the finished ones; None without [privacy].

        See `PrivacyPlan.after`.
        """
        if self.plan is None:
            return None
        return self.plan.after(self._spent_before(), self.selection.probability, within)

    def noise(self) -> RoundNoise | None:
        """The clipping and the noise of the round after the finished ones; None for none."""
        expected = sum(self.selection.expected.values())
        return None if self.plan is None else self.plan.noise(self._spent_before(), expected)

    def _spent_before(self) -> list[SpentPrivacy | None]:
        return [result.privacy for result in self.folder.history]

    def _stops_early(self) -> bool:
        """Whether the models have stopped improving, judged by the same figure as in `serve`."""
        history = self.folder.history
        by_devices = self.config.held_out is None and self.config.evaluation.share > 0
        figures: list[tuple[int, Figure]] = [
            (r.round - 1, (r.devices.accuracy, r.devices.loss))
            for r in history
            if by_devices and r.devices is not None
        ]
        if not by_devices:
            figures = [(result.round, (result.accuracy, result.loss)) for result in history]
        return stops_early(figures, self.config.early_stopping)

    def run_round(self, round_: int, engine: Engine) -> None:
        """Let `engine` train the round's clients, average their updates and keep the result."""
        begun = time.monotonic()
        # In workers and after a restart, a round starts from the saved model. Do the same here:
        # other state in memory, such as subspaces of factorizations, must not matter.
        model = self.federation.save()
        self.federation.load(model)
        bar = self.bar()
        turnout = self.turnout(round_)
        trained = _Round(self, round_)
        for version, clients in turnout.by_version(round_ - 1):
            trained.train(engine, version, model, clients)
        if trained.diverged and len(trained.diverged) == len(turnout.present):
            raise UpdateError(DIVERGED, code="update.diverged")
        lost = (*turnout.failed, *turnout.late, *turnout.not_needed)
        trained.bytes_down += sum(self.federation.submodel(spec).bytes for _, spec in lost)
        evaluation, left_out = self.judged(engine, trained, model, turnout, bar)
        outside = {*trained.diverged, *map(int, left_out or ())}
        result = RoundResult(
            round=round_,
            accuracy=evaluation.accuracy,
            loss=evaluation.loss,
            held_out=evaluation.figures,
            devices=trained.federated_evaluation(),
            local_accuracy=trained.correct / trained.judged if trained.judged else None,
            clients=len(turnout.present) - len(outside),
            diverged=len(trained.diverged),
            failed=len(turnout.failed),
            late=len(turnout.late),
            not_needed=len(turnout.not_needed),
            away=len(turnout.away),
            simulated_s=turnout.simulated_s,
            hostile=self.hostile_updates(turnout, outside),
            backdoor=self.backdoor_success(),
            limited=None if trained.limits is None else limited_clients(trained.limits.limited),
            left_out=left_out,
            memory=self.attendance.peak_memory(turnout) if self.attendance else None,
            **self.staleness(trained.staleness),
            privacy=self.spent(trained.within),
            bytes_down=trained.bytes_down,
            bytes_up=trained.bytes_up,
            seconds=time.monotonic() - begun,
        )
        reference = None if trained.limits is None else trained.limits.next_reference()
        self.folder.finish_round(result, self.federation.save(), reference)
        for observe in self.observers:
            observe(result)

    def bar(self) -> Bar | None:
        """The bar for the new model; None if it is not judged."""
        if self.first is None:
            return None
        later = [Quality(result.accuracy, result.loss) for result in self.folder.history]
        return Bar.of(self.first, [self.first, *later], len(self.held_out[1]))

    def judged(
        self,
        engine: Engine,
        trained: "_Round",
        before: bytes,
        turnout: Turnout,
        bar: Bar | None,
    ) -> tuple[Evaluation, dict[str, str] | None]:
        """The evaluation of the new model, and which updates the judge left out, with the reasons.

        None without a bar. `before` is the model that the clients trained from.
        """
        whole = trained.evaluated()
        aim = None if bar is None else bar.aim(whole)
        if aim is None:
            return whole, None if bar is None else {}
        what = "does not rise" if aim.stalled else "falls"
        logger.info("Round %d: the quality %s; updates are left out.", trained.number, what)
        reference = None if trained.limits is None else trained.limits.reference
        chunks = self.chunks(turnout.present, reference, whole=True)
        again = engine.map(trained.number, before, chunks)
        judge = ClientJudge(self.federation, before, self.held_out, aim, trained.limits)
        evaluation, left_out = judge.judge(whole, again)
        if trained.limits is not None:
            trained.limits.leave_out(map(int, left_out))
        for client, reason in left_out.items():
            logger.warning("Client %s is left out of round %d: %s", client, trained.number, reason)
        return evaluation, left_out

    def turnout(self, round_: int) -> Turnout:
        """The clients of `round_`."""
        if self.timetable is not None:
            return self.timetable.turnout(round_)
        chosen = self.selection.clients(round_)
        if self.attendance is None:
            return Turnout(chosen)
        return self.attendance.turnout(round_, chosen, self.closed_before(round_))

    def candidates(self, round_: int) -> Sequence[int]:
        """The clients that `round_` may ask."""
        if self.attendance is None:
            return range(len(self.specs))
        return self.attendance.candidates(self.closed_before(round_))

    def closed_before(self, round_: int) -> float:
        """When the round before `round_` closed, in simulated seconds; 0 without such times."""
        return sum(result.simulated_s or 0.0 for result in self.folder.history[: round_ - 1])

    def staleness(self, values: Sequence[int]) -> dict[str, Any]:
        """Fields of the result: mean and largest staleness of updates; empty if synchronous."""
        if self.timetable is None or not values:
            return {}
        return {"mean_staleness": sum(values) / len(values), "max_staleness": max(values)}

    def hostile_updates(self, turnout: Turnout, diverged: Container[int]) -> list[int] | None:
        """The hostile clients whose updates are in the model; None if no client is hostile."""
        if not self.hostile:
            return None
        inside = (client for client, _ in turnout.present if client not in diverged)
        return sorted(self.hostile.intersection(inside))

    def backdoor_success(self) -> float | None:
        """The share of held-out samples with the trigger that the new model takes for the target.

        None without a backdoor.
        """
        table = self.config.simulation
        if table.hostile is None:
            return None
        highest = self.federation.submodel(self.specs[0]).program.labels.highest
        training = HostileTraining(table.hostile, table.seed, highest, self.held_out)
        samples = training.triggered()
        return None if samples is None else self.federation.evaluation(*samples).accuracy

    def chunks(
        self,
        chosen: Sequence[tuple[int, str]],
        reference: Reference | None,
        whole: bool = False,
    ) -> Iterator[Chunk]:
        """Divide the clients `chosen` into chunks of the same submodel, and yield the chunks.

        A client's data are loaded only when its chunk is yielded. `reference` is for the limits of
        updates. If `whole`, the results of chunks have single updates.
        """
        kinds: dict[str, dict[int, int]] = {}
        for client, spec in chosen:
            kinds.setdefault(spec, {})[client] = len(self.parts[client])
        noise = self.noise()
        for spec, samples in kinds.items():
            submodel = self.federation.submodel(spec)
            for clients in shared_out(samples, submodel, self.config.training):
                own = [self.client(number, spec) for number in clients]
                yield Chunk(spec, own, reference, whole, noise)

    def client(self, number: int, spec: str) -> Client:
        """The client `number` in its state before the round, in which it trains `spec`."""
        folder, limited = self.folder, self.attendance.batches if self.attendance else None
        table, known = self.config.simulation.hostile, None
        if table is not None and number in self.hostile:
            others = known_to(number, self.hostile, table)
            known = [Known(other, self.client_data(other)) for other in others]
        return Client(
            number,
            self.client_data(number),
            folder.personal(number),
            folder.own_model(number),
            None if limited is None else limited(number, spec),
            known,
        )

    def client_data(self, client: int) -> LocalData:
        """The samples of `client`."""
        rows = self.parts[client]
        return LocalData(self.samples.samples(rows), self.samples.labels(rows))


def limited_clients(limited: Mapping[int, Limited]) -> dict[str, Limited]:
    """What the limits changed in an update, by the client's number as text."""
    return {str(client): limited[client] for client in sorted(limited)}


class _Round(TrainedChunk):
    """The sums of a round's chunks so far, and the evaluations of clients that train alone."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        super().__init__()
        self.simulation, self.number = simulation, number
        federation = simulation.federation
        self.aggregation = new_aggregation(federation.model, federation.policy)
        self.alone: list[Evaluation] = []
        self.staleness: list[int] = []
        self.noise = simulation.noise()
        self.within: float | None = None
        self.limits: ClientLimits | None = None
        if federation.policy.bounds and simulation.config.simulation.baseline is None:
            self.limits = ClientLimits(simulation.folder.reference())

    def train(
        self, engine: Engine, version: int, newest: bytes, clients: Sequence[tuple[int, str]]
    ) -> None:
        """Let `engine` train `clients` from the model of round `version`, and add their updates.

        `newest` is the model of the round before this one.
        """
        simulation, staleness = self.simulation, self.number - 1 - version
        reference = None if self.limits is None else self.limits.reference
        federation, chunks = simulation.federation, simulation.chunks(clients, reference)
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
            if chunk.is_limited or self.limits is None:
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
        """How the round's clients judge the newest model; None if not asked.

        Clients that received an earlier model are not counted.
        """
        kinds = self.simulation.kinds
        counts = [
            DeviceCounts(kinds[client], evaluation.before, evaluation.after)
            for client, evaluation in sorted(self.evaluations.items())
        ]
        return federated_evaluation(self.number, counts)

    def evaluated(self) -> Evaluation:
        """Make the next global model and evaluate it. Without updates, the model does not change.

        If clients train alone, returns the mean of their evaluations.
        """
        federation = self.simulation.federation
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
        return federation.evaluation(*self.simulation.held_out)

    def take_noised(self, noise: RoundNoise) -> None:
        """Use the noised sum of the clipped changes, of which there may be none."""
        assert isinstance(self.aggregation, Aggregation)  # the file refuses other rules
        simulation = self.simulation
        # The last number separates these draws from all others.
        draw = np.random.default_rng([simulation.config.simulation.seed, self.number, 4])
        expected = simulation.selection.expected
        simulation.federation.take_noised(
            self.aggregation, expected, self.number, noise.deviation, draw.bytes
        )
        self.within = noise.share_within(self.votes, float(gaussian((), draw.bytes)))
