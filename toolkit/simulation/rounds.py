"""Runs the rounds of a simulation: chooses clients, and lets them train."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.formats.evaluation_counts import DIVERGED
from device_agent.formats.protocol.fleet import Limited, SpentPrivacy
from profiles.errors import UpdateError
from profiles.text_formatting import counted
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.limits.reference import Reference
from toolkit.aggregation.privacy.budget import PrivacyPlan, RoundNoise
from toolkit.coordinator.rounds.compared_rounds import Figure, stops_early
from toolkit.simulation.attacks.hostile_clients import (
    HostileTraining,
    Known,
    hostile_clients,
    known_to,
)
from toolkit.simulation.attendance import Attendance, Turnout
from toolkit.simulation.chunks import Chunk, Client, shared_out
from toolkit.simulation.client_selection import Choices, ClientSelection
from toolkit.simulation.engines.engine import Engine
from toolkit.simulation.judging.client_committee import ClientCommittee
from toolkit.simulation.judging.client_pauses import ClientPauses
from toolkit.simulation.one_round import OneRound
from toolkit.simulation.partition import Parts
from toolkit.simulation.results import RoundResult, RunFolder, by_client
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
        judged: Whether new models are judged.
        committee: Accepts or rejects new models; None without a committee.
        pauses: The harm for which the judge pauses clients.
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
    judged: bool = False
    selection: ClientSelection = field(init=False)
    hostile: frozenset[int] = field(init=False)
    plan: PrivacyPlan | None = field(default=None, init=False)
    committee: ClientCommittee | None = field(default=None, init=False)
    pauses: ClientPauses = field(default_factory=ClientPauses, init=False)

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
        if self.config.evaluation.committee is not None and table.baseline is None:
            self.committee = ClientCommittee(
                self.config, self.federation, self.client_data, self.hostile
            )

    def run(self, engine: Engine) -> None:
        """Run the rounds that are not finished yet."""
        done = len(self.folder.history)
        if self.timetable is not None:
            self.folder.keep_first_model(self.federation.save())
        last = self.config.last_round
        assert last is not None  # load_simulation refuses other values
        if done >= last or self._ends():
            logger.info("All %d rounds are finished already", done)
            return
        if done:
            logger.info("Continuing after round %d", done)
            for result in self.folder.history if self.judged else ():
                turnout = self.turnout(result.round)
                self.paused_after(result.round, turnout, result.left_out, result.limited)
        for round_ in range(done + 1, last + 1):
            self.run_round(round_, engine)
            if (reason := self._ends()) is not None:
                logger.info("The rounds end after round %d: %s", round_, reason)
                return

    def _ends(self) -> str | None:
        """Why the rounds end before the last one; None if another round follows."""
        if self._stops_early():
            patience = counted(self.config.early_stopping or 0, "round")
            return f"no model was better for {patience}."
        plan, probability = self.plan, self.selection.probability
        if plan is None or plan.allows_another(self._spent_before(), probability):
            return None
        return "another round would exceed the privacy budget."

    def spent(self, within: float | None) -> SpentPrivacy | None:
        """The budget spent after the next round; None without [privacy].

        See `PrivacyPlan.after`.
        """
        if self.plan is None:
            return None
        return self.plan.after(self._spent_before(), self.selection.probability, within)

    def noise(self) -> RoundNoise | None:
        """The clipping and the noise of the next round; None without [privacy]."""
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
        turnout = self.turnout(round_)
        trained = OneRound(self, round_)
        for version, clients in turnout.by_version(round_ - 1):
            trained.train(engine, version, model, clients)
        if trained.diverged and len(trained.diverged) == len(turnout.present):
            raise UpdateError(DIVERGED, code="update.diverged")
        lost = (*turnout.failed, *turnout.late, *turnout.not_needed)
        trained.bytes_down += sum(self.federation.submodel(spec).bytes for _, spec in lost)
        evaluation = trained.evaluated(model)
        if self.committee is not None:
            evaluation = trained.accepted(self.committee, dict(turnout.present), model, evaluation)
        outside = {*trained.diverged, *(trained.left_out or ())}
        limited, left_out = by_client(trained.limited_updates), by_client(trained.left_out)
        paused = self.paused_after(round_, turnout, left_out, limited) if self.judged else None
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
            hostile=self.hostile_senders(turnout),
            backdoor=self.backdoor_success(),
            limited=limited,
            left_out=left_out,
            paused=paused,
            memory=self.attendance.peak_memory(turnout) if self.attendance else None,
            **self.staleness(trained.staleness),
            privacy=self.spent(trained.within),
            bytes_down=trained.bytes_down,
            bytes_up=trained.bytes_up,
            seconds=time.monotonic() - begun,
        )
        for client in paused or ():
            logger.warning("Client %d is paused by the judge after round %d", client, round_)
        self.folder.finish_round(result, self.federation.save(), trained.reference)
        for observe in self.observers:
            observe(result)

    def turnout(self, round_: int) -> Turnout:
        """The clients of `round_`."""
        if self.timetable is not None:
            return self.timetable.turnout(round_)
        chosen = self.selection.clients(round_)
        if self.attendance is None:
            return Turnout(chosen)
        return self.attendance.turnout(round_, chosen, self.closed_before(round_))

    def paused_after(
        self,
        round_: int,
        turnout: Turnout,
        left_out: Mapping[str, str] | None,
        limited: Mapping[str, Limited] | None,
    ) -> list[int]:
        """Note a finished round, and return the clients that the judge pauses after it."""
        present = (client for client, _ in turnout.present)
        return self.pauses.after(round_, present, left_out, limited)

    def candidates(self, round_: int) -> Sequence[int]:
        """The clients that `round_` may ask."""
        before = self.folder.history[: round_ - 1]
        paused = {client for result in before for client in result.paused or ()}
        here: Sequence[int] = range(len(self.specs))
        if self.attendance is not None:
            here = self.attendance.candidates(self.closed_before(round_))
        return [client for client in here if client not in paused] if paused else here

    def closed_before(self, round_: int) -> float:
        """When the round before `round_` closed, in simulated seconds; 0 without such times."""
        return sum(result.simulated_s or 0.0 for result in self.folder.history[: round_ - 1])

    def staleness(self, values: Sequence[int]) -> dict[str, Any]:
        """Fields of the result: mean and largest staleness of updates; empty if synchronous."""
        if self.timetable is None or not values:
            return {}
        return {"mean_staleness": sum(values) / len(values), "max_staleness": max(values)}

    def hostile_senders(self, turnout: Turnout) -> list[int] | None:
        """The hostile clients of a round; None if no client of the federation is hostile."""
        if not self.hostile:
            return None
        return sorted(self.hostile.intersection(client for client, _ in turnout.present))

    def backdoor_success(self) -> float | None:
        """The share of held-out samples with the trigger that the new model labels as the target.

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
