"""A coordinator that is killed again and again, while devices are planned for, join and train."""

import random
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from commands import free_port, kept_killing
from device_agent.federation import round_loop
from device_agent.federation.identity.state_folder import Identity
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from made_calibration import DEVICE
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import ClientError
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.server import Server
from vector_fleet import CONFIG, ROUNDS, VectorModel, configured, running, token, train_vector

HEAD = CONFIG[: CONFIG.index("[[devices]]")]
FLEET = f'{HEAD}[[devices]]\nname = "phone"\nsubmodel = "auto"\ncount = 3\n'


class Chooser:
    """Plans "full" as long as `changed` is not there, then something else."""

    def __init__(self, folder: Path) -> None:
        self.changed = folder / "changed"

    def submodel(self, kind: DeviceKind, profile: DeviceProfile) -> str:
        return "width:0.5" if self.changed.exists() else "full"


def serve(folder: Path) -> None:
    """A coordinator in this process, until it is killed."""
    config = load_config(folder / "fleet.toml")
    Server(config, VectorModel(), Path("fleet.toml"), Chooser(folder)).run()


def joined(config: CoordinatorConfig, url: str, state: Path) -> Identity:
    """Joined, however often the answer is lost on the way."""
    while True:
        try:
            bearer = token(config, "phone")
            return join(url, bearer, state.name, state, measure=lambda *_: DEVICE)
        except ClientError:
            continue


def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    port = free_port()
    config = configured(tmp_path / "c", FLEET.replace("port = 0", f"port = {port}"))
    with running(config, planner=Chooser(tmp_path / "c")):
        pass  # makes the tokens
    url, names = f"http://127.0.0.1:{port}", ["a", "b", "c"]
    enrolled: dict[str, Identity] = {}
    sent: dict[str, int] = {}

    data = str(config.held_out)

    def take_part(name: str) -> None:
        enrolled[name] = joined(config, url, tmp_path / name)
        (tmp_path / "c" / "changed").touch()  # who has a submodel keeps it
        options = RunOptions(data=data, state=tmp_path / name)
        patient = {"sleep": lambda seconds: time.sleep(0.1)}
        sent[name] = round_loop.run(options, train=train_vector, **patient)

    with kept_killing(serve, tmp_path / "c", random.Random(seed)) as kills:
        threads = [threading.Thread(target=take_part, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert kills() > 0
    assert sorted(sent) == names
    with running(config, planner=Chooser(tmp_path / "c")) as server:
        status = server.coordinator.status()
        registry = server.coordinator.store.registry
        assert {d.device for d in status.devices} == {"phone-1", "phone-2", "phone-3"}
        assert {d.id: d.submodel for d in registry.devices()} == {
            identity.device: identity.submodel for identity in enrolled.values()
        }
    assert (status.state, [r.updates for r in status.history]) == ("finished", [0, 3, 3, 3])
    assert [d.rounds_trained for d in status.devices] == [ROUNDS] * 3
    expected = np.full(1000, ROUNDS, np.float32)
    np.testing.assert_array_equal(load_file(config.state / "global.safetensors")["w"], expected)
    assert not list((config.state / "files").glob(".*"))
    assert not list((config.state / "incoming").glob(".*"))
