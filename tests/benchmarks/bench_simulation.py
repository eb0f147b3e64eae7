"""Processor time of a simulated round beside a plain PyTorch loop with the same clients.

20 clients share the digits evenly and all train `digits_cnn` for one epoch; each round ends with
an evaluation on the held-out digits. Both loops run in this process and take turns. The plain loop
is what one writes for a single family: it copies a module for each client and averages state dicts.

    python tests/benchmarks/bench_simulation.py [--resnet20 | --fleet]

`--resnet20` compares on that network, with 64 random images of 32 x 32 a client. `--fleet` runs 200
rounds of 100 clients of a mixed fleet, 10 of them in a round, instead.
"""

import argparse
import copy
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import oracles
from device_agent.training.batching import batches
from oracles import BiLevel, Device, Plan, Tensorized
from toolkit.models.digits_cnn import DigitsCNN, Unit
from toolkit.models.resnet20 import ResNet20
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulate import Simulation, in_process, prepare, simulate
from toolkit.simulation.simulation_config import load_simulation

ROUNDS, CLIENTS = 9, 20
RATE, MOMENTUM, DECAY, BATCH = 0.05, 0.9, 0.0005, 32
RANKS = {"units.1.conv": 8, "units.2.conv": 8, "units.3.conv": 16}
"""Ranks of `low-rank:0.25` in `digits_cnn`."""
RESNET_RANKS = {
    f"blocks.{block}.conv{number}": (4, 8, 16)[block // 3]
    for block in range(9)
    for number in (1, 2)
}
CP = BiLevel(penalty=12, personal_steps=5, factor_steps=17, factor_rate=3e-4)
PFEDME = BiLevel(penalty=15, personal_steps=5, factor_steps=1, factor_rate=0.05, adam=False)
SPECS = {
    "full": "full",
    "low-rank": f"low-rank:0.25,decay={DECAY}",
    "slice": "slice:units.2",
    "width": "width:0.5",
    "cp": "cp:2.0",
    "pfedme": "pfedme,penalty=15,personal-steps=5,local-rate=0.05",
}
RESNET_SPECS = {
    "full": "full",
    "low-rank": f"low-rank:0.25,decay={DECAY}",
    "slice": "slice:blocks.6",
}
FLEET = (
    ("full", 25),
    ("low-rank:0.25", 25),
    ("slice:units.2", 20),
    ("width:0.5", 20),
    ("cp:2.0", 10),
)
State = dict[str, Tensor]
Network = DigitsCNN | ResNet20
Train = Callable[[Network, np.ndarray, np.ndarray, int], State]


@dataclass
class PlainLoop:
    """Federated averaging as a script has it: `train` gives a client's state."""

    train: Train
    parts: list[tuple[np.ndarray, np.ndarray]]
    held_out: tuple[np.ndarray, np.ndarray]
    model: Network

    def run_round(self, round_: int) -> None:
        total = sum(len(y) for _, y in self.parts)
        mean: State = {}
        for client, (x, y) in enumerate(self.parts):
            for name, value in self.train(self.model, x, y, client * 1000 + round_).items():
                share = value.float() * (len(y) / total)
                mean[name] = mean[name] + share if name in mean else share
        self.model.load_state_dict(mean, strict=False)
        x, y = (torch.from_numpy(array) for array in self.held_out)
        with torch.no_grad():
            output = self.model.eval()(x)
        functional.cross_entropy(output, y).item()
        (output.argmax(1) == y).float().mean().item()


def visits(x: Tensor, y: np.ndarray, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    labels = torch.from_numpy(y)
    for rows in batches(len(y), BATCH, np.random.default_rng([seed, 0])):
        yield x[rows], labels[rows]


def descend(
    model: nn.Module, x: Tensor, y: np.ndarray, seed: int, penalty: Callable[[], Tensor | float]
) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    model.train()
    for samples, labels in visits(x, y, seed):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(samples), labels)
        (loss + penalty()).backward()
        optimizer.step()
        loss.item()
    return model.state_dict()


def train_full(model: Network, x: np.ndarray, y: np.ndarray, seed: int) -> State:
    return descend(copy.deepcopy(model), torch.from_numpy(x), y, seed, lambda: 0.0)


class Tail(nn.Module):
    """The layers of `model` after the first `cut` of its stages."""

    def __init__(self, model: Network, cut: int) -> None:
        super().__init__()
        self.stages = stages_of(model)[cut:]
        self.classifier = model.classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.mean(self.stages(x), (2, 3)))


def stages_of(model: Network) -> nn.Sequential:
    return model.units if isinstance(model, DigitsCNN) else model.blocks


def train_slice(model: Network, x: np.ndarray, y: np.ndarray, seed: int) -> State:
    first = "units.2" if isinstance(model, DigitsCNN) else "blocks.6"
    stages, _, cut = first.partition(".")
    with torch.no_grad():
        recorded = torch.from_numpy(x)
        model.eval()
        if isinstance(model, ResNet20):
            recorded = functional.relu(model.bn1(model.conv1(recorded)))
        recorded = stages_of(model)[: int(cut)](recorded)
    trained = descend(copy.deepcopy(Tail(model, int(cut))), recorded, y, seed, lambda: 0.0)

    def whole(name: str) -> str:
        if not name.startswith("stages."):
            return name
        _, number, rest = name.split(".", 2)
        return f"{stages}.{int(number) + int(cut)}.{rest}"

    return {**model.state_dict(), **{whole(name): value for name, value in trained.items()}}


def train_width(model: Network, x: np.ndarray, y: np.ndarray, seed: int) -> State:
    small = DigitsCNN()
    small.units = nn.Sequential(Unit(1, 8), Unit(8, 16), Unit(16, 16, 2), Unit(16, 32))
    small.classifier = nn.Linear(32, 10)
    whole = model.state_dict()
    places = {n: tuple(map(slice, v.shape)) for n, v in small.state_dict().items()}
    small.load_state_dict({name: whole[name][index] for name, index in places.items()})
    trained = descend(small, torch.from_numpy(x), y, seed, lambda: 0.0)
    new = {name: value.clone() for name, value in whole.items()}
    for name, index in places.items():
        new[name][index] = trained[name]
    return new


class FactorConv(nn.Module):
    """A 3 x 3 convolution as two, of FedHM's factors U (m * 3, r) and V (n * 3, r)."""

    def __init__(self, dense: nn.Conv2d, rank: int) -> None:
        super().__init__()
        n, m, _, _ = dense.weight.shape
        unrolled = dense.weight.detach().permute(1, 2, 0, 3).reshape(m * 3, n * 3)
        left, values, right = torch.linalg.svd(unrolled, full_matrices=False)
        root = values[:rank].sqrt()
        self.sizes = n, m
        self.stride = dense.stride[0]
        u, v = left[:, :rank] * root, right[:rank].T * root
        self.u = nn.Parameter(u.reshape(m, 3, 1, rank).permute(3, 0, 1, 2).contiguous())
        self.v = nn.Parameter(v.reshape(n, 1, 3, rank).permute(0, 3, 1, 2).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.conv2d(x, self.u, stride=(self.stride, 1), padding=(1, 0))
        return functional.conv2d(hidden, self.v, stride=(1, self.stride), padding=(0, 1))

    def product(self) -> Tensor:
        """U V^T (m * 3, n * 3)."""
        rank = self.u.shape[0]
        return self.u.reshape(rank, -1).T @ self.v.permute(1, 0, 2, 3).reshape(rank, -1)

    def recovered(self) -> Tensor:
        n, m = self.sizes
        return self.product().reshape(m, 3, n, 3).permute(2, 0, 1, 3)


def train_low_rank(ranks: Mapping[str, int]) -> Train:
    factorized: dict[int, nn.Module] = {}

    def train(model: Network, x: np.ndarray, y: np.ndarray, seed: int) -> State:
        if seed < 1000:  # the first client of a round: the server factorizes once
            factorized[0] = copy.deepcopy(model)
            for name, rank in ranks.items():
                dense = model.get_submodule(name)
                assert isinstance(dense, nn.Conv2d)
                factorized[0].set_submodule(name, FactorConv(dense, rank))
        small = copy.deepcopy(factorized[0])
        convs = {name: small.get_submodule(name) for name in ranks}
        state = descend(
            small,
            torch.from_numpy(x),
            y,
            seed,
            lambda: DECAY / 2 * sum(conv.product().square().sum() for conv in convs.values()),
        )
        state = {name: value for name, value in state.items() if name[-2:] not in (".u", ".v")}
        new = {f"{name}.weight": conv.recovered() for name, conv in convs.items()}
        return {**state, **{name: value.detach() for name, value in new.items()}}

    return train


def bilevel(settings: BiLevel, start: Mapping[str, list[Tensor]] | None) -> Train:
    """TDPFed from the factors `start`, which are averaged; pFedMe without."""
    personal: dict[int, State] = {}
    plan = Plan(BATCH, 1, RATE, MOMENTUM, 0.0)

    def train(model: Network, x: np.ndarray, y: np.ndarray, seed: int) -> State:
        client = seed // 1000
        first = start or {n: [v.detach()] for n, v in model.named_parameters()}
        statistics = {n: v for n, v in model.named_buffers() if "running" in n}
        result = oracles.train_cp(
            model,
            Tensorized(dict(first), statistics),
            Device(x, y, seed),
            plan,
            settings,
            personal.get(client),
            torch.float32,
        )
        personal[client] = result.personal
        return result.factors.composed()

    return train


def plain_train(name: str, simulation: Simulation) -> Train:
    if name == "cp":
        cut = simulation.federation.submodel(SPECS["cp"])
        values = cut.cut(simulation.federation.model)
        start: dict[str, list[Tensor]] = {}
        for entry in cut.program.tensors:
            if entry.role == "parameter":
                start.setdefault(entry.stands_for or "", []).append(values[entry.name].clone())
        return bilevel(CP, start)
    if name == "pfedme":
        return bilevel(PFEDME, None)
    if name == "low-rank":
        small = isinstance(simulation.federation.module, DigitsCNN)
        return train_low_rank(RANKS if small else RESNET_RANKS)
    return {"full": train_full, "slice": train_slice, "width": train_width}[name]


def configured(folder: Path, kinds: tuple[tuple[str, int], ...], rounds: int, share: float) -> Path:
    devices = "".join(
        f'[[devices]]\nname = "kind-{number}"\nsubmodel = "{spec}"\ncount = {count}\n'
        for number, (spec, count) in enumerate(kinds)
    )
    partition = "iid" if share == 1 else "dirichlet"
    (folder / "fleet.toml").write_text(
        f"""
        model = "toolkit.models:digits_cnn"
        input_shape = [1, 8, 8]
        rounds = {rounds}
        [simulation]
        data = "toolkit.simulation.digits:digits"
        participation = {share}
        partition = "{partition}"
        {devices}"""
    )
    return folder / "fleet.toml"


def measured(run: Callable[[int], None], round_: int) -> float:
    """Processor time of a round in seconds."""
    start = time.process_time()
    run(round_)
    return time.process_time() - start


def compare(file: Path, name: str, rounds: int) -> None:
    config, folder = load_simulation(file), RunFolder(file.parent / "out")
    simulation = prepare(config, folder)
    folder.begin({}, force=True)
    data = [simulation.client_data(client) for client in range(CLIENTS)]
    parts = [(np.array(client.x), np.array(client.y)) for client in data]
    model = copy.deepcopy(simulation.federation.module)
    plain = PlainLoop(plain_train(name, simulation), parts, simulation.held_out, model)
    engine = in_process(simulation)
    times = [
        (
            measured(lambda number: simulation.run_round(number, engine), round_),
            measured(plain.run_round, round_),
        )
        for round_ in range(1, rounds + 2)
    ]
    ours, theirs = (statistics.median(column) for column in zip(*times[1:], strict=True))
    ratio = statistics.median(a / b for a, b in times[1:])
    print(f"| {name} | {1000 * theirs:.0f} ms | {1000 * ours:.0f} ms | {ratio:.2f} |", flush=True)


def compare_digits() -> None:
    for name, spec in SPECS.items():
        with tempfile.TemporaryDirectory() as scratch:
            compare(configured(Path(scratch), ((spec, CLIENTS),), 99, 1.0), name, ROUNDS)


def compare_resnet20() -> None:
    for name, spec in RESNET_SPECS.items():
        with tempfile.TemporaryDirectory() as scratch:
            file = configured(Path(scratch), ((spec, CLIENTS),), 99, 1.0)
            write_random(file, CLIENTS * 64 + 128, (3, 32, 32), 128)
            text = file.read_text().replace("digits_cnn", "resnet20")
            file.write_text(text.replace("[1, 8, 8]", "[3, 32, 32]"))
            compare(file, name, 3)


def write_random(file: Path, samples: int, shape: tuple[int, ...], held_out: int) -> None:
    """Random images in place of the digits."""
    draw = np.random.default_rng(0)
    x = draw.random((samples, *shape), np.float32)
    np.savez(file.parent / "data.npz", x=x, y=draw.integers(10, size=samples))
    text = file.read_text().replace("toolkit.simulation.digits:digits", "data.npz")
    text = re.sub('partition = ".*"', f"held_out_share = {(held_out - 0.5) / samples}", text)
    file.write_text(text)


def run_fleet() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        file = configured(Path(scratch), FLEET, 200, 0.1)
        start, used = time.monotonic(), time.process_time()
        history = simulate(file, Path(scratch) / "out")
        print(
            f"200 rounds: {time.monotonic() - start:.0f} s, processor time "
            f"{time.process_time() - used:.0f} s, accuracy {history[-1].accuracy:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resnet20", action="store_true")
    parser.add_argument("--fleet", action="store_true")
    options = parser.parse_args()
    if options.fleet:
        run_fleet()
    else:
        print("| family | plain loop | `simulate` | ratio |\n|---|---|---|---|")
        (compare_resnet20 if options.resnet20 else compare_digits)()


if __name__ == "__main__":
    main()
