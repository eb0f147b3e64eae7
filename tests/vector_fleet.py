"""A federation over real sockets, whose devices really download, train and upload.

The global model here is one vector, so that what a round must give can be written down.
"""

import asyncio
import logging
import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import urllib3
import uvicorn.server
from safetensors.numpy import load, load_file, save

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    TensorEntry,
    encode,
)
from device_agent.formats.protocol.joining import JoinRequest
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.signed_work import split_token
from device_agent.formats.update import (
    RECORD,
    TENSORS,
    UpdateRecord,
    check_record,
    check_tensors,
    write_update,
)
from device_agent.training.bundle_training import forget
from toolkit.aggregation.limits.reference import Figures, RoundLimits
from toolkit.aggregation.limits.update_bounds import Scale
from toolkit.coordinator.closing.round_models import Model
from toolkit.coordinator.devices.planned_submodel import SubmodelPlanner
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.rounds.upload_validation import Update
from toolkit.coordinator.server import Server
from toolkit.evaluation_sums import Evaluation
from toolkit.metric_logs import LogName
from toolkit.web.built_page import Page


async def _short(seconds: float) -> None:
    await asyncio.sleep(min(seconds, 0.01))


# A server looks every 0.1 s whether it has to stop, and then whether its connections are closed.
# Two looks at the end of each test were the most of many tests.
vars(uvicorn.server)["asyncio"] = SimpleNamespace(**{**vars(asyncio), "sleep": _short})

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZE = 1000
ROUNDS = 3
CONFIG = """
model = "toolkit.models:digits_cnn"
input_shape = [2]
rounds = 3
held_out = "held_out.npz"
port = 0

[training]
epochs = 1

[[devices]]
name = "desktop"
submodel = "full"
count = 2

[[devices]]
name = "board"
submodel = "low-rank:0.5"
"""

TWO_KINDS = CONFIG.replace("count = 2", "count = {}")
"""The same with a number of desktops to fill in."""

MACHINE = {
    "system": "Linux 6.12", "architecture": "aarch64", "processor": None, "cpu_count": 4,
    "memory_bytes": 2**30, "python": "3.13.5", "runtime": "onnxruntime 1.31.1",
}  # fmt: skip


def _limit_nothing(limits: object, updates: int) -> None:
    if isinstance(limits, RoundLimits):
        limits.limited += [None] * updates


class VectorModel:
    """A global model of `size` numbers; training on a device adds the mean of its samples."""

    def __init__(self, size: int = SIZE) -> None:
        self.weights = np.zeros(size, np.float32)
        self.folded: list[int] = []
        self.limits: list[object] = []

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        table = (
            TensorEntry(name="w", role="parameter", dtype="float32", shape=self.weights.shape),
            TensorEntry(name="mine", role="personal", dtype="float32", shape=(1,), stored=False),
        )
        files = {WEIGHTS: save({"w": self.weights}), "train.onnx": b"graph of " + submodel.encode()}
        manifest = Manifest(
            version=FORMAT_VERSION,
            submodel=submodel,
            runtime="onnx",
            base=fingerprint(self.save()).sha256,
            sample_shape=(2,),
            classes=2,
            signatures={},
            tensors=table,
            schedule=(),
            files={name: fingerprint(data) for name, data in files.items()},
        )
        return {**files, MANIFEST: encode(manifest)}

    def check(self, update: Update, origin: str) -> None:
        record, arrays = update
        check_record(record, origin)
        check_tensors(arrays, record.tensors, origin)

    def figures(self, update: Update) -> Figures:
        record, _ = update
        return Figures(kind=record.submodel, samples=1, steps=1, changes={}, statistics={})

    def fold_checked(self, updates: Iterable[Update], limits: object = None) -> None:
        self.limits.append(limits)
        received = [tensors["w"] for _, tensors in updates]
        _limit_nothing(limits, len(received))
        self.folded.append(len(received))
        with np.errstate(over="ignore"):  # some tests send numbers that are too large on purpose
            self.weights = np.mean(received, axis=0, dtype=np.float32)

    def fold_versions(
        self,
        updates: Iterable[Update],
        stale: Iterable[tuple[int, bytes, Iterable[Update]]],
        limits: object = None,
    ) -> None:
        changes = [tensors["w"] - self.weights for _, tensors in updates]
        for staleness, model, group in stale:
            base, factor = load(model)["w"], np.float32(1 / np.sqrt(1 + staleness))
            changes += [factor * (tensors["w"] - base) for _, tensors in group]
        _limit_nothing(limits, len(changes))
        self.folded.append(len(changes))
        self.weights = self.weights + np.mean(changes, axis=0, dtype=np.float32)

    def scales(self, update: object) -> dict[str, Scale]:
        return {}

    def check_weights(self) -> None:
        pass

    def check_training(self, x: np.ndarray, y: np.ndarray) -> None:
        pass

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        with np.errstate(over="ignore"):
            return Evaluation(len(x), len(x), 0.5, float(self.weights.mean()))

    def save(self) -> bytes:
        return save({"w": self.weights})

    def load(self, data: bytes) -> None:
        self.weights = load(data)["w"]


@dataclass
class Trained:
    record: UpdateRecord
    personal: dict[str, np.ndarray]


def train_vector(
    folder: Path,
    data: str,
    out: Path,
    *,
    personal: Mapping[str, np.ndarray],
    keep: Callable[[Mapping[str, np.ndarray]], object],
    **options: object,
) -> Trained:
    """Stands in for the runtime: w + 1, and a personal count of the rounds trained."""
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    weights = load_file(folder / WEIGHTS)["w"] + np.float32(1)
    written = write_update(out, record_for(manifest, folder), {"w": weights})
    own = {"mine": personal.get("mine", np.zeros(1, np.float32)) + 1}
    keep(own)
    return Trained(written, own)


def record_for(manifest: Manifest, folder: Path) -> UpdateRecord:
    return UpdateRecord(
        bundle=fingerprint((folder / MANIFEST).read_bytes()).sha256,
        base=manifest.base,
        submodel=manifest.submodel,
        samples=10,
        steps=1,
        loss_first=2.0,
        loss_last=1.0,
        tensors=manifest.tensors[:1],
        file=fingerprint(b""),
    )


def configured(folder: Path, text: str = CONFIG) -> CoordinatorConfig:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "held_out.npz", x=np.zeros((4, 2), np.float32), y=np.array([0, 1, 0, 1]))
    (folder / "fleet.toml").write_text(text)
    return load_config(folder / "fleet.toml")


def serve_with_few_files(
    folder: Path, most: int, ready: "Connection[tuple[str, str], None]"
) -> None:
    """Run a coordinator that may open `most` files, in a process of its own; it logs to `log`.

    Sends its URL and the token of a desktop to `ready`.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    log = (folder / "log").open("w", buffering=1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=log)
    config = configured(folder / "c")
    server = Server(config, VectorModel(), Path("fleet.toml"))
    ready.send((server.url, token(config, "desktop")))
    server.run()


@contextmanager
def running(
    config: CoordinatorConfig,
    model: Model | None = None,
    say: Callable[[str], None] = lambda line: None,
    planner: SubmodelPlanner | None = None,
    page: Page | None = None,
    new_key: bool = False,
    logs: Sequence[LogName] = (),
) -> Iterator[Server]:
    """A coordinator that serves `config`; `say` gets each message that it logs."""
    with messages_to(say):
        origin = config.state.parent / "fleet.toml"
        server = Server(
            config, model or VectorModel(), origin, planner, page, new_key=new_key, logs=logs
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


@contextmanager
def messages_to(say: Callable[[str], None]) -> Iterator[None]:
    """Give `say` each message that the toolkit logs."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger, handler = logging.getLogger("toolkit"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def full_token(config: CoordinatorConfig, kind: str) -> str:
    """The content of a token file: the token, and the fingerprint of the coordinator's key."""
    return (config.state / "tokens" / f"{kind}.token").read_text().strip()


def token(config: CoordinatorConfig, kind: str) -> str:
    return split_token(full_token(config, kind))[0]


def assert_soon(condition: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def joined(server: Server, state: Path) -> CoordinatorClient:
    """The link of a device that joined before the coordinator was started again."""
    known = msgspec.json.decode((state / "device.json").read_bytes())
    return CoordinatorClient(server.url, known["secret"], patience_s=0)


def enrol(server: Server, folder: Path) -> dict[str, CoordinatorClient]:
    """Join all three devices; returns their links by device id."""
    links = {}
    for number, kind in enumerate(["desktop", "desktop", "board"]):
        state = folder / str(number)
        name = f"machine {number}"
        joined = membership.join(server.url, token(server.config, kind), name, state)
        links[joined.device] = CoordinatorClient(server.url, joined.secret, patience_s=0)
    return links


def documented(code: str) -> re.Pattern[str]:
    """The messages that docs/reference/errors.md gives for `code`, each name in braces as any text.

    docs/guides/agent.md must list the code as well.
    """
    rows = (DOCS / "guides" / "agent.md").read_text().splitlines()
    assert sum(row.startswith(f"| `{code}` |") for row in rows) == 1
    errors = (DOCS / "reference" / "errors.md").read_text()
    section = errors.split(f"\n### `{code}`\n")[1].partition("\n#")[0]
    messages = re.findall(r"^- (.*)$", section, re.M)
    assert messages, f"errors.md has no message for {code}"
    patterns = (".+".join(map(re.escape, re.split(r"\{[^}]*\}", message))) for message in messages)
    return re.compile("|".join(f"(?:{pattern})\\Z" for pattern in patterns))


Fleet = tuple[Server, dict[str, CoordinatorClient]]


def task(link: CoordinatorClient) -> Work:
    """Work, once there is some."""
    for _ in range(200):
        work = link.work()
        if work.state != "wait":
            return work
        time.sleep(0.02)
    raise AssertionError("no work within 4 s")


def trained(link: CoordinatorClient, folder: Path) -> tuple[Work, UpdateRecord, Path]:
    """An update of the round that is open, made in the new folder `folder`."""
    work = task(link)
    for offer in work.files:
        link.download(offer, folder / "bundle" / offer.name)
    done = train_vector(folder / "bundle", "", folder / "update", personal={}, keep=forget)
    return work, done.record, folder / "update"


def send(link: CoordinatorClient, round_: int, update: Path) -> None:
    link.send_tensors(round_, update / TENSORS)
    link.send_update(round_, (update / RECORD).read_bytes())


def send_trained(link: CoordinatorClient, round_: int, folder: Path) -> None:
    """Send the update of `link` for the open round, which is `round_`; made in a new folder."""
    send(link, round_, trained(link, folder)[2])


def send_all(links: Mapping[str, CoordinatorClient], round_: int, folder: Path) -> None:
    """The same for all `links`, each in a folder of its name."""
    for name, link in links.items():
        send_trained(link, round_, folder / name)


def ask(server: Server, request: JoinRequest, bearer: str) -> urllib3.BaseHTTPResponse:
    """Send a request to join with `bearer` as the token."""
    headers = {"Authorization": f"Bearer {bearer}"}
    return urllib3.request(
        "POST", f"{server.url}/v1/devices", json=asdict(request), headers=headers, timeout=30
    )
