"""Asynchronous rounds: the timetable, FedBuff on the recorded updates, and interruptions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bundles import write_noise
from made_calibration import DEVICE
from models_for_tests import CLASSES, INPUT_SHAPE
from parameters import long_one
from refusals import refused
from simulated_runs import without_times
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.recover import recover
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.simulation.attendance import Attendance
from toolkit.simulation.chunks import ChunkTrainer, TrainedChunk
from toolkit.simulation.judging.client_limits import ClientLimits
from toolkit.simulation.results import RoundResult, RunFolder
from toolkit.simulation.simulate import simulate
from toolkit.simulation.timetable import Timetable
from toolkit.submodels.global_model import GlobalModel, from_bytes

pytestmark = pytest.mark.usefixtures("given_times")
KIND = """
[[devices]]
name = "{name}"
submodel = "{submodel}"
count = 2
profile = "device.json"
download_mbps = 3
upload_mbps = 0.5
slowdown = {slowdown}
"""
FLEET = [("full", 3), ("width:0.5", 4), ("low-rank:0.5", 9)]
"""The submodel of each kind, and the seconds that a client needs."""
TOP = 'mode = "async"\nbuffer_size = 2'


@pytest.fixture
def file(seed: int, tmp_path: Path) -> Path:
    write_noise(tmp_path / "data.npz", 90, seed, INPUT_SHAPE, CLASSES)
    (tmp_path / "device.json").write_bytes(msgspec.json.encode(DEVICE))
    return tmp_path / "fleet.toml"


def written(
    file: Path,
    top: str = TOP,
    table: str = "",
    fleet: Sequence[tuple[str, float]] = FLEET,
    rounds: int = 5,
    training: str = "",
) -> Path:
    kinds = [
        KIND.format(name=f"kind-{n}", submodel=spec, slowdown=slowdown)
        for n, (spec, slowdown) in enumerate(fleet)
    ]
    file.write_text(
        f"""
        model = "models_for_tests:smooth_cnn"
        input_shape = {list(INPUT_SHAPE)}
        rounds = {rounds}
        {top}
        [training]
        batch_size = 8
        {training}
        [simulation]
        data = "data.npz"
        {table}
        """
        + "".join(kinds)
    )
    return file


def attendance(times: Sequence[float], seed: int = 0, **others: Any) -> Attendance:
    given = {"failure_rate": 0.0, "deadline_s": 1e9, "quorum": None, **others}
    return Attendance(
        clients=len(times), seed=seed, seconds=lambda client, spec: times[client], **given
    )


def test_a_timetable_by_hand() -> None:
    """Clients take 2, 3 and 7 s; two updates make a version; nobody waits for the third."""
    timetable = Timetable(attendance([2.0, 3.0, 7.0]), ["full"] * 3, concurrency=3, buffer_size=2)
    came = [timetable.turnout(round_) for round_ in range(1, 5)]
    # Rounds close at 3, 6, 8 (client 2 began at 0) and 11 s (client 1 began at 6, client 0 at 8).
    assert [sorted(one.versions.items()) for one in came] == [
        [(0, 0), (1, 0)],
        [(0, 1), (1, 1)],
        [(0, 2), (2, 0)],
        [(0, 3), (1, 2)],
    ]
    assert [one.simulated_s for one in came] == [3.0, 3.0, 2.0, 2.0]
    strict = Timetable(
        attendance([2.0, 3.0, 7.0]), ["full"] * 3, concurrency=3, buffer_size=2, max_staleness=1
    )
    third = [strict.turnout(round_) for round_ in range(1, 4)][2]
    assert (third.late, third.simulated_s) == ([(2, "full")], 3.0)
    assert third.versions == {0: 2, 1: 2}


def test_timetables_keep_their_promises(seed: int) -> None:
    """With failures, deadlines and few places, followed client by client."""
    draw = np.random.default_rng(seed)
    for _ in range(40):
        clients = int(draw.integers(2, 9))
        times = draw.exponential(1, size=clients).tolist()
        places, buffer = int(draw.integers(1, clients + 1)), int(draw.integers(1, 4))
        deadline, rate = float(draw.choice([0.3, 1e9])), float(draw.choice([0.0, 0.3]))
        oldest = int(draw.integers(0, 5))
        given = attendance(times, seed, deadline_s=deadline, failure_rate=rate)
        timetable = Timetable(given, ["full"] * clients, places, buffer, oldest)
        opened, spans = [0.0], []
        for round_ in range(1, 30):
            one = timetable.turnout(round_)
            assert one.simulated_s is not None
            opened.append(opened[-1] + one.simulated_s)
            assert len(one.present) <= buffer
            assert [client for client, _ in one.present] == sorted(one.versions)
            for client, version in one.versions.items():
                assert 0 <= round_ - 1 - version <= oldest
                # It began while its version was the newest, and came while this round was open.
                earliest, latest = (
                    opened[version] + times[client],
                    opened[version + 1] + times[client],
                )
                assert earliest <= opened[round_] + 1e-9
                assert latest >= opened[round_ - 1] - 1e-9
                spans.append((client, version))
            whole = deadline > 1e6 and not rate
            if whole and oldest == 4 and places == clients >= buffer:
                assert len(one.present) == min(buffer, clients)
        assert len(set(spans)) == len(spans)  # no version is trained twice by a client
        again = Timetable(given, ["full"] * clients, places, buffer, oldest)
        assert again.turnout(29) == timetable.turnout(29)


def test_places_are_for_different_clients() -> None:
    """With one place, and equal times, everybody gets it at some time."""
    timetable = Timetable(attendance([1.0] * 5), ["full"] * 5, concurrency=1, buffer_size=1)
    came = [timetable.turnout(round_) for round_ in range(1, 60)]
    assert all(one.simulated_s == 1.0 and len(one.present) == 1 for one in came)
    assert {client for one in came for client, _ in one.present} == set(range(5))


def fedbuff(models: Sequence[GlobalModel], arrivals: Sequence[tuple[Received, int]]) -> Any:
    """The next version in float64. Statistics move towards what was measured."""
    newest = models[-1].tensors
    new: dict[str, np.ndarray] = {n: v.double().numpy() for n, v in newest.items()}
    recovered = [(recover(update, models[version]), version) for update, version in arrivals]
    for name in {name for update, _ in recovered for name in update.tensors}:
        total = weight = np.zeros(new[name].shape)
        for update, version in recovered:
            if name in update.tensors:
                base = (models[-1] if "running_" in name else models[version]).tensors[name]
                change = update.tensors[name].double() - base.double()
                own = update.weights[name].double().numpy()
                total = total + own * change.numpy() / np.sqrt(len(models) - version)
                weight = weight + own
        new[name] = new[name] + total / np.where(weight, weight, 1)
    return new


def test_versions_are_fedbuffs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the updates as they are trained, with the models as they are saved."""
    models: list[GlobalModel] = []
    arrivals: list[tuple[Received, int]] = []
    expected: list[Mapping[str, np.ndarray]] = []
    train, keep, first = ChunkTrainer._update, RunFolder.finish_round, RunFolder.keep_first_model

    def training(self: ChunkTrainer, spec: str, client: Any, result: TrainedChunk) -> Received:
        update = train(self, spec, client, result)
        arrivals.append((update, self.round - 1))
        return update

    def keeping(self: RunFolder, result: RoundResult, model: bytes, reference: object) -> None:
        assert reference is None
        expected.append(fedbuff(models, arrivals))
        staleness = [result.round - 1 - version for _, version in arrivals]
        assert result.mean_staleness == pytest.approx(np.mean(staleness))
        assert (result.max_staleness, result.clients) == (max(staleness), len(staleness))
        arrivals.clear()
        models.append(from_bytes(model, "saved"))
        keep(self, result, model)

    def beginning(self: RunFolder, model: bytes) -> None:
        models.append(from_bytes(model, "first"))
        first(self, model)

    monkeypatch.setattr(ChunkTrainer, "_update", training)
    monkeypatch.setattr(RunFolder, "finish_round", keeping)
    monkeypatch.setattr(RunFolder, "keep_first_model", beginning)
    written(file)
    file.write_text(file.read_text() + "\n[aggregation]\nbounds = false\njudge = false\n")
    history = simulate(file, tmp_path / "out")
    assert max(one.max_staleness or 0 for one in history) >= 1
    for model, numbers in zip(models[1:], expected, strict=True):
        for name, value in model.tensors.items():
            if value.is_floating_point():
                np.testing.assert_allclose(value.numpy(), numbers[name], rtol=1e-6, atol=1e-6)


def test_statistics_of_stale_updates_count_less(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 4 s come two updates of the first model, at 3 s another version was made."""
    shares: list[list[float]] = []
    limit = ClientLimits.limit_statistics

    def limiting(self: ClientLimits, aggregation: Aggregation) -> None:
        shares.append([own.share for own in self._figures.values()])
        limit(self, aggregation)

    monkeypatch.setattr(ClientLimits, "limit_statistics", limiting)
    simulate(written(file, fleet=[("full", 3), ("full", 4)], rounds=2), tmp_path / "out")
    assert shares == [[1.0, 1.0], pytest.approx([1 / np.sqrt(2)] * 2)]


@pytest.mark.parametrize(
    "spec",
    ["pfedme,penalty=2.0,personal-steps=1", long_one("cp:2.0,factor-steps=1,personal-steps=1")],
    ids=["personal", "factors"],
)
def test_an_interruption_changes_nothing(file: Path, tmp_path: Path, spec: str) -> None:
    """With personal models, or kept factors too, and clients that fail."""
    fleet = [(spec, seconds) for seconds in (3, 8)]
    table = "failure_rate = 0.2\nparticipation = 0.75"
    top = f"{TOP}\nmax_staleness = 2"
    whole = simulate(written(file, top, table, fleet), tmp_path / "whole")
    for rounds in (2, 3):
        simulate(written(file, top, table, fleet, rounds), tmp_path / "parts")
    parts = simulate(written(file, top, table, fleet), tmp_path / "parts")
    assert without_times(parts) == without_times(whole)
    states = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "state").iterdir()}
        for name in ("parts", "whole")
    ]
    assert states[0] == states[1]
    models = {int(name.partition("-")[2]) for name in states[0] if name.startswith("model-")}
    assert models == {3, 4, 5}


@pytest.mark.parametrize(
    ("top", "table", "words"),
    [
        ('mode = "async"', "", "needs `buffer_size`"),
        ("buffer_size = 2", "", 'needs mode = "async"'),
        (f"{TOP}\nquorum = 2", "", "remove `quorum`"),
        (f"{TOP}\nmin_updates = 3", "", "raise `buffer_size`"),
        (f"{TOP}0", "", "only 6 devices can join"),
        (f"{TOP}\nmax_staleness = 101", "", "less than or equal to 100"),
        (TOP, 'baseline = "local"', "cannot be combined with `baseline`"),
        (TOP, 'capacities = "dynamic"', "cannot be combined with `capacities`"),
    ],
)
def test_mistakes_in_the_file(file: Path, top: str, table: str, words: str) -> None:
    with refused("config.bad-value", words):
        simulate(written(file, top, table), file.parent / "out")
    assert not (file.parent / "out").exists()


def test_times_are_needed(file: Path) -> None:
    text = written(file).read_text()
    lines = [line for line in text.splitlines() if line.split(" ")[0] not in DEVICE_KEYS]
    file.write_text("\n".join(lines))
    with refused("config.bad-value", "needs simulated time"):
        simulate(file, file.parent / "out")


DEVICE_KEYS = ("profile", "download_mbps", "upload_mbps", "slowdown")
