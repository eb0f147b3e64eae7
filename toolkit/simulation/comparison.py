"""Compares simulations. Runs that differ only in their seeds are one row."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from device_agent.formats.protocol.fleet import FederatedEvaluation, further_figures
from toolkit.simulation.results import LOSS_CODE, UNUSED, RoundResult, read_run

DAY_S = 86400


class Spread(NamedTuple):
    """Mean and sample standard deviation over runs; the deviation of a single run is None."""

    mean: float
    deviation: float | None


class Reached(NamedTuple):
    """The rounds, bytes and time that runs need until they first reach a score.

    Attributes:
        rounds: Rounds.
        sent: Bytes that all clients received and sent.
        simulated_s: Time on the devices; None if it is not simulated.
    """

    rounds: Spread
    sent: Spread
    simulated_s: Spread | None


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seeds.

    Attributes:
        name: The common beginning of their folders' names.
        folders: Their folders.
        histories: Their finished rounds.
        clients: Number of clients of the federation, selected or not.
    """

    name: str
    folders: Sequence[Path]
    histories: Sequence[Sequence[RoundResult]]
    clients: int

    @property
    def judged_by_loss(self) -> bool:
        """Whether the runs train a regression, which has no accuracy."""
        return any(result.accuracy is None for history in self.histories for result in history)

    def scores(self, history: Sequence[RoundResult]) -> list[float]:
        """The accuracy of each round; the loss for a regression."""
        return [result.loss if result.accuracy is None else result.accuracy for result in history]

    @property
    def final(self) -> Spread:
        """The score of the last round: mean and deviation over the runs."""
        return spread([self.scores(history)[-1] for history in self.histories])

    @property
    def best(self) -> Spread:
        """The best score of all rounds: mean and deviation over the runs.

        Rounds whose score is NaN are ignored.
        """
        choose = min if self.judged_by_loss else max
        known = [[score for score in self.scores(run) if score == score] for run in self.histories]
        return spread([choose(scores, default=math.nan) for scores in known])

    def mean_of_last(self, rounds: int) -> Spread:
        """The mean score of the last `rounds` rounds, or of all rounds if there are fewer.

        Use it instead of `final` if the scores vary much from round to round.
        """
        return spread([statistics.fmean(self.scores(run)[-rounds:]) for run in self.histories])

    def reaching(self, target: float) -> Reached | None:
        """The needs of the runs until a score is at least `target`; None if a run never reaches it.

        A regression reaches `target` when its loss is at most `target`.
        """
        quality = -target if self.judged_by_loss else target
        rounds, sent, times = [], [], []
        for run in self.histories:
            reached = next((n for n, own in enumerate(run, 1) if own.quality >= quality), None)
            if reached is None:
                return None
            rounds.append(reached)
            sent.append(sent_bytes(run)[reached - 1])
            times.append(simulated_times(run)[reached - 1])
        simulated_s = None if self.simulated_s is None else spread(times)
        return Reached(spread(rounds), spread(sent), simulated_s)

    @property
    def traffic(self) -> Spread | None:
        """The bytes that a device receives and sends in a day, if rounds follow without a pause.

        This is the mean over all devices, selected or not. None if there is no simulated time.
        """
        times = [sum(result.simulated_s or 0 for result in run) for run in self.histories]
        if self.simulated_s is None or not all(times):
            return None
        return spread(
            [
                sent_bytes(run)[-1] / self.clients * DAY_S / time
                for run, time in zip(self.histories, times, strict=True)
            ]
        )

    @property
    def memory(self) -> int | None:
        """The most memory that a client of any round needs, in bytes.

        None if a round has no such figure.
        """
        known = [result.memory for run in self.histories for result in run]
        return max((memory for memory in known if memory is not None), default=None)

    @property
    def own_models(self) -> Spread | None:
        """The accuracy of the clients' own models (`local_accuracy`) in the last round.

        None if clients held out no samples.
        """
        accuracies = [history[-1].local_accuracy for history in self.histories]
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        return spread(known) if len(known) == len(accuracies) else None

    @property
    def backdoor(self) -> Spread | None:
        """The success of a backdoor after the last round; None if a run has no such figure."""
        known = [run[-1].backdoor for run in self.histories if run[-1].backdoor is not None]
        return spread(known) if len(known) == len(self.histories) else None

    @property
    def classes(self) -> list[tuple[int, int]] | None:
        """Labels and correct predictions of each class after the last round, summed over the runs.

        Both are counted on held-out samples; None if a run has no such counts.
        """
        counts = [
            history[-1].held_out.classes
            for history in self.histories
            if history[-1].held_out is not None and history[-1].held_out.classes is not None
        ]
        if len(counts) < len(self.histories):
            return None
        return [
            (sum(labels for labels, _ in same), sum(correct for _, correct in same))
            for same in zip(*counts, strict=True)
        ]

    @property
    def further(self) -> dict[str, Spread]:
        """RMSE, MAE and metrics of the last round, if all runs have them.

        Each is the mean and the deviation over the runs.
        """
        last = [further_figures(history[-1].held_out) for history in self.histories]
        shared = (name for name in last[0] if all(name in own for own in last))
        return {name: spread([own[name] for own in last]) for name in shared}

    @property
    def devices(self) -> list[FederatedEvaluation] | None:
        """How the clients of the last round judge the received model.

        None if a run has no judgement.
        """
        judged = [own for history in self.histories if (own := history[-1].devices) is not None]
        return judged if len(judged) == len(self.histories) else None

    @property
    def sent(self) -> Spread:
        """The bytes that all clients of a run received and sent, in all rounds together."""
        return spread([sent_bytes(run)[-1] for run in self.histories])

    @property
    def seconds(self) -> Spread:
        """Time of a run on the machine that simulated it."""
        return spread([sum(result.seconds for result in run) for run in self.histories])

    @property
    def simulated_s(self) -> Spread | None:
        """Time that a run would take on the devices; None if a round has no simulated time."""
        if any(result.simulated_s is None for run in self.histories for result in run):
            return None
        return spread([sum(result.simulated_s or 0 for result in run) for run in self.histories])


def sent_bytes(history: Sequence[RoundResult]) -> list[int]:
    """The bytes that all clients received and sent from the start to the end of each round."""
    return [*accumulate(result.bytes_down + result.bytes_up for result in history)]


def simulated_times(history: Sequence[RoundResult]) -> list[float]:
    """The simulated seconds from the start to the end of each round; 0 for unknown times."""
    return [*accumulate(result.simulated_s or 0.0 for result in history)]


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation of `values`; NaN if a value is NaN."""
    if any(value != value for value in values):
        return Spread(math.nan, math.nan if len(values) > 1 else None)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation)


def compare(folders: Sequence[Path]) -> list[Row]:
    """Read runs and group the runs that differ only in their seeds, in the given order.

    A second run with the same seeds adds no sample to a group, so it gets its own row.

    Raises InputError if a folder is not of a simulation, or has no finished round.
    """
    groups: dict[tuple[str, int], list[tuple[Path, list[RoundResult], int]]] = {}
    repeats = Counter[tuple[str, object]]()
    for folder in folders:
        settings, history = read_run(folder)
        definition = _definition(settings)
        seeds = definition, (settings["seed"], settings["simulation"]["seed"])
        groups.setdefault((definition, repeats[seeds]), []).append(
            (folder, history, _clients(settings))
        )
        repeats[seeds] += 1
    return [
        Row(
            name=_name([folder for folder, *_ in runs]),
            folders=[folder for folder, *_ in runs],
            histories=[history for _, history, _ in runs],
            clients=runs[0][2],
        )
        for runs in groups.values()
    ]


def _clients(settings: dict[str, Any]) -> int:
    """The number of clients that `settings` describe."""
    clients: int | None = settings["simulation"].get("clients")
    return clients or sum(int(kind["count"]) for kind in settings["devices"])


def _definition(settings: dict[str, Any]) -> str:
    """The settings that change the result of a simulation, without the seeds, as text."""
    table = {key: value for key, value in settings["simulation"].items() if key != "seed"}
    others = {"seed", "simulation", *UNUSED}
    rest = {key: value for key, value in settings.items() if key not in others}
    # Runs of the same loss on different machines are comparable.
    rest[LOSS_CODE] = str(rest.get(LOSS_CODE, "")).partition(" ")[2]
    return json.dumps([rest, table], sort_keys=True)


def _name(folders: Sequence[Path]) -> str:
    names = [folder.resolve().name for folder in folders]
    if len(names) == 1:
        return names[0]
    common = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letter for letter, *_ in common).rstrip("-_.") or names[0]
