"""Attacks against defences: the accuracy after some rounds on the digits with hostile clients.

Ten clients share the digits (Dirichlet 1). Each combination of fleet, start, number of hostile
clients, attack, defence and seed is a simulation of its own in a folder of `--out`. Finished ones
are not repeated, and an interrupted one continues, so call the same command again.

    python tests/benchmarks/bench_attacks.py --quick
    python tests/benchmarks/bench_attacks.py --fleets mixed --hostile 1 2 3 --seeds 0 1 2
    python tests/benchmarks/bench_attacks.py --quick --share 0.2 --defences "limits + committee"

Without options it runs all combinations, which takes days. A cell of the table is the mean accuracy
of the last quarter of the rounds in percent, over all seeds. For a backdoor the second number is
its success in the last round. In brackets are the honest updates that were left out, and the honest
clients that the judge has paused, over all seeds. The row `left-out` is the best that a
defence can do: the clients that would be hostile never take part. `--quick` is a mixed fleet from a
cold start with two hostile clients, one seed.
"""

import argparse
import logging
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from profiles.documents.bundle_profile import this_machine
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.federation_file.hostile_table import HostileTable
from toolkit.coordinator.federation_file.small_tables import EvaluationTable
from toolkit.simulation.attacks.attack_table import ATTACKS
from toolkit.simulation.attacks.hostile_clients import hostile_clients
from toolkit.simulation.chunks import ChunkTrainer
from toolkit.simulation.engines.in_process import InProcess
from toolkit.simulation.results import RoundResult, RunFolder
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulate import prepare
from toolkit.simulation.simulation_config import load_simulation
from toolkit.simulation.torch_executor import TorchExecutor

CLIENTS = 10
CP = "cp:2.0,penalty=15,personal-steps=1,factor-steps=5"
FLEETS: dict[str, tuple[str, ...]] = {
    "full": ("full",),
    "low-rank": ("low-rank:0.5",),
    "slice": ("full", "slice:units.2"),
    "width": ("full", "width:0.5"),
    "cp": ("full", CP),
    "mixed": ("full", "low-rank:0.5", "slice:units.2", CP, "width:0.5"),
    "rare": (*("full",) * 3, *("low-rank:0.5",) * 3, *("slice:units.2",) * 2, CP, "width:0.5"),
}
"""Submodels, each with the same number of clients. Others train what a family does not. `rare` has
two kinds of one client."""
STRENGTHS: Mapping[str, float] = {"sign-flip": 10.0, "label-flip": 20.0}
"""Strengths other than the defaults: ten times the reversed step, and 20 times the samples."""
COMMITTEE = "limits + committee"
DEFENCES: dict[str, AggregationPolicy] = {
    "mean": AggregationPolicy(bounds=False, judge=False),
    "limits": AggregationPolicy(judge=False),
    "limits + judge": AggregationPolicy(),
    COMMITTEE: AggregationPolicy(judge=False),
    "trimmed": AggregationPolicy(rule="trimmed", bounds=False, judge=False),
    "median": AggregationPolicy(rule="median", bounds=False, judge=False),
    "krum": AggregationPolicy(rule="krum", bounds=False, judge=False),
    "fltrust": AggregationPolicy(rule="fltrust", bounds=False, judge=False),
    "fltrust + judge": AggregationPolicy(rule="fltrust"),
}
"""`limits + judge` is the default of a federation with held-out samples. The committee is for one
without such samples; all clients are its members, and the hostile ones vote against the others."""
NOBODY, LEFT_OUT = "nobody", "left-out"
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
    """One simulation. `hostile` clients attack; `start` is "cold" or "warm".

    `data` is the alpha of Dirichlet, or "iid".
    """

    fleet: str
    start: str
    hostile: int
    attack: str
    defence: str
    seed: int
    data: str = "1.0"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "-".join(map(str, self)).replace(" + ", "+")


class Bench:
    """Runs the cases in the folder `out`, of `rounds` rounds of `epochs` epochs each.

    Each client keeps the `share` of its samples apart.
    """

    def __init__(self, out: Path, rounds: int, epochs: int, share: float) -> None:
        self.out, self.rounds, self.epochs = out, rounds, epochs
        self.share = share
        self._prepared: dict[tuple[str, str, int], Simulation] = {}
        self._executors: dict[tuple[str, str, int], dict[str, TorchExecutor]] = {}
        self._first: dict[tuple[str, str, int], bytes] = {}

    def history(self, case: Case) -> list[RoundResult]:
        """Run a case, unless its folder has all rounds."""
        folder = RunFolder(self.out / case.name)
        base = self._simulation(case)
        table = hostile_table(case)
        keys = base.config.simulation.model_copy(update={"hostile": table})
        policy = DEFENCES[case.defence]
        members = CLIENTS if case.defence == COMMITTEE else None
        evaluation = EvaluationTable(share=self.share, committee=members)
        config = base.config.model_copy(
            update={"simulation": keys, "aggregation": policy, "evaluation": evaluation}
        )
        settings = config.model_dump(mode="json")
        folder.read(settings, force=False)
        folder.begin(settings, force=False)
        if len(folder.history) < self.rounds:
            federation = base.federation
            federation.policy = policy
            federation.load(folder.model() or self._start(case))
            federation.model = replace(federation.model, moments={})
            trainer = ChunkTrainer(config, federation, base.held_out)
            trainer.executors = self._executors[case.fleet, case.data, case.seed]
            simulation = replace(base, config=config, folder=folder, judged=policy.judge)
            if case.attack == LEFT_OUT:
                others = sorted({*range(CLIENTS)} - would_be_hostile(case))
                simulation.selection.candidates = lambda _: others
            simulation.run(InProcess(trainer))
        return folder.history

    def _start(self, case: Case) -> bytes:
        """The model that a case starts from: the first one, or that of rounds without attack."""
        if case.start == "cold":
            return self._first[case.fleet, case.data, case.seed]
        honest = case._replace(start="cold", hostile=0, attack=NOBODY, defence="mean")
        self.history(honest)
        folder = RunFolder(self.out / honest.name)
        settings = folder.settings()
        folder.read(settings, force=False)
        folder.begin(settings, force=False)
        return folder.model_of(self.rounds)

    def _simulation(self, case: Case) -> Simulation:
        """A fleet with its samples, whose submodels are traced once for all its cases."""
        key = case.fleet, case.data, case.seed
        if key not in self._prepared:
            specs = FLEETS[case.fleet]
            devices = "".join(
                f'[[devices]]\nname = "kind-{n}"\nsubmodel = "{spec}"\n'
                f"count = {CLIENTS // len(specs)}\n"
                for n, spec in enumerate(specs)
            )
            even = case.data == "iid"
            partition = '"iid"' if even else f'"dirichlet"\nalpha = {case.data}'
            file = self.out / f"{case.fleet}-{case.data}.toml"
            file.write_text(
                'model = "toolkit.models:digits_cnn"\ninput_shape = [1, 8, 8]\n'
                f"rounds = {self.rounds}\n[training]\nepochs = {self.epochs}\n"
                '[simulation]\ndata = "toolkit.simulation.digits:digits"\n'
                f"partition = {partition}\n{devices}"
            )
            config = load_simulation(file, case.seed)
            self._prepared[key] = prepare(config, RunFolder(self.out / "none"))
            self._first[key] = self._prepared[key].federation.save()
            self._executors[key] = {}
        return self._prepared[key]


def hostile_table(case: Case) -> HostileTable | None:
    """The table of the hostile clients of `case`; None if there are none."""
    if not case.hostile or case.attack == LEFT_OUT:
        return None
    about = {"attack": case.attack, "count": case.hostile, "strength": STRENGTHS.get(case.attack)}
    return HostileTable.model_validate(about)


def would_be_hostile(case: Case) -> frozenset[int]:
    """The clients that an attack with as many hostile clients would have."""
    return hostile_clients(HostileTable(attack="scale", count=case.hostile), CLIENTS, case.seed)


def cases(chosen: argparse.Namespace) -> Iterator[Case]:
    """All cases, in an order in which tables are filled one after another."""
    for fleet, data, start, hostile, attack in product(
        chosen.fleets, chosen.data, chosen.starts, chosen.hostile, chosen.attacks
    ):
        for defence, seed in product(chosen.defences, chosen.seeds):
            count = 0 if attack == NOBODY else hostile
            yield Case(fleet, start, count, attack, defence, seed, data)


def cell(runs: Mapping[Case, list[RoundResult]]) -> str:
    """The accuracy over the last rounds of all seeds; and what else the introduction lists."""
    known = [result.accuracy or 0.0 for run in runs.values() for result in last_quarter(run)]
    text = f"{100 * statistics.fmean(known):.1f}"
    success = [run[-1].backdoor for run in runs.values() if run[-1].backdoor is not None]
    if success:
        text += f" / {100 * statistics.fmean(success):.0f}"
    out = sum(len(honest(case, r.left_out)) for case, run in runs.items() for r in run)
    paused = sum(len(honest(case, r.paused)) for case, run in runs.items() for r in run)
    return f"{text} ({out}, {paused})" if out else text


def last_quarter(run: list[RoundResult]) -> list[RoundResult]:
    """The rounds whose mean is shown. The accuracy of a single round varies by some points."""
    return run[-max(1, len(run) // 4) :]


def honest(case: Case, clients: Iterable[str | int] | None) -> set[int]:
    """Those of `clients` that are not hostile."""
    return {*map(int, clients or ())} - hostile_clients(hostile_table(case), CLIENTS, case.seed)


def show(results: Mapping[Case, list[RoundResult]], chosen: argparse.Namespace) -> None:
    """Print a Markdown table for each fleet, start and number of hostile clients."""
    rows: dict[tuple[str, str, str, int], dict[str, dict[str, dict[Case, list[RoundResult]]]]] = {}
    for case, history in results.items():
        # Rounds without attack are a row of every table.
        for hostile in [case.hostile] if case.hostile else chosen.hostile:
            table = rows.setdefault((case.fleet, case.data, case.start, hostile), {})
            own = table.setdefault(case.attack, {})
            own.setdefault(case.defence, {})[case] = history
    for (fleet, data, start, hostile), table in rows.items():
        divided = "IID" if data == "iid" else f"Dirichlet {data}"
        print(f"\n{fleet}, {divided}, {start} start, {hostile} of {CLIENTS} hostile\n")
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
    parser.add_argument("--data", nargs="+", default=["1.0"], help="alphas of Dirichlet, or iid")
    parser.add_argument("--hostile", nargs="+", type=int, default=[1, 2, 3])
    every = [NOBODY, LEFT_OUT, *ATTACKS]
    parser.add_argument("--attacks", nargs="+", choices=every, default=every)
    usual = [name for name in DEFENCES if name != COMMITTEE]
    parser.add_argument("--defences", nargs="+", choices=DEFENCES, default=usual)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    share = "share of its samples that each client keeps apart; a committee needs one"
    parser.add_argument("--share", type=float, default=0.0, help=share)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    chosen = parser.parse_args()
    if COMMITTEE in chosen.defences and not chosen.share:
        parser.error("a committee needs --share 0.2")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    chosen.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(chosen.out, chosen.rounds, chosen.epochs, chosen.share)
    results = {}
    for case in dict.fromkeys(cases(chosen)):
        results[case] = bench.history(case)
        print(f"{case.name}: {cell({case: results[case]})}", file=sys.stderr, flush=True)
    show(results, chosen)
    machine = this_machine(f"torch {torch.__version__}")
    print(
        f"\n{chosen.rounds} rounds of {chosen.epochs} epochs, seeds {chosen.seeds}; "
        f"{machine.processor}, Python {machine.python}, {machine.runtime}"
    )


if __name__ == "__main__":
    main()
