"""Differential privacy for devices on the digits: accuracy by epsilon and seed, as table and plot.

300 clients share the 1,437 digits evenly, and 100 of them train in a round on average. Each epsilon
and seed is a simulation of its own in a folder of `--out`. Finished ones are not repeated, and an
interrupted one continues. A figure is the mean accuracy of the last LAST rounds.
Run `make bench-privacy`.
"""

import argparse
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure

from profiles.documents.bundle_profile import this_machine
from toolkit.simulation.curves import BLUE, in_percent
from toolkit.simulation.simulate import simulate

LAST = 5
EPSILONS = (1.0, 3.0, 8.0, None)
CONFIG = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 40
clients_per_round = 100

[training]
batch_size = 8
epochs = 2
learning_rate = 0.05
batch_norm = "static"

[simulation]
data = "toolkit.simulation.digits:digits"
partition = "iid"

{privacy}
[[devices]]
name = "device"
submodel = "full"
count = 300
"""
PRIVATE = """
[privacy]
clip = 0.5
delta = 1e-3
epsilon = {epsilon}
"""
OPEN = """
[aggregation]
weights = "uniform"
bounds = false
judge = false
"""


def accuracy(epsilon: float | None, seed: int, out: Path) -> float:
    """The accuracy of one simulation."""
    name = "none" if epsilon is None else f"{epsilon:g}"
    privacy = OPEN if epsilon is None else PRIVATE.format(epsilon=epsilon)
    file = out / f"epsilon-{name}.toml"
    file.write_text(CONFIG.format(privacy=privacy))
    results = simulate(file, out / f"epsilon-{name}-{seed}", seed=seed)
    return statistics.mean(result.accuracy or 0.0 for result in results[-LAST:])


def draw(found: dict[float | None, list[float]], path: Path) -> None:
    """Draw each seed as a point, and the means as a line; without noise, a dashed line."""
    figure = Figure(figsize=(6, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    private = {epsilon: own for epsilon, own in found.items() if epsilon is not None}
    axes.plot(list(private), [statistics.mean(own) for own in private.values()], color=BLUE)
    for epsilon, own in private.items():
        axes.plot([epsilon] * len(own), own, "o", color=BLUE)
    axes.axhline(statistics.mean(found[None]), color="grey", linestyle="--", label="no privacy")
    axes.set_xscale("log")
    axes.set_xticks(list(private), [f"{epsilon:g}" for epsilon in private])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("epsilon of all rounds together")
    axes.set_ylabel("accuracy on held-out digits")
    axes.set_ylim(0, 1)
    in_percent(axes)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(".privacy"))
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    machine = this_machine(f"torch {torch.__version__}")
    print(f"{machine.processor}, Python {machine.python}, {machine.runtime}")
    print(f"| epsilon | {' | '.join(f'seed {seed}' for seed in options.seeds)} |")
    print(f"|---|{'---|' * len(options.seeds)}")
    found: dict[float | None, list[float]] = {}
    for epsilon in EPSILONS:
        found[epsilon] = [accuracy(epsilon, seed, options.out) for seed in options.seeds]
        cells = " | ".join(f"{100 * own:.1f}" for own in found[epsilon])
        print(f"| {'none' if epsilon is None else f'{epsilon:g}'} | {cells} |", flush=True)
    draw(found, options.out / "privacy.png")


if __name__ == "__main__":
    main()
