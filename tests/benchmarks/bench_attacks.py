"""Attacks against defences: the accuracy after some rounds on the digits with hostile clients.

Ten clients share the digits (Dirichlet 1). Each combination of fleet, start, number of hostile
clients, attack, defence and seed is a simulation of its own in a folder of `--out`. Finished ones
are not repeated, and an interrupted one continues, so call the same command again.

    python tests/benchmarks/bench_attacks.py --quick
    python tests/benchmarks/bench_attacks.py --fleets mixed --hostile 1 2 3 --seeds 0 1 2

Without options it runs all combinations, which takes days. A cell of the table is the mean accuracy
of the last two rounds in percent, over all seeds. For a backdoor the second number is its success
in the last round. `--quick` is a mixed fleet from a cold start with two hostile clients, one seed.
"""

import argparse
import logging
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from profiles.documents.bundle_profile import this_machine
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.federation_file.hostile_table import HostileTable
from toolkit.simulation.attacks.attack_table import ATTACKS
from toolkit.simulation.chunks import ChunkTrainer
from toolkit.simulation.engines.in_process import InProcess
from toolkit.simulation.results import RoundResult, RunFolder
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulate import prepare
from toolkit.simulation.simulation_config import load_simulation
from toolkit.simulation.torch_executor import TorchExecutor

CLIENTS, LAST = 10, 2
CP = "cp:2.0,penalty=15,personal-steps=1,factor-steps=5"
FLEETS: dict[str, tuple[str, ...]] = {
    "full": ("full",),
    "low-rank": ("low-rank:0.5",),
    "slice": ("full", "slice:units.2"),
    "width": ("full", "width:0.5"),
    "cp": ("full", CP),
    "mixed": ("full", "low-rank:0.5", "slice:units.2", CP, "width:0.5"),
}
"""Submodels with the same number of clients. Others train what a family does not."""
STRENGTHS: Mapping[str, float] = {"sign-flip": 10.0, "label-flip": 20.0}
"""Strengths other than the defaults: ten times the reversed step, and 20 times the samples."""
DEFENCES: dict[str, AggregationPolicy] = {
    "mean": AggregationPolicy(bounds=False, judge=False),
    "limits": AggregationPolicy(judge=False),
    "limits + judge": AggregationPolicy(),
    "trimmed": AggregationPolicy(rule="trimmed", bounds=False, judge=False),
    "median": AggregationPolicy(rule="median", bounds=False, judge=False),
    "krum": AggregationPolicy(rule="krum", bounds=False, judge=False),
}
"""`limits + judge` is the default of a federation with held-out samples."""
NOBODY = "nobody"
QUICK: Mapping[str, object] = {
    "fleets": ["mixed"],
    "starts": ["cold"],
    "hostile": [2],
    "seeds": [0],
    "rounds": 8,
    "attacks": [
        *(NOBODY, "sign-flip", "scale", "noise", "samples", "label-flip", "little-is-enough"),
        *("backdoor", "statistics", "single-tensor"),
    ],
}
"""The options of `--quick`, unless they are given."""


class Case(NamedTuple):
    """One simulation. `hostile` clients attack; `start` is "cold" or "warm"."""

    fleet: str
    start: str
    hostile: int
    attack: str
    defence: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "-".join(map(str, self)).replace(" + ", "+")


class Bench:
    """Runs the cases in the folder `out`, of `rounds` rounds of `epochs` epochs each."""

    def __init__(self, out: Path, rounds: int, epochs: int) -> None:
        self.out, self.rounds, self.epochs = out, rounds, epochs
        self._prepared: dict[tuple[str, int], Simulation] = {}
        self._executors: dict[tuple[str, int], dict[str, TorchExecutor]] = {}
        self._first: dict[tuple[str, int], bytes] = {}

    def history(self, case: Case) -> list[RoundResult]:
        """Run a case, unless its folder has all rounds."""
        folder = RunFolder(self.out / case.name)
        base = self._simulation(case.fleet, case.seed)
        table = None
        if case.hostile:
            about = {"attack": case.attack, "count": case.hostile}
            strength = STRENGTHS.get(case.attack)
            table = HostileTable.model_validate({**about, "strength": strength})
        simulation = base.config.simulation.model_copy(update={"hostile": table})
        policy = DEFENCES[case.defence]
        config = base.config.model_copy(update={"simulation": simulation, "aggregation": policy})
        settings = config.model_dump(mode="json")
        folder.read(settings, force=False)
        folder.begin(settings, force=False)
        if len(folder.history) < self.rounds:
            federation = base.federation
            federation.policy = policy
            federation.load(folder.model() or self._start(case))
            federation.model = replace(federation.model, moments={})
            trainer = ChunkTrainer(config, federation, base.held_out)
            trainer.executors = self._executors[case.fleet, case.seed]
            first = base.first if policy.judge else None
            replace(base, config=config, folder=folder, first=first).run(InProcess(trainer))
        return folder.history

    def _start(self, case: Case) -> bytes:
        """The model that a case starts from: the first one, or that of rounds without attack."""
        if case.start == "cold":
            return self._first[case.fleet, case.seed]
        honest = case._replace(start="cold", hostile=0, attack=NOBODY, defence="mean")
        self.history(honest)
        folder = RunFolder(self.out / honest.name)
        settings = folder.settings()
        folder.read(settings, force=False)
        folder.begin(settings, force=False)
        return folder.model_of(self.rounds)

    def _simulation(self, fleet: str, seed: int) -> Simulation:
        """A fleet with its samples, whose submodels are traced once for all its cases."""
        key = fleet, seed
        if key not in self._prepared:
            specs = FLEETS[fleet]
            devices = "".join(
                f'[[devices]]\nname = "kind-{n}"\nsubmodel = "{spec}"\n'
                f"count = {CLIENTS // len(specs)}\n"
                for n, spec in enumerate(specs)
            )
            file = self.out / f"{fleet}.toml"
            file.write_text(
                'model = "toolkit.models:digits_cnn"\ninput_shape = [1, 8, 8]\n'
                f"rounds = {self.rounds}\n[training]\nepochs = {self.epochs}\n"
                '[simulation]\ndata = "toolkit.simulation.digits:digits"\n'
                f'partition = "dirichlet"\nalpha = 1.0\n{devices}'
            )
            config = load_simulation(file, seed)
            self._prepared[key] = prepare(config, RunFolder(self.out / "none"))
            self._first[key] = self._prepared[key].federation.save()
            self._executors[key] = {}
        return self._prepared[key]


def cases(chosen: argparse.Namespace) -> Iterator[Case]:
    """All cases, in an order in which tables are filled one after another."""
    for fleet, start, hostile, attack in product(
        chosen.fleets, chosen.starts, chosen.hostile, chosen.attacks
    ):
        for defence, seed in product(chosen.defences, chosen.seeds):
            count = 0 if attack == NOBODY else hostile
            yield Case(fleet, start, count, attack, defence, seed)


def cell(runs: list[list[RoundResult]]) -> str:
    """The accuracy over the last rounds of all seeds; and the success of a backdoor."""
    known = [result.accuracy or 0.0 for run in runs for result in run[-LAST:]]
    text = f"{100 * statistics.fmean(known):.1f}"
    success = [run[-1].backdoor for run in runs if run[-1].backdoor is not None]
    return f"{text} / {100 * statistics.fmean(success):.0f}" if success else text


def show(results: Mapping[Case, list[RoundResult]], chosen: argparse.Namespace) -> None:
    """Print a Markdown table for each fleet, start and number of hostile clients."""
    rows: dict[tuple[str, str, int], dict[str, dict[str, list[list[RoundResult]]]]] = {}
    for case, history in results.items():
        # Rounds without attack are a row of every table.
        for hostile in [case.hostile] if case.hostile else chosen.hostile:
            table = rows.setdefault((case.fleet, case.start, hostile), {})
            own = table.setdefault(case.attack, {})
            own.setdefault(case.defence, []).append(history)
    for (fleet, start, hostile), table in rows.items():
        print(f"\n{fleet}, {start} start, {hostile} of {CLIENTS} hostile\n")
        print("| attack | " + " | ".join(chosen.defences) + " |")
        print("|---" * (1 + len(chosen.defences)) + "|")
        for attack, by_defence in table.items():
            cells = [cell(by_defence[name]) for name in chosen.defences]
            print(f"| {attack} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a mixed fleet, minutes")
    parser.add_argument("--out", type=Path, default=Path(".bench-attacks"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=[*FLEETS])
    parser.add_argument("--starts", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--hostile", nargs="+", type=int, default=[1, 2, 3])
    every = [NOBODY, *ATTACKS]
    parser.add_argument("--attacks", nargs="+", choices=every, default=every)
    parser.add_argument("--defences", nargs="+", choices=DEFENCES, default=[*DEFENCES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    chosen.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(chosen.out, chosen.rounds, chosen.epochs)
    results = {}
    for case in dict.fromkeys(cases(chosen)):
        results[case] = bench.history(case)
        print(f"{case.name}: {cell([results[case]])}", file=sys.stderr, flush=True)
    show(results, chosen)
    machine = this_machine(f"torch {torch.__version__}")
    print(
        f"\n{chosen.rounds} rounds of {chosen.epochs} epochs, seeds {chosen.seeds}; "
        f"{machine.processor}, Python {machine.python}, {machine.runtime}"
    )


if __name__ == "__main__":
    main()
