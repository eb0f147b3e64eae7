"""The coordinator over real sockets, with devices that really download, train and upload.

The global model here is one vector, so that what a round must give can be written down.
"""

import json
import math
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import urllib3
from safetensors.numpy import load, load_file, save

from device_agent import device
from device_agent.files import fingerprint
from device_agent.link import Link, RefusedError
from device_agent.manifest import FORMAT_VERSION, MANIFEST, WEIGHTS, Manifest, TensorEntry, encode
from device_agent.protocol import JoinRequest, Work
from device_agent.update import RECORD, TENSORS, UpdateRecord, write_update
from profiles.errors import AuthorisationError, EdgeTailorError, InputError
from toolkit.coordinator.config import CoordinatorConfig, load_config
from toolkit.coordinator.server import Server
from toolkit.policy import AggregationPolicy

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


class VectorModel:
    """A global model of SIZE numbers; training on a device adds the mean of its samples."""

    def __init__(self) -> None:
        self.weights = np.zeros(SIZE, np.float32)
        self.folded: list[int] = []

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        table = (
            TensorEntry(name="w", role="parameter", dtype="float32", shape=(SIZE,)),
            TensorEntry(name="mine", role="personal", dtype="float32", shape=(1,), stored=False),
        )
        files = {WEIGHTS: save({"w": self.weights}), "train.onnx": b"graph of " + submodel.encode()}
        manifest = Manifest(
            version=FORMAT_VERSION,
            submodel=submodel,
            runtime="onnx",
            base=fingerprint(self.weights.tobytes()).sha256,
            sample_shape=(2,),
            classes=2,
            signatures={},
            tensors=table,
            schedule=(),
            files={name: fingerprint(data) for name, data in files.items()},
        )
        return {**files, MANIFEST: encode(manifest)}

    def fold(self, updates: Iterable[tuple[UpdateRecord, dict[str, np.ndarray]]]) -> None:
        received = [tensors["w"] for _, tensors in updates]
        self.folded.append(len(received))
        self.weights = np.mean(received, axis=0, dtype=np.float32)

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        return 0.5, float(self.weights.mean())

    def save(self) -> bytes:
        return save({"w": self.weights})

    def load(self, data: bytes) -> None:
        self.weights = load(data)["w"]


@dataclass
class Trained:
    record: UpdateRecord
    personal: dict[str, np.ndarray]


def train_vector(
    folder: Path, data: str, out: Path, *, personal: Mapping[str, np.ndarray], **options: object
) -> Trained:
    """Stands in for the runtime: w + 1, and a personal count of the rounds trained."""
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    weights = load_file(folder / WEIGHTS)["w"] + np.float32(1)
    written = write_update(out, record_for(manifest, folder), {"w": weights})
    return Trained(written, {"mine": personal.get("mine", np.zeros(1, np.float32)) + 1})


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


@contextmanager
def running(
    config: CoordinatorConfig,
    model: VectorModel | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Server]:
    server = Server(config, model or VectorModel(), Path("fleet.toml"), say)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def token(config: CoordinatorConfig, kind: str) -> str:
    return (config.state / "tokens" / f"{kind}.token").read_text().strip()


def enrol(server: Server, folder: Path) -> dict[str, Link]:
    """Join all three devices; returns their links by device id."""
    links = {}
    for number, kind in enumerate(["desktop", "desktop", "board"]):
        state = folder / str(number)
        name = f"machine {number}"
        joined = device.join(server.url, token(server.config, kind), name, state, print)
        links[joined.device] = Link(server.url, joined.secret, print, patience_s=0)
    return links


def task(link: Link) -> Work:
    """Work, once there is some."""
    for _ in range(200):
        work = link.work()
        if work.state != "wait":
            return work
        time.sleep(0.02)
    raise AssertionError("no work within 4 s")


def trained(link: Link, folder: Path) -> tuple[Work, UpdateRecord, Path]:
    """An update of the round that is open, made in the new folder `folder`."""
    work = task(link)
    for offer in work.files:
        link.download(offer, folder / "bundle" / offer.name)
    done = train_vector(folder / "bundle", "", folder / "update", personal={})
    return work, done.record, folder / "update"


def send(link: Link, round_: int, update: Path) -> None:
    link.send_tensors(round_, update / TENSORS)
    link.send_update(round_, (update / RECORD).read_bytes())


def test_a_whole_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "train_bundle", train_vector)
    monkeypatch.chdir(tmp_path)
    config, model, told = configured(tmp_path), VectorModel(), list[str]()
    made: list[int] = []
    up = threading.Event()
    cut = model.bundle

    def bundle(submodel: str, round_: int) -> dict[str, bytes]:
        assert up.wait(10)
        if round_ == 1:
            made.append(server.coordinator.status().kinds_ready)
        return cut(submodel, round_)

    monkeypatch.setattr(model, "bundle", bundle)
    said: dict[int, list[str]] = {number: [] for number in range(3)}
    with running(config, model, told.append) as server:
        up.set()
        enrol(server, tmp_path)
        threads = [
            threading.Thread(
                target=device.run,
                args=(tmp_path / str(n), "data.npz", said[n].append),
                kwargs={"sleep": lambda seconds: time.sleep(0.02)},
            )
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        later: list[str] = []
        assert device.run(tmp_path / "0", "data.npz", later.append) == 0
        assert later == ["The last round is over; 0 updates sent since this agent started."]
        operator = Link(server.url, (config.state / "operator.token").read_text().strip(), print)
        status = operator.status()
    assert (status.state, status.round, model.folded) == ("finished", ROUNDS, [3, 3, 3])
    assert [(r.round, r.loss, r.updates) for r in status.history] == [
        (0, 0.0, 0), (1, 1.0, 3), (2, 2.0, 3), (3, 3.0, 3),
    ]  # fmt: skip
    assert [d.rounds_trained for d in status.devices] == [ROUNDS] * 3
    assert (status.kinds, made) == (2, [0, 1])
    assert all(d.bytes_up == ROUNDS * d.bytes_up // ROUNDS > 4 * SIZE for d in status.devices)
    for n in range(3):
        assert said[n][-1] == "The last round is over; 3 updates sent since this agent started."
        assert sum("train.onnx" in line for line in said[n]) == 1  # cached: it never changed
        assert load_file(tmp_path / str(n) / "personal.safetensors")["mine"] == [ROUNDS]
        assert len(list((tmp_path / str(n) / "files").iterdir())) == 3
    assert load_file(config.state / "global.safetensors")["w"].mean() == ROUNDS
    history = json.loads((config.state / "history.json").read_text())
    assert [entry["round"] for entry in history["history"]] == [0, 1, 2, 3]
    end = "All rounds are done; global model: state/global.safetensors. Stop with Ctrl-C."
    assert told == [
        "Round 0 of 3: accuracy 0.5000, loss 0.0000, from 0 updates",
        "Round 1 of 3: accuracy 0.5000, loss 1.0000, from 3 updates",
        "Round 2 of 3: accuracy 0.5000, loss 2.0000, from 3 updates",
        "Round 3 of 3: accuracy 0.5000, loss 3.0000, from 3 updates",
        end,
    ]
    again: list[str] = []
    with running(config, VectorModel(), again.append):
        assert_soon(lambda: again == [end])


def test_the_greeting_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured(tmp_path)
    with running(config) as server:
        greeting = server.greeting()
    assert greeting == [
        f"Coordinator at {server.url}",
        "Its routes are explained at /docs, without the internet at /openapi.json.",
        f"Join: edgetailor-agent join {server.url} --token-file FILE",
        "  2 x desktop (full): state/tokens/desktop.token",
        "  1 x board (low-rank:0.5): state/tokens/board.token",
        "The operator's token, for /v1/status: state/operator.token",
    ]
    assert max(map(len, greeting)) <= 80
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert server.greeting()[-1].endswith(f": {config.state}/operator.token")


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config) as server:
        links = enrol(server, tmp_path)
        for number, link in enumerate(links.values()):
            send(link, 1, trained(link, tmp_path / f"one-{number}")[2])
        first = links["desktop-1"]
        work, _, update = trained(first, tmp_path / "two")
        assert work.round == 2
        send(first, 2, update)
    model, told = VectorModel(), list[str]()
    with running(config, model, told.append) as server:
        assert_soon(lambda: told == ["Going on at round 2 of 3."])
        again = [joined(server, tmp_path / str(n)) for n in range(3)]
        for _ in range(200):
            status = again[0].status()
            if status.state == "training":
                break
            time.sleep(0.02)
        assert (status.round, status.history[-1].loss) == (2, 1.0)
        assert [d.rounds_trained for d in status.devices] == [2, 1, 1]
        assert again[0].work().state == "wait"  # its update was not forgotten
        for number, link in enumerate(again[1:]):
            send(link, 2, trained(link, tmp_path / f"again-{number}")[2])
        assert task(again[0]).round == 3
    assert model.folded == [3]


def assert_soon(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def joined(server: Server, state: Path) -> Link:
    """The link of a device that joined before the coordinator was started again."""
    known = msgspec.json.decode((state / "device.json").read_bytes())
    return Link(server.url, known["secret"], print, patience_s=0)


def test_a_deadline_closes_a_round_with_what_it_has(tmp_path: Path) -> None:
    model = VectorModel()
    with running(configured(tmp_path, f"deadline_s = 0.2\n{CONFIG}"), model) as server:
        links = enrol(server, tmp_path)
        late = links["board-1"]
        work, _, update = trained(late, tmp_path / "late")
        send(links["desktop-1"], 1, trained(links["desktop-1"], tmp_path / "early")[2])
        while task(late).round == 1:
            time.sleep(0.02)
        with pytest.raises(RefusedError, match="Round 1 takes no updates now") as refused:
            send(late, work.round, update)
        assert refused.value.round_over
    assert model.folded[0] == 1


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Link]]]:
    """A federation in round 1, shared by tests of refusals, which change nothing."""
    folder = tmp_path_factory.mktemp("fleet")
    with running(configured(folder)) as server:
        yield server, enrol(server, folder)


Fleet = tuple[Server, dict[str, Link]]


def test_wrong_round(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-1"]
    _, _, update = trained(link, tmp_path)
    with pytest.raises(RefusedError, match="Round 2 takes no updates now"):
        send(link, 2, update)


def test_wrong_bundle(fleet: Fleet, tmp_path: Path) -> None:
    _, _, update = trained(fleet[1]["board-1"], tmp_path)
    with pytest.raises(RefusedError, match="Round 1 offered desktop-1 the bundle"):
        send(fleet[1]["desktop-1"], 1, update)


def test_altered_bytes(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-1"]
    _, _, update = trained(link, tmp_path)
    data = (update / TENSORS).read_bytes()
    (update / TENSORS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RefusedError, match="not those that were sent last"):
        send(link, 1, update)


def change(update: Path, record: UpdateRecord, data: bytes | None = None, **fields: object) -> None:
    """Rewrite an update by hand, as write_update would refuse to."""
    if data is not None:
        (update / TENSORS).write_bytes(data)
        fields["file"] = fingerprint(data)
    (update / RECORD).write_bytes(encode(msgspec.structs.replace(record, **fields)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": np.full(SIZE, np.nan, np.float32)}, "not finite; training diverged"),
        ({"w": np.zeros(SIZE - 1, np.float32)}, "its bundle says float32"),
        ({"w": np.zeros(SIZE, np.float64)}, "its bundle says float32"),
        ({"v": np.zeros(SIZE, np.float32)}, "is not from this bundle"),
        ({}, "lacks the tensor 'w'"),
    ],
)
def test_unusable_tensors(
    fleet: Fleet, tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    link = fleet[1]["desktop-1"]
    _, record, update = trained(link, tmp_path)
    change(update, record, save(tensors))
    with pytest.raises(RefusedError, match=message) as refused:
        send(link, 1, update)
    assert refused.value.code == "unusable-update"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": 0}, "at least one sample"),
        ({"version": 9}, "version 9, the coordinator takes 1"),
        ({"tensors": ()}, "tensor table is not that of its bundle"),
        ({"base": "f" * 64}, "Train the bundle again"),
    ],
)
def test_unusable_records(
    fleet: Fleet, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    link = fleet[1]["desktop-1"]
    _, record, update = trained(link, tmp_path)
    change(update, record, None, **fields)
    with pytest.raises(RefusedError, match=message):
        send(link, 1, update)


def test_no_record_and_no_tensor_file(fleet: Fleet, tmp_path: Path) -> None:
    link = fleet[1]["desktop-2"]
    with pytest.raises(RefusedError, match=r"This is not an update\.json"):
        link.send_update(1, b"{")
    _, record, update = trained(link, tmp_path)
    with pytest.raises(RefusedError, match=r"PUT update\.safetensors first"):
        link.send_update(1, (update / RECORD).read_bytes())
    change(update, record, b"these are no tensors")
    with pytest.raises(RefusedError, match="cannot be read"):
        send(link, 1, update)
    data = save({"w": np.zeros(SIZE, np.float32)})
    change(update, record, data)
    described = msgspec.json.decode((update / RECORD).read_bytes(), type=UpdateRecord)
    size = msgspec.structs.replace(described.file, size=1)
    change(update, described, file=size)
    with pytest.raises(RefusedError, match=f"announced 1 bytes and sent {len(data)}"):
        send(link, 1, update)


def test_uploads_are_cut_off_over_the_limit(fleet: Fleet, tmp_path: Path) -> None:
    server, links = fleet
    task(links["desktop-1"])
    (tmp_path / "big").write_bytes(bytes(4 * SIZE + (64 << 10) + 1))
    with pytest.raises(RefusedError, match=f"at most {4 * SIZE + (64 << 10)} bytes"):
        links["desktop-1"].send_tensors(1, tmp_path / "big")
    assert not list((server.config.state / "files").glob(".*"))


def test_the_same_update_again_is_fine_and_another_is_not(tmp_path: Path) -> None:
    with running(configured(tmp_path)) as server:
        link = enrol(server, tmp_path)["desktop-1"]
        _, record, update = trained(link, tmp_path / "a")
        send(link, 1, update)
        send(link, 1, update)
        change(update, record, samples=11)
        with pytest.raises(RefusedError, match="another update for round 1 already"):
            send(link, 1, update)


def test_tokens_and_secrets(fleet: Fleet, tmp_path: Path) -> None:
    server, _ = fleet
    with pytest.raises(AuthorisationError, match="This join token is unknown here"):
        device.join(server.url, "guess", "x", tmp_path / "a", print)
    with pytest.raises(AuthorisationError, match="used up: it is for 1 device of kind 'board'"):
        device.join(server.url, token(server.config, "board"), "x", tmp_path / "b", print)
    for call in ("work", "status"):
        with pytest.raises(AuthorisationError, match="No device here has this secret"):
            getattr(Link(server.url, "guess", print), call)()
    answer = urllib3.request("GET", f"{server.url}/v1/work")
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert answer.json()["code"] == "not-authorised"
    for file in ("operator.token", "tokens/board.token"):
        assert stat.S_IMODE((server.config.state / file).stat().st_mode) == 0o600


def test_joining_again(fleet: Fleet, tmp_path: Path) -> None:
    server, _ = fleet
    state = server.config.state.parent / "0"
    said: list[str] = []
    same = token(server.config, "desktop")
    assert device.join(server.url + "/", same, "x", state, said.append).device == "desktop-1"
    assert said == [f"machine 0 has joined {server.url} already, as desktop-1."]
    with pytest.raises(InputError) as error:
        device.join(server.url, token(server.config, "board"), "x", state, said.append)
    assert str(error.value) == (
        f"{state} belongs to desktop-1, which joined {server.url} with another token: give one "
        f"more device of this machine a folder of its own with --state, or remove {state} to leave "
        "as desktop-1."
    )
    assert stat.S_IMODE((state / "device.json").stat().st_mode) == 0o600
    with pytest.raises(InputError, match="belongs to the coordinator"):
        device.join("http://elsewhere:1", "t", "x", state, print)
    with pytest.raises(InputError, match="belongs to no coordinator yet"):
        device.run(tmp_path, "data.npz", print)


def test_other_requests_get_a_problem_too(fleet: Fleet) -> None:
    server, links = fleet
    secret = token(server.config, "board")
    headers = {"Authorization": f"Bearer {secret}"}
    answer = urllib3.request("GET", f"{server.url}/v1/nothing")
    assert (answer.status, answer.json()["code"]) == (404, "no-such-route")
    answer = urllib3.request("POST", f"{server.url}/v1/devices", json={}, headers=headers)
    assert answer.json() == {"code": "bad-request", "message": "body.name: Field required."}
    answer = urllib3.request(
        "POST", f"{server.url}/v1/devices", json={"name": "\n"}, headers=headers
    )
    assert answer.json()["code"] == "bad-name"
    with pytest.raises(RefusedError, match="is offered no file"):
        links["board-1"]._ask("GET", f"/files/{'0' * 64}", JoinRequest)


def test_the_api_describes_itself(fleet: Fleet) -> None:
    document = urllib3.request("GET", f"{fleet[0].url}/openapi.json").json()
    routes = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert routes == {
        ("post", "/v1/devices"),
        ("get", "/v1/work"),
        ("get", "/v1/files/{sha256}"),
        ("post", "/v1/progress"),
        ("put", "/v1/rounds/{round}/tensors"),
        ("post", "/v1/rounds/{round}/update"),
        ("get", "/v1/status"),
    }
    for methods in document["paths"].values():
        for route in methods.values():
            assert route["summary"]
            assert route["description"]
            assert route["security"] == [{"HTTPBearer": []}]
    schemas = document["components"]["schemas"]
    references = {part.split('"')[0] for part in json.dumps(document).split("/schemas/")[1:]}
    assert references <= schemas.keys()
    assert {"UpdateRecord", "TensorEntry", "Profile", "Work"} <= schemas.keys()


def test_a_port_in_use(fleet: Fleet, tmp_path: Path) -> None:
    port = int(fleet[0].url.rpartition(":")[2])
    config = configured(tmp_path, CONFIG.replace("port = 0", f"port = {port}"))
    with pytest.raises(InputError) as error:
        Server(config, VectorModel(), Path("fleet.toml"))
    assert str(error.value) == (
        f"Port {port} on 127.0.0.1 is in use: stop what uses it or set another `port` in "
        "fleet.toml."
    )


def test_a_host_of_somebody_else(tmp_path: Path) -> None:
    config = configured(tmp_path, f'host = "192.0.2.1"\n{CONFIG}')
    with pytest.raises(InputError, match=r"'192\.0\.2\.1' is no address of this machine"):
        Server(config, VectorModel(), Path("fleet.toml"))


def test_a_state_folder_in_use_or_of_another_fleet(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config), pytest.raises(InputError, match="stop the coordinator that runs on it"):
        Server(config, VectorModel(), Path("fleet.toml"))
    other = configured(tmp_path, CONFIG.replace("epochs = 1", "epochs = 2"))
    with pytest.raises(InputError, match="federation with another `training`"):
        Server(other, VectorModel(), Path("fleet.toml"))


def test_a_failure_of_the_rounds_ends_the_server(tmp_path: Path) -> None:
    model = VectorModel()
    model.weights[:] = np.inf
    server = Server(configured(tmp_path), model, Path("fleet.toml"), print)
    with pytest.raises(EdgeTailorError, match="its loss after round 0 is inf"):
        server.run()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("rounds = 3", "rounds = 3\nround = 4", "there is no key `round`; the keys here are model"),
        ("rounds = 3", "", "the key `rounds` is missing"),
        ("rounds = 3", "round = 3", "there is no key `round`; the keys here are model"),
        ("submodel", "submodels", r"there is no key `devices\[0\]\.submodels`; the keys here are"),
        ("rounds = 3", "rounds = 0", "`rounds` is 0: Input should be greater than or equal to 1"),
        ("epochs = 1", "epoch = 1", r"there is no key `training\.epoch`; the keys here are batch"),
        ("epochs = 1", "epochs = 0", r"\[training\] epochs must be at least 1; it is 0"),
        (
            "[training]",
            "[aggregation]\nweight = 'uniform'\n[training]",
            r"there is no key `aggregation\.weight`; the keys here are weights, temperature",
        ),
        (
            "[training]",
            "[aggregation]\nweights = 'equal'\n[training]",
            r"`aggregation\.weights` is 'equal': Input should be 'samples', 'uniform' or 'softmax'",
        ),
        ("[training]", "[aggregation]\nbeta = 0\n[training]", r"\[aggregation\] beta must be"),
        ('"full"', '"full:"', r"`devices\[0\]\.submodel` is 'full:': .* is no submodel spec"),
        ('"board"', '"Board"', r"`devices\[1\]\.name` is 'Board': String should match"),
        ('"board"', '"desktop"', "devices are named twice: desktop"),
        (
            "count = 2",
            "counts = 2",
            r"there is no key `devices\[0\]\.counts`; the keys here are na",
        ),
        ("port = 0", "port = 70000", "`port` is 70000: .* less than or equal to 65535"),
        ("rounds = 3", "rounds =", "is no TOML file"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in CONFIG
    with pytest.raises(InputError, match=message) as error:
        configured(tmp_path, CONFIG.replace(before, after, 1))
    assert str(error.value).startswith(f"{tmp_path / 'fleet.toml'}")
    assert "\n" not in str(error.value)


def test_the_aggregation_table(tmp_path: Path) -> None:
    assert configured(tmp_path).aggregation == AggregationPolicy()
    table = '[aggregation]\nweights = "softmax"\ntemperature = inf\nfactors = "act"\nbeta = 1.8\n'
    config = configured(tmp_path, CONFIG.replace("[training]", f"{table}[training]"))
    assert config.aggregation == AggregationPolicy("softmax", math.inf, "act", 1.8)


def test_paths_start_from_the_file(tmp_path: Path) -> None:
    config = configured(tmp_path, f'weights = "start.safetensors"\n{CONFIG}')
    assert config.weights == tmp_path / "start.safetensors"
    assert config.state == tmp_path / "state"
    with pytest.raises(InputError, match="No such file"):
        load_config(tmp_path / "nothing.toml")
