"""Simulated time and failures, against the coordinator's rounds and against counted batches."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bundles import write_noise
from made_calibration import CALIBRATION, DEVICE
from models_for_tests import CLASSES, INPUT_SHAPE
from parameters import long_one
from profiles.cost_model.memory_rule import UNCALIBRATED
from profiles.cost_model.prediction import TimeModel, predict_memory
from refusals import refused
from simulated_runs import without_times
from toolkit.coordinator.rounds.round_state import Rounds, fewest_updates
from toolkit.planning.submodel_workloads import Known, Workloads
from toolkit.simulation.attendance import Attendance, taken
from toolkit.simulation.results import read_run
from toolkit.simulation.simulate import simulate
from toolkit.simulation.simulated_time import simulated_device
from toolkit.simulation.simulation_config import load_simulation
from toolkit.simulation.torch_executor import TorchExecutor, TorchSession
from toolkit.submodels.model_loading import load_global

SLICE = "slice:classifier"
DOWN, UP, SLOWDOWN = 3.0, 0.5, 700.0
BUDGET_S = 1.2
"""Slow clients record in up to 0.7 s, and train a batch in 0.17 s."""


def kind(name: str, submodel: str, count: int, more: str = "") -> str:
    return (
        f'[[devices]]\nname = "{name}"\nsubmodel = "{submodel}"\ncount = {count}\n'
        f'profile = "device.json"\ndownload_mbps = {DOWN}\nupload_mbps = {UP}\n{more}\n'
    )


@pytest.fixture
def file(seed: int, tmp_path: Path) -> Path:
    write_noise(tmp_path / "data.npz", 90, seed, INPUT_SHAPE, CLASSES)
    (tmp_path / "device.json").write_bytes(msgspec.json.encode(DEVICE))
    return tmp_path / "fleet.toml"


def written(
    file: Path, top: str = "", table: str = "", training: str = "", devices: str | None = None
) -> Path:
    file.write_text(
        f"""
        model = "models_for_tests:relu_cnn"
        input_shape = {list(INPUT_SHAPE)}
        rounds = 2
        {top}
        [training]
        batch_size = 8
        {training}
        [simulation]
        data = "data.npz"
        {table}
        """
        + (devices or kind("fast", "full", 2) + kind("slow", SLICE, 2, f"slowdown = {SLOWDOWN}"))
    )
    return file


def test_a_round_closes_as_the_coordinators_does(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(300):
        times = sorted(draw.exponential(1, size=int(draw.integers(7))).tolist())
        failed = int(draw.integers(1 if times else 2, 4)) if draw.random() < 0.5 else not times
        quorum = int(draw.integers(1, 9)) if draw.random() < 0.5 else None
        deadline = float(draw.exponential(1))
        rounds = Rounds(1, len(times) + failed, deadline, quorum=quorum)
        for number in range(len(times) + failed):
            rounds.enrol(str(number))
        offers = {str(number): "bundle" for number in range(len(times) + failed)}
        rounds.open(offers, now=0.0)
        deadlines = [deadline]
        while deadlines[-1] < max(times, default=0):
            deadlines.append(deadlines[-1] + deadline)
        events = sorted(
            [*enumerate(times), *((None, one) for one in deadlines)], key=lambda event: event[1]
        )
        closed = None
        for device, now in events:
            if device is not None:
                rounds.take(str(device), 1, "bundle", "update")
            # Clients that failed never answer: nothing more can come.
            if rounds.due(now) or (device is None and len(rounds.updates) == len(times)):
                closed = now
                break
            if rounds.failed(now):
                came_in_time = list(rounds.updates)
                rounds.reopen()
                rounds.open(offers, now)
                for one in came_in_time:
                    rounds.take(one, 1, "bundle", "update")
        fewest = fewest_updates(len(offers), len(offers), None, quorum)
        came = taken(times, int(failed), deadline, quorum, fewest)
        assert came == (len(rounds.updates), closed), (times, failed, quorum, deadline)


@pytest.mark.parametrize(
    ("training", "top"),
    [("epochs = 2", ""), long_one(("steps = 5", "")), ("epochs = 3", f"budget_s = {BUDGET_S}")],
    ids=["epochs", "steps", "budget"],
)
def test_time_is_that_of_the_batches_and_bytes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: str, top: str
) -> None:
    """The runs of each graph are counted while clients train, and their bytes are measured."""
    table = 'partition = "dirichlet"\nalpha = 1\nvalidation = 0.25'
    written(file, top, table=table, training=training)
    names: dict[int, str] = {}
    runs: Counter[str] = Counter()
    clients: list[tuple[str, Counter[str], int, int]] = []
    make, run, train = TorchExecutor.session, TorchSession.run, TorchExecutor.train

    def session(self: TorchExecutor, name: str) -> TorchSession:
        found = make(self, name)
        names[id(found)] = name
        return found

    def counted(self: TorchSession, *arguments: Any) -> Any:
        runs[names[id(self)]] += 1
        return run(self, *arguments)

    def training_of(self: TorchExecutor, bundle: Any, *arguments: Any) -> Any:
        runs.clear()
        update = train(self, bundle, *arguments)
        down = sum(array.nbytes for array in bundle.values.values())
        up = sum(array.nbytes for array in update.tensors.values())
        clients.append((str(self.submodel.spec), Counter(runs), down, up))
        return update

    monkeypatch.setattr(TorchExecutor, "session", session)
    monkeypatch.setattr(TorchSession, "run", counted)
    monkeypatch.setattr(TorchExecutor, "train", training_of)
    history = simulate(file, tmp_path / "out")
    config = load_simulation(file)
    module, _ = load_global(config.model, None, config.seed)
    source = Workloads(module, INPUT_SHAPE, config.training)
    model = TimeModel(CALIBRATION)

    def each_batch(spec: str) -> dict[str, float]:
        known = source.of(spec)
        assert isinstance(known, Known)
        slowdown = SLOWDOWN if spec == SLICE else 1.0
        graphs = [*known.work.recording, *known.work.training]
        return {one.name: slowdown * model.batch([one]).value for one in graphs}

    def computed(spec: str, runs: Counter[str]) -> float:
        return sum(seconds * runs[name] for name, seconds in each_batch(spec).items())

    def seconds(spec: str, runs: Counter[str], down: int, up: int) -> float:
        return 8 * down / (DOWN * 1e6) + 8 * up / (UP * 1e6) + computed(spec, runs)

    needs = [
        predict_memory(model.fastest(known.work), UNCALIBRATED).upper
        for known in map(source.of, ("full", SLICE))
        if isinstance(known, Known)
    ]
    assert len(set(needs)) == 2
    for number, result in enumerate(history):
        assert result.memory == round(max(needs))
        times = [seconds(*one) for one in clients[4 * number : 4 * number + 4]]
        assert min(times) > 0
        assert result.simulated_s == pytest.approx(max(times), rel=1e-9)
        assert (result.late, result.failed, result.took_part) == (0, 0, 4)
    if not top:
        return
    limited = 0
    for spec, runs, _, _ in clients:
        before = runs - Counter(train=1)
        if computed(spec, runs) >= BUDGET_S:
            assert computed(spec, before) < BUDGET_S or runs["train"] == 1
            limited += 1
        assert spec == SLICE or runs["train"] % 3 == 0  # three whole epochs
    assert limited


def test_updates_of_clients_with_little_time_weigh_less(
    seed: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow clients train one batch, and count like the samples of this batch."""
    counted: list[tuple[int, int]] = []
    train = TorchExecutor.train

    def training_of(self: TorchExecutor, *arguments: Any) -> Any:
        update = train(self, *arguments)
        counted.append((update.record.samples, update.record.steps))
        return update

    monkeypatch.setattr(TorchExecutor, "train", training_of)
    devices = kind("fast", "full", 2) + kind("slow", "full", 2, f"slowdown = {SLOWDOWN}")
    simulate(written(file, "budget_s = 0.1", devices=devices), tmp_path / "out")
    # A batch takes 0.5 ms, or 0.35 s. The clients have 18 samples each: batches of 8, 8 and 2.
    assert counted[:4] == [(18, 3), (18, 3), (8, 1), (8, 1)]


def test_late_clients_only_receive(file: Path, tmp_path: Path) -> None:
    """A quorum of two is that of the two fast clients."""
    everyone = simulate(written(file), tmp_path / "all")
    for one, whole in zip(
        simulate(written(file, "quorum = 2"), tmp_path / "late"), everyone, strict=True
    ):
        assert (one.clients, one.late, one.failed) == (2, 2, 0)
        assert one.bytes_down == whole.bytes_down
        assert one.bytes_up < whole.bytes_up
        assert one.simulated_s < whole.simulated_s
    # Equal clients: who of them makes the quorum changes from round to round.
    equal = Attendance(
        clients=9, seed=0, failure_rate=0.0, deadline_s=60.0, quorum=3, seconds=lambda *_: 1.0
    )
    chosen = [(client, "full") for client in range(9)]
    firsts = [[client for client, _ in equal.turnout(r, chosen).present] for r in range(1, 40)]
    assert all(len(one) == 3 for one in firsts)
    assert {client for one in firsts for client in one} == set(range(9))


def test_a_simulation_continues_with_the_same_times(file: Path, tmp_path: Path) -> None:
    """With clients that fail and clients that are late."""
    table = "failure_rate = 0.3\nparticipation = 0.75"
    devices = kind("fast", "full", 2) + kind("slow", "full", 2, "slowdown = 3.0")
    whole = simulate(written(file, "quorum = 2", table, devices=devices), tmp_path / "whole")
    text = file.read_text()
    file.write_text(text.replace("rounds = 2", "rounds = 1"))
    simulate(file, tmp_path / "parts")
    file.write_text(text)
    parts = simulate(file, tmp_path / "parts")
    assert without_times(parts) == without_times(whole)
    for name in ("global.safetensors", "config.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_failures_depend_on_seed_round_and_client_alone(seed: int) -> None:
    rate, clients, rounds = 0.3, 60, 50
    draw = np.random.default_rng(seed)
    few = Attendance(
        clients=clients, seed=seed, failure_rate=rate, deadline_s=60.0, quorum=None, seconds=None
    )
    everyone = [(client, "full") for client in range(clients)]
    count = 0
    for round_ in range(1, rounds + 1):
        failed = {client for client, _ in few.turnout(round_, everyone).failed}
        chosen = [everyone[place] for place in draw.permutation(clients)[:20]]
        part = few.turnout(round_, chosen)
        assert {client for client, _ in part.failed} == failed & {client for client, _ in chosen}
        assert sorted([*part.failed, *part.present]) == sorted(chosen)
        assert part.simulated_s is None
        count += len(failed)
    # Five standard deviations of the binomial distribution.
    spread = (rate * (1 - rate) * clients * rounds) ** 0.5
    assert abs(count - rate * clients * rounds) < 5 * spread


def test_a_round_of_failures_leaves_the_model(file: Path, tmp_path: Path) -> None:
    devices = '[[devices]]\nname = "one"\nsubmodel = "full"\ncount = 2\n'
    whole = simulate(written(file, devices=devices), tmp_path / "whole")
    table = "failure_rate = 0.999999"
    history = simulate(written(file, table=table, devices=devices), tmp_path / "none")
    for one in history:
        assert (one.clients, one.failed, one.bytes_up, one.simulated_s) == (0, 2, 0, None)
        assert one.bytes_down == whole[0].bytes_down
    first, second = ((one.accuracy, one.loss) for one in history)
    assert first == second != (whole[-1].accuracy, whole[-1].loss)
    assert read_run(tmp_path / "none")[1] == history
    waiting = simulate(written(file, "deadline_s = 90", table), tmp_path / "waiting")
    assert [one.simulated_s for one in waiting] == [90.0, 90.0]


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [
        ("slowdown", "profiles", "config.unknown-key", "slowdown"),
        ("slowdown = 700.0", "slowdown = 0", "config.bad-value", "greater than 0"),
        ('profile = "device.json"', "", "config.bad-value", "set `profile`, too"),
        ("download_mbps = 3.0\n", "", "simulation.no-network-speed", "`download_mbps`"),
        ("upload_mbps = 0.5\n", "", "simulation.no-network-speed", "`upload_mbps`"),
        ('"device.json"', '"raspberry-pi-4-4gb"', "simulation.no-calibration", "calibrate --out"),
        ('"device.json"', '"rasberry-pi-4-4gb"', "profile.unknown-device", "raspberry-pi-4-4gb"),
    ],
)
def test_mistakes_in_profiles(file: Path, before: str, after: str, code: str, words: str) -> None:
    written(file)
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    with refused(code, words):
        load_simulation(file)


def test_all_kinds_have_a_profile_or_none(file: Path) -> None:
    more = '[[devices]]\nname = "one"\nsubmodel = "full"\n'
    with refused("config.bad-value", 'the kind "one" has no `profile`'):
        load_simulation(written(file, devices=kind("fast", "full", 1) + more))


def test_a_profile_may_state_the_network(file: Path) -> None:
    networked = msgspec.structs.replace(DEVICE, down_bits_per_s=8000, up_bits_per_s=4000)
    (file.parent / "device.json").write_bytes(msgspec.json.encode(networked))
    written(file)
    first, second = map(simulated_device, load_simulation(file).devices)
    assert (first.down_bits_per_s, first.up_bits_per_s) == (DOWN * 1e6, UP * 1e6)
    assert (first.slowdown, second.slowdown) == (1.0, SLOWDOWN)
    text = file.read_text().replace(f"download_mbps = {DOWN}\n", "")
    file.write_text(text.replace(f"upload_mbps = {UP}\n", ""))
    for device in map(simulated_device, load_simulation(file).devices):
        assert (device.down_bits_per_s, device.up_bits_per_s) == (8000, 4000)
