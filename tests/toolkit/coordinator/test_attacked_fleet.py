"""An attack on a real coordinator over real sockets, with real agents beside the hostile device."""

import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from commands import command, environment
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.formats.evaluation_counts import DIVERGED
from device_agent.formats.update import TENSORS, write_update
from hostile_fleet import samples
from models_for_tests import INPUT_SHAPE
from profiles.errors import UpdateError
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from trainings import train_bundle
from vector_fleet import CONFIG, Trained, assert_soon, configured, running, token, train_vector

ATTACKED = f"""
model = "models_for_tests:smooth_cnn"
input_shape = {list(INPUT_SHAPE)}
rounds = 2
held_out = "held_out.npz"
port = 0

[training]
batch_size = 8
learning_rate = 0.05

[[devices]]
name = "board"
submodel = "full"
count = 3
"""


def attacked(folder: Path) -> CoordinatorConfig:
    x, y = samples(64, 0)
    np.savez(folder / "held_out.npz", x=x, y=y)
    (folder / "fleet.toml").write_text(ATTACKED)
    return load_config(folder / "fleet.toml")


def test_two_agents_train_on_while_the_third_device_sends_1e20(tmp_path: Path) -> None:
    config = attacked(tmp_path)
    server = Server(config, federation(config), tmp_path / "fleet.toml")
    serving = threading.Thread(target=server.run)
    serving.start()
    agents = []
    try:
        secrets = [
            join(server.url, token(config, "board"), name, tmp_path / name).secret
            for name in ("hostile", "one", "two")
        ]
        agents = [
            subprocess.Popen(
                command("edgetailor-agent", "run", "--data", "held_out.npz", "--state", name),
                cwd=tmp_path,
                env=environment(),
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in ("one", "two")
        ]
        hostile = CoordinatorClient(server.url, secrets[0])
        for round_ in (1, 2):
            attack(hostile, round_, tmp_path / str(round_), str(tmp_path / "held_out.npz"))
        said = [agent.communicate(timeout=300)[1] for agent in agents]
        status = server.coordinator.status()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        server.stop()
        serving.join()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [(result.updates, list(result.left_out)) for result in status.history[1:]] == [
        (2, ["board-1"]), (2, ["board-1"]),
    ]  # fmt: skip
    assert "'conv.weight' contains numbers up to 1e+20" in str(status.devices[0].note)
    assert status.history[2].loss < status.history[0].loss


def attack(link: CoordinatorClient, round_: int, folder: Path, data: str) -> None:
    """Train as an honest device, and send another tensor."""
    assert_soon(lambda: (link.work().state, link.work().round) == ("train", round_), 200)
    work = link.work()
    for offer in work.files:
        link.download(offer, folder / "bundle" / offer.name)
    record = train_bundle(folder / "bundle", data, folder / "update").record
    arrays = load_file(folder / "update" / TENSORS)
    arrays["conv.weight"] = np.full_like(arrays["conv.weight"], 1e20)
    shutil.rmtree(folder / "update")
    write_update(folder / "update", record, arrays)
    link.send_tensors(round_, folder / "update" / TENSORS)
    link.send_update(round_, (folder / "update" / "update.json").read_bytes())


def test_an_agent_reports_at_once_that_its_training_diverged_and_trains_the_model_before(
    tmp_path: Path, said: list[str]
) -> None:
    alone = CONFIG[: CONFIG.rindex("[[devices]]")].replace("count = 2", 'fallback = "slice:0.2"')
    starts: list[float] = []

    def train(folder: Path, data: str, out: Path, **options: object) -> Trained:
        starts.append(float(load_file(folder / "weights.safetensors")["w"].max()))
        if starts[-1] > 0:
            raise UpdateError(DIVERGED, code="update.diverged")
        return train_vector(folder, data, out, **options)  # type: ignore[arg-type]

    with running(configured(tmp_path / "coordinator", alone)) as server:
        join(server.url, token(server.config, "desktop"), "desk", tmp_path / "state")
        options = RunOptions(
            data=str(tmp_path / "coordinator" / "held_out.npz"), state=tmp_path / "state"
        )
        sent = round_loop.run(options, train=train, sleep=lambda seconds: None)
        status = server.coordinator.status()
    assert (sent, starts) == (3, [0.0, 1.0, 0.0, 1.0, 0.0])
    assert said.count(f"Training full failed: {DIVERGED}") == 2
    assert not any(line.startswith("Trying again in") for line in said)
    assert status.devices[0].submodel == "full"  # a smaller one would not help
