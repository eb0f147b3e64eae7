"""Dense rounds by Flower's strategies and mods, with messages passed in one process.

Every node runs the project's ClientApp with its mods, and the state folder of a site whose devices
send updates drawn at random. The grid keeps all messages as the server sees them.
"""

import copy
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from Crypto.Cipher import ChaCha20
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.supercore.task_identity import TaskIdentity

from edgetailor import TrainingConfig
from models_for_tests import INPUT_SHAPE
from refusals import refused
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.flower_site import SITE, SiteModel
from toolkit.flower.client_app import app
from toolkit.flower.dense_rounds import DenseRounds
from toolkit.flower.masks import USERS, draw_masks
from toolkit.flower.settings import read_settings
from toolkit.submodels.global_model import GlobalModel
from updates import drawn_updates

pytestmark = pytest.mark.flower

SITES, ROUNDS = 3, 2
# Flower's processes know who they are; messages cannot be made without.
TaskIdentity.task_id = TaskIdentity.run_id = 7
TaskIdentity.node_id = 1
SPECS = (("full", "low-rank:0.5"), ("slice:residual",), ("full",))
Tensors = dict[str, np.ndarray]


class Unbundled(Federation):
    """A federation without devices, whose bundles nobody needs."""

    def bundle(self, spec: str, round_: int = 1) -> dict[str, bytes]:
        return {}


@cache
def built(seed: int) -> tuple[Federation, GlobalModel]:
    """A federation and its first model."""
    training = TrainingConfig(batch_size=8)
    federation = Unbundled("models_for_tests:smooth_cnn", INPUT_SHAPE, training, seed=seed)
    return federation, federation.model


def federation_of(seed: int) -> Federation:
    federation, federation.model = built(seed)
    return federation


def floating(federation: Federation) -> Tensors:
    tensors = federation.model.tensors
    return {name: v.numpy().copy() for name, v in tensors.items() if v.is_floating_point()}


class Grid:
    """Flower's grid, as far as strategies use it, with a node for every site."""

    def __init__(self, folder: Path, config: dict[str, object], node: dict[str, object]) -> None:
        self.run = SimpleNamespace(run_id=7)
        self.replies: list[Message] = []
        self.missing: set[int] = set()
        self.contexts = {
            100 + number: Context(
                7, 100 + number, {"state": str(folder / str(number)), **node}, RecordDict(), config
            )
            for number in range(SITES)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        def answer(message: Message) -> Message | None:
            node = message.metadata.dst_node_id
            if node in self.missing and has_model(message):
                return None
            return app(copy.deepcopy(message), self.contexts[node])

        with ThreadPoolExecutor(SITES) as pool:
            replies = [reply for reply in pool.map(answer, messages) if reply is not None]
        self.replies += replies
        return replies


def has_model(message: Message) -> bool:
    return bool(message.content.array_records)


@contextmanager
def served(folder: Path, number: int, seed: int) -> Iterator[list[tuple[Tensors, Tensors]]]:
    """A site; gives the model from above and its own model of every round."""
    federation, over = federation_of(50 + number), threading.Event()
    site, rounds = SiteModel(federation, folder / str(number) / SITE), []
    for spec in SPECS[number]:
        federation.submodel(spec)  # no other thread may draw numbers while a model is recorded

    def serve() -> None:
        while not over.is_set():
            if site.ready():
                site.bundle("full", len(rounds) + 1)
                came = floating(federation)
                drawn = drawn_updates(
                    federation, SPECS[number], seed + SITES * len(rounds) + number
                )
                site.fold_checked(drawn)
                rounds.append((came, floating(federation)))
                site.save()
            time.sleep(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield rounds
    finally:
        over.set()
        thread.join()


class Run:
    """A finished run: the global model after every round, each site's rounds, and the grid."""

    def __init__(self, folder: Path, seed: int, missing: int = 0, **keys: object) -> None:
        node = keys.pop("node", {})
        needed = {"federation": "", "out": "", "sites": SITES, "timeout": 30, "dense": True}
        config = needed | {key.replace("_", "-"): value for key, value in keys.items()}
        self.models: list[Tensors] = []
        self.columns: list[dict[str, float]] = []
        self.grid = Grid(folder, config, node)
        self.grid.missing = set(list(self.grid.contexts)[:missing])
        above = federation_of(1)

        def keep(_: int, columns: dict[str, float]) -> MetricRecord:
            self.models.append(floating(above))
            self.columns.append(columns)
            return MetricRecord()

        with ExitStack() as stack:
            self.sites = [
                stack.enter_context(served(folder, number, seed)) for number in range(SITES)
            ]
            rounds = DenseRounds(above, read_settings(config), "run", ROUNDS, keep)
            rounds.start(self.grid, Context(7, 0, {}, RecordDict(), config))


def clipped(before: Tensors, after: Tensors, norm: float) -> Tensors:
    """`after` at most `norm` from `before` (McMahan et al. 2018, FlatClip), in float64."""
    change = {name: after[name].astype(np.float64) - value for name, value in before.items()}
    length = np.sqrt(sum((value**2).sum() for value in change.values()))
    return {n: before[n] + value * min(1.0, norm / length) for n, value in change.items()}


def mean(models: list[Tensors]) -> Tensors:
    return {name: np.mean([model[name] for model in models], axis=0) for name in models[0]}


def assert_close(came: Tensors, expected: Tensors, atol: float) -> None:
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(came[name], value, rtol=1e-5, atol=atol, err_msg=name)


def test_the_mean_of_the_sites(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, seed)
    assert [row["sites"] for row in run.columns] == [0, SITES, SITES]
    for round_ in range(ROUNDS):
        came, own = zip(*(site[round_] for site in run.sites), strict=True)
        for model in came:
            assert_close(model, run.models[round_], atol=0)
        assert_close(run.models[round_ + 1], mean(list(own)), atol=1e-6)


@pytest.mark.parametrize("norm", [0.3, 1e6])
@pytest.mark.parametrize("secure", [False, True])
def test_clipped_changes(tmp_path: Path, seed: int, norm: float, secure: bool) -> None:
    run = Run(tmp_path, seed, clipping_norm=norm, secure=secure)
    for round_ in range(ROUNDS):
        own = [clipped(*site[round_], norm) for site in run.sites]
        assert_close(run.models[round_ + 1], mean(own), atol=quantum(secure))


def quantum(secure: bool) -> float:
    """SecAgg+ rounds each number up or down to a multiple of 2 * range / 2^22."""
    return 1e-6 + secure * 2 * 8.0 / 2**22


def test_noise(tmp_path: Path, seed: int) -> None:
    """Its deviation is noise multiplier * norm / sites; epsilon is that of Gaussian noise."""
    norm, multiplier = 0.5, 4.0
    run = Run(tmp_path, seed, clipping_norm=norm, noise_multiplier=multiplier, delta=1e-6)
    own = mean([clipped(*site[0], norm) for site in run.sites])
    noise = np.concatenate(
        [
            (run.models[1][name] - value).ravel()
            for name, value in own.items()
            if not name.endswith("running_var")
        ]
    )
    deviation = multiplier * norm / SITES
    # Six deviations of the estimates from n numbers.
    assert abs(noise.std() / deviation - 1) < 6 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 6 * deviation / np.sqrt(noise.size)
    spent = [row["epsilon"] for row in run.columns]
    assert spent[0] == 0
    for releases, epsilon in enumerate(spent[1:], 1):
        assert 0.8 * gaussian_epsilon(releases, multiplier, 1e-6) < epsilon
        assert epsilon < gaussian_epsilon(releases, multiplier, 1e-6)


def gaussian_epsilon(releases: int, multiplier: float, delta: float) -> float:
    """By Rényi divergence (Mironov 2017, propositions 1, 3 and corollary 3), optimal order."""
    rho = releases / (2 * multiplier**2)
    return float(rho + 2 * np.sqrt(rho * np.log(1 / delta)))


def test_secure_sum(tmp_path: Path, seed: int) -> None:
    """The sum is right, and the server sees no site's model: what it gets looks uniform."""
    run = Run(tmp_path, seed, secure=True)
    for round_ in range(ROUNDS):
        own = [site[round_][1] for site in run.sites]
        assert_close(run.models[round_ + 1], mean(own), atol=quantum(True))
    assert all(not record for reply in run.grid.replies for record in arrays_of(reply))
    masked = [
        np.concatenate(
            [bytes_to_ndarray(b).ravel() for b in reply.content[SECURE]["masked_params"]]
        )
        for reply in run.grid.replies
        if "masked_params" in reply.content[SECURE]
    ]
    assert len(masked) == SITES * ROUNDS
    for numbers in masked:
        counts, _ = np.histogram(numbers, bins=16, range=(0, 2**32))
        expected = numbers.size / 16
        assert ((counts - expected) ** 2 / expected).sum() < 60  # chi-squared, 15 degrees: p < 1e-6


SECURE = "secaggplus_configs"


def arrays_of(message: Message) -> list[ArrayRecord]:
    return list(message.content.array_records.values())


def test_masks_are_a_key_stream(seed: int) -> None:
    """Oracle: another implementation of ChaCha20."""
    secret = np.random.default_rng(seed).bytes(44)
    stream = ChaCha20.new(key=sha256(secret).digest(), nonce=bytes(8)).encrypt(bytes(4 * 14))
    expected = np.frombuffer(stream, "<u4") % 2**20
    masks = draw_masks(secret, 2**20, [(1,), (), (3, 4)])
    np.testing.assert_array_equal(np.concatenate([mask.ravel() for mask in masks]), expected)


def test_flower_draws_masks_from_the_whole_secret(seed: int) -> None:
    """Flower's own masks stay the same when words of the secret change places."""
    words = np.random.default_rng(seed).bytes(8)
    for name in USERS:
        draw = import_module(name).pseudo_rand_gen
        (mask,), (other,) = (draw(s, 2**32, [(5,)]) for s in (words, words[4:] + words[:4]))
        assert (mask != other).any()


def test_a_site_that_leaves_a_secure_round(tmp_path: Path, seed: int) -> None:
    """The sum is that of the two others."""
    run = Run(tmp_path, seed, missing=1, secure=True)
    own = [site[0][1] for site in run.sites[1:]]
    assert run.columns[1]["sites"] == SITES - 1
    assert_close(run.models[1], mean(own), atol=quantum(True))


@pytest.mark.parametrize("secure", [False, True])
def test_too_little_noise_is_not_published(tmp_path: Path, seed: int, secure: bool) -> None:
    """The noise is for all sites. If one is missing, the model stays as it was."""
    run = Run(tmp_path, seed, missing=1, secure=secure, clipping_norm=0.5, noise_multiplier=1.0)
    for columns, model in zip(run.columns, run.models, strict=True):
        assert columns == {"sites": 0, "epsilon": 0}
        assert_close(model, run.models[0], atol=0)


def test_local_noise(tmp_path: Path, seed: int) -> None:
    """Its deviation at each site is 2 * norm * sqrt(2 ln(1.25 / delta)) / epsilon."""
    norm, epsilon, delta = 0.2, 2.0, 1e-3
    node = {"epsilon": epsilon, "delta": delta, "clipping-norm": norm}
    run = Run(tmp_path, seed, node=node)
    deviation = 2 * norm * np.sqrt(2 * np.log(1.25 / delta)) / epsilon
    replies = {reply.metadata.src_node_id - 100: reply for reply in run.grid.replies[:SITES]}
    for number, site in enumerate(run.sites):
        (sent,) = arrays_of(replies[number])
        own = clipped(*site[0], norm)
        noise = np.concatenate([(sent[name].numpy() - own[name]).ravel() for name in own])
        assert abs(noise.std() / deviation - 1) < 6 / np.sqrt(2 * noise.size)


@pytest.mark.parametrize(
    "keys",
    [
        {"noise-multiplier": 1.0},
        {"clipping-norm": 0.0},
        {"clipping_norm": 1.0},
        {"dense": False, "secure": True},
        {"dense": False, "clipping-norm": 1.0},
        {"secure": True, "sites": 1},
    ],
)
def test_settings_that_do_not_protect_are_refused(keys: dict[str, object]) -> None:
    needed = {"federation": "", "out": "", "sites": 3, "timeout": 60, "dense": True}
    with refused("flower.settings"):
        read_settings(needed | keys)


@pytest.mark.parametrize("keys", [{"dense": False}, {"secure": True}, {"clipping-norm": 1.0}])
def test_a_site_that_adds_noise_sends_nothing_without(
    tmp_path: Path, keys: dict[str, object]
) -> None:
    config = {"federation": "", "out": "", "sites": 3, "timeout": 60, "dense": True} | keys
    node = {"state": str(tmp_path), "epsilon": 1.0, "delta": 1e-5, "clipping-norm": 1.0}
    message = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    with refused("site.no-noise"):
        app(message, Context(7, 1, node, RecordDict(), config))


def test_numbers_that_would_be_cut_off_are_not_sent(tmp_path: Path, seed: int) -> None:
    with refused("site.out-of-range", most=0.01):
        Run(tmp_path, seed, secure=True, range=0.01)
