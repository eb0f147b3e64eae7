"""`edgetailor-agent` as a person meets it: whole outputs and exit codes of real processes."""

import hashlib
import json
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from bundles import (
    BATCH,
    CLASSES,
    FAMILIES,
    diverging,
    everything,
    rewrite,
    samples,
    write_data,
)
from commands import Done, interrupted, refusal, run
from device_agent.device_state import DeviceState, Identity
from device_agent.training import train_bundle

BundleOf = Callable[[str], Path]
LOST = (
    "This bundle has a personal model, which ends with this round: --personal FILE.safetensors "
    "keeps it.\n"
)
STOPPED = "\nInterrupted.\n"  # on a line of its own, behind the terminal's ^C
X = np.zeros(2, np.float32)
NUMBER = r"\d+\.\d+"
EXIT_CODES = """
  Exit codes:
    0    done
    2    usage or bad input
    3    export failed
    4    verification failed
    5    nothing fits
    6    connection or authorisation
    70   a fault of the program's own
    130  interrupted
"""


@pytest.fixture
def agent(tmp_path: Path) -> Callable[..., Done]:
    """Runs `edgetailor-agent` in the temporary folder."""
    return lambda *arguments: run("edgetailor-agent", *arguments, cwd=tmp_path)


Agent = Callable[..., Done]


def test_help_lists_commands_and_exit_codes(agent: Agent) -> None:
    done = agent("--help")
    assert (done.code, done.stderr) == (0, "")
    assert re.findall(r"^  (\w+)  +[A-Z]", done.stdout, re.M) == [
        "join", "profile", "run", "status", "train",
    ]  # fmt: skip
    assert done.stdout.endswith(EXIT_CODES)


@pytest.mark.parametrize("command", ["join", "profile", "run", "status", "train"])
def test_every_command_explains_itself(agent: Agent, command: str) -> None:
    done = agent(command, "--help")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: edgetailor-agent {command} ")
    undocumented = re.findall(r"^  --[a-z-]+(?: [A-Z]+)?$", done.stdout, re.M)
    assert undocumented == []


# train


def test_train(agent: Agent, bundle: Path, data: str) -> None:
    done = agent("train", bundle, "--data", data, "--out", "update", "--threads", "1")
    assert done.code == 0
    spec = FAMILIES[bundle.name.removeprefix("tiny-")]
    lost = LOST if spec == FAMILIES["cp"] else ""
    epochs = rf"epoch 1 of 2: loss {NUMBER}\nepoch 2 of 2: loss {NUMBER}\n"
    assert re.fullmatch(lost + epochs, done.stderr)
    assert re.fullmatch(
        rf"{spec}: 10 steps on 21 samples, loss {NUMBER} to {NUMBER}; update: update\n", done.stdout
    )


def test_train_as_json(agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path) -> None:
    done = agent("train", bundle_of("full"), "--data", data, "--out", "update", "--json")
    assert done.code == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "update/update.json").read_bytes())


def test_train_on_a_function_of_the_owners(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path
) -> None:
    code = "import numpy as np\ndef local():\n    d = np.load('d.npz')\n    return d['x'], d['y']\n"
    (tmp_path / "owners.py").write_text(code)
    x, y = samples(9, seed=1)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    done = agent("train", bundle_of("full"), "--data", "owners:local", "--out", "update")
    assert done.code == 0
    assert "4 steps on 9 samples" in done.stdout


def bad_data(folder: Path) -> str:
    x, _ = samples(5, seed=0)
    np.savez(folder / "bad.npz", x=x, y=np.full(5, CLASSES))
    return "bad.npz"


REFUSED = {
    "no bundle": r"nowhere is no bundle: manifest\.json cannot be read",
    "damaged bundle": r"train\.onnx was altered: its SHA-256 is not the manifest's",
    "no data": r"nowhere\.npz does not exist; give an \.npz file with x and y\.",
    "bad data": r"bad\.npz: the label 8 is outside the model's classes 0 to 7\.",
    "out exists": r"update exists already: give another place",
    "diverges": r"not finite.*[Ll]ower the learning rate",
    "negative seed": r"seed",
}


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path, case: str
) -> None:
    used, source, more = bundle_of("full"), data, []
    match case:
        case "no bundle":
            used = Path("nowhere")
        case "damaged bundle":
            used = shutil.copytree(used, tmp_path / "bundle")
            (used / "train.onnx").write_bytes((used / "train.onnx").read_bytes()[::-1])
        case "no data":
            source = "nowhere.npz"
        case "bad data":
            source = bad_data(tmp_path)
        case "out exists":
            (tmp_path / "update").mkdir()
        case "diverges":
            used = diverging(used, tmp_path / "bundle")
        case "negative seed":
            more = ["--seed", "-1"]
    before = everything(tmp_path)
    done = agent("train", used, "--data", source, "--out", "update", *more)
    assert re.search(REFUSED[case], refusal(done))
    assert everything(tmp_path) == before


def test_one_epoch_has_one_loss(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    short = shutil.copytree(bundle_of("full"), tmp_path / "bundle")
    rewrite(short, lambda manifest: manifest["schedule"][-1].update(epochs=1))
    write_data(tmp_path / "few.npz", count=2)
    done = agent("train", short, "--data", "few.npz", "--out", "update")
    assert done.code == 0
    heard = re.fullmatch(rf"epoch 1 of 1: loss ({NUMBER})\n", done.stderr)
    assert heard
    assert done.stdout == f"full: 1 step on 2 samples, loss {heard[1]}; update: update\n"


def test_a_personal_model_goes_from_round_to_round(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    def round_(number: int, *more: object) -> dict[str, np.ndarray]:
        out = f"update-{number}"
        done = agent(
            "train", bundle_of("cp"), "--data", data, "--out", out, "--threads", "1", *more
        )
        assert done.code == 0
        assert re.fullmatch(
            rf"epoch 1 of 2: loss {NUMBER}\nepoch 2 of 2: loss {NUMBER}\n", done.stderr
        )
        own = load_file(tmp_path / "own" / "me.safetensors")
        assert own.keys().isdisjoint(load_file(tmp_path / out / "update.safetensors"))
        return own

    keep = ("--personal", "own/me.safetensors")
    first, second = round_(1, *keep), round_(2, *keep)
    assert stat.S_IMODE((tmp_path / "own" / "me.safetensors").stat().st_mode) == 0o600
    kept = train_bundle(bundle_of("cp"), data, tmp_path / "a", threads=1).personal
    assert same(first, kept)
    kept = train_bundle(bundle_of("cp"), data, tmp_path / "b", threads=1, personal=kept).personal
    assert same(second, kept)
    assert not same(second, first)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (save({"p": X}), r"^me is no personal model of 'cp:2\.0' as this bundle has it: give each"),
        (b"text", r"^me is no readable personal model: .*\. Give the file that an earlier round"),
    ],
)
def test_a_personal_model_of_something_else(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "me").write_bytes(content)
    done = agent("train", bundle_of("cp"), "--data", data, "--out", "u", "--personal", "me")
    assert re.search(message, refusal(done))
    assert everything(tmp_path) == {"me": content}


def test_a_bundle_without_a_personal_model_leaves_the_file_alone(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    done = agent("train", bundle_of("full"), "--data", data, "--out", "u", "--personal", "me")
    assert done.code == 0
    assert not (tmp_path / "me").exists()


def test_train_replaces_an_update_by_force(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    command = ("train", bundle_of("full"), "--data", data, "--out", "update", "--threads", "1")
    assert agent(*command).code == 0
    first = everything(tmp_path)
    assert refusal(agent(*command)) == (
        "update exists already: give another place, or --force to replace it."
    )
    assert everything(tmp_path) == first
    done = agent(*command, "--seed", "1", "--force")
    assert done.code == 0
    assert re.fullmatch(rf"epoch 1 of 2: loss {NUMBER}\nepoch 2 of 2: loss {NUMBER}\n", done.stderr)
    assert re.fullmatch(
        rf"full: 10 steps on 21 samples, loss {NUMBER} to {NUMBER}; update: update\n", done.stdout
    )
    assert everything(tmp_path).keys() == first.keys()
    assert everything(tmp_path) != first


def test_force_leaves_alone_what_is_no_update(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    done = agent("train", bundle_of("full"), "--data", data, "--out", "photos", "--force")
    assert refusal(done) == (
        "photos is no update, so --force does not replace it: give another place."
    )
    assert everything(tmp_path) == {"photos": b"folder", "photos/cat.jpg": b"cat"}


def test_train_needs_data(agent: Agent, bundle_of: BundleOf) -> None:
    done = agent("train", bundle_of("full"), "--out", "update")
    assert refusal(done) == "Missing option '--data'."


# profile


def test_profile(agent: Agent, bundle: Path) -> None:
    done = agent("profile", bundle, "--threads", "1")
    assert (done.code, done.stderr) == (0, "")
    time = rf"{NUMBER} ms \(p10 {NUMBER}, p90 {NUMBER}, n 20\)"
    spec = FAMILIES[bundle.name.removeprefix("tiny-")]
    assert re.fullmatch(
        rf"{spec}, batch {BATCH}, threads 1, onnxruntime \S+ on \S+\n"
        rf"forward        {time}\n"
        rf"training step  {time}\n"
        rf"backprop       {NUMBER} ms \(training step minus forward\)\n"
        rf"process peak   {NUMBER} MB \(resident set, Python and runtime too\)\n"
        rf"above idle     {NUMBER} MB \(peak minus the idle process\)\n",
        done.stdout,
    )


def test_profile_as_json(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    done = agent("profile", bundle_of("slice"), "--json")
    assert (done.code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert set(found) == {
        "version", "submodel", "machine", "threads", "batch_size", "forward", "train",
        "peak_bytes", "peak_above_idle_bytes",
    }  # fmt: skip
    assert (found["version"], found["submodel"], found["threads"]) == (1, "slice:classifier", 0)
    assert found["batch_size"] == BATCH
    for name in ("forward", "train"):
        times = found[name]
        assert set(times) == {"median_s", "p10_s", "p90_s", "runs"}
        assert 0 < times["p10_s"] <= times["median_s"] <= times["p90_s"]
        assert times["runs"] == 20
    assert found["peak_bytes"] > found["peak_above_idle_bytes"] > 0
    assert set(found["machine"]) == {
        "system", "architecture", "processor", "cpu_count", "memory_bytes", "python", "runtime",
    }  # fmt: skip
    assert everything(tmp_path) == {}


def test_profile_refuses(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    assert "nowhere is no bundle" in refusal(agent("profile", "nowhere"))
    copy = shutil.copytree(bundle_of("full"), tmp_path / "bundle")
    (copy / "predict.onnx").write_bytes(b"no graph")
    rewrite(copy, lambda manifest: None)
    assert "predict.onnx is refused by onnxruntime" in refusal(agent("profile", copy))


# join, run, status


def nobody() -> str:
    """The URL of a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def joined(folder: Path, url: str) -> Path:
    """A state folder as `join` leaves it."""
    identity = Identity(
        url=url, device="board-1", secret="s", name="desk", submodel="full",
        token_sha256=hashlib.sha256(b"t").hexdigest(),
    )  # fmt: skip
    DeviceState(folder / "state").remember(identity)
    return folder / "state"


@pytest.mark.parametrize("command", [("status",), ("run", "--data", "local.npz")])
def test_before_joining(agent: Agent, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert refusal(agent(*command, "--state", "state")) == (
        "state belongs to no coordinator yet: run `edgetailor-agent join URL --token-file FILE` "
        "first."
    )
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(
    ("url", "token", "message"),
    [
        ("http://127.0.0.1:1", None, r"The token file token cannot be read: .*No such file"),
        ("http://127.0.0.1:1", "two words", "A token is one word of plain characters"),
        ("http://127.0.0.1:1", "", "A token is one word of plain characters"),
        ("127.0.0.1:8123", "t", r"'127\.0\.0\.1:8123' is no coordinator's URL: write it like http"),
        ("ftp://host", "t", "'ftp://host' is no coordinator's URL"),
    ],
)
def test_join_refuses(
    agent: Agent, tmp_path: Path, url: str, token: str | None, message: str
) -> None:
    if token is not None:
        (tmp_path / "token").write_text(token)
    done = agent("join", url, "--token-file", "token", "--state", "state")
    assert re.search(message, refusal(done))
    assert not (tmp_path / "state" / "device.json").exists()


def test_join_waits_for_a_coordinator_and_can_be_interrupted(tmp_path: Path) -> None:
    url = nobody()
    (tmp_path / "token").write_text("t\n")
    done, seconds = interrupted(
        "edgetailor-agent", "join", url, "--token-file", "token", "--state", "state",
        cwd=tmp_path, after="next try in 2 s",
    )  # fmt: skip
    assert done == Done(130, "", waiting(url, 1, 2) + STOPPED)
    assert seconds < 1
    assert everything(tmp_path / "state") == {}


def test_run_waits_for_its_coordinator(tmp_path: Path) -> None:
    url = nobody()
    done, seconds = interrupted(
        "edgetailor-agent", "run", "--data", "local.npz", "--state", joined(tmp_path, url),
        cwd=tmp_path, after="next try in 2 s",
    )  # fmt: skip
    talk = re.sub(r"(?m)^\[ +\d+\.\d s\] ", "", done.stderr)
    assert talk == waiting(url, 1, 2) + STOPPED
    assert (done.code, done.stdout) == (130, "")
    assert seconds < 1


def test_status_gives_up_on_a_coordinator_that_is_away(agent: Agent, tmp_path: Path) -> None:
    url = nobody()
    done = agent("status", "--state", joined(tmp_path, url))
    assert done == Done(
        6,
        "",
        waiting(url, 1, 2)
        + f"Error: Coordinator at {url} is not there (connection refused); gave up after 3 s. "
        "Check the URL, and that `edgetailor serve` runs there.\n",
    )


def waiting(url: str, *seconds: int) -> str:
    return "".join(
        f"Coordinator at {url} is not there (connection refused); next try in {s} s\n"
        for s in seconds
    )


STATUS = {
    "version": 1,
    "state": "training",
    "round": 3,
    "rounds": 12,
    "expected_devices": 2,
    "devices": [
        {
            "device": "board-1", "name": "desk", "submodel": "low-rank:0.25", "state": "training",
            "loss": 1.25, "rounds_trained": 2, "bytes_down": 10, "bytes_up": 5, "idle_s": 0.5,
        },
        {
            "device": "phone-1", "name": "pocket", "submodel": "cp:2.0", "state": "waiting",
            "loss": None, "rounds_trained": 2, "bytes_down": 10, "bytes_up": 5, "idle_s": 0.5,
        },
    ],
    "history": [{"round": 2, "accuracy": 0.8125, "loss": 0.7, "updates": 2}],
    "kinds": 2,
    "kinds_ready": 2,
}  # fmt: skip


@pytest.fixture
def coordinator() -> Iterator[str]:
    """The URL of a coordinator that knows one device, whose secret is `s`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == "Bearer s"
            problem = {"code": "unknown-device", "message": "This device has left; join again."}
            body = json.dumps(STATUS if allowed else problem).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_status(agent: Agent, tmp_path: Path, coordinator: str) -> None:
    state = joined(tmp_path, coordinator)
    assert agent("status", "--state", state) == Done(
        0,
        "round 3 of 12, training, global accuracy 81.2%\n"
        "  board-1        low-rank:0.25    training     loss 1.2500\n"
        "  phone-1        cp:2.0           waiting\n",
        "",
    )
    done = agent("status", "--state", state, "--json")
    assert (done.code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == STATUS


def test_status_of_a_device_that_was_removed(
    agent: Agent, tmp_path: Path, coordinator: str
) -> None:
    identity = Identity(url=coordinator, device="d", secret="old", name="n", submodel="full")
    DeviceState(tmp_path / "state").remember(identity)
    done = agent("status", "--state", "state")
    assert refusal(done, code=6) == "This device has left; join again."


def test_joining_twice_changes_nothing(agent: Agent, tmp_path: Path, coordinator: str) -> None:
    state = joined(tmp_path, coordinator)
    before = everything(state)
    (tmp_path / "token").write_text("t")
    done = agent("join", coordinator, "--token-file", "token", "--state", state)
    assert done == Done(
        0,
        f"board-1: now edgetailor-agent run --data FILE.npz --state {state}\n",
        f"desk has joined {coordinator} already, as board-1.\n",
    )
    (tmp_path / "other").write_text("another kind's")
    other = agent("join", coordinator, "--token-file", "other", "--state", state)
    assert refusal(other) == (
        f"{state} belongs to board-1, which joined {coordinator} with another token: give one more "
        f"device of this machine a folder of its own with --state, or remove {state} to leave as "
        "board-1."
    )
    other = agent("join", nobody(), "--token-file", "token", "--state", state)
    assert f"{state} belongs to the coordinator {coordinator}" in refusal(other)
    assert everything(state) == before
