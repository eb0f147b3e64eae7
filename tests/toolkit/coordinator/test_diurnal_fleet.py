"""Devices that come and go at a coordinator that is killed: a short life of a small fleet."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from commands import free_port
from diurnal_fleet import DiurnalFleet, Habits, running
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.server import Server
from vector_fleet import CONFIG, SIZE, VectorModel, configured
from waiting_fleet import enrolled, update_of

SPEED, DEVICES, GOAL, ROUNDS = 40.0, 24, 6, 10
FLEET = f"""
{CONFIG[: CONFIG.index("[training]")].replace("rounds = 3", f"rounds = {ROUNDS}")}
deadline_s = 3.0
KEYS

[[devices]]
name = "device"
submodel = "full"
count = {DEVICES}
"""


def serve(file: Path) -> None:
    Server(load_config(file), VectorModel(), file).run()


def added(device: int, weights: bytes, manifest: bytes) -> tuple[bytes, bytes]:
    """An update whose weights are 1 more than those of the bundle."""
    return update_of({"w": load(weights)["w"] + np.float32(1)}, manifest, samples=10)


async def live(fleet: DiurnalFleet, folder: Path, kill_after: int) -> list[int]:
    """How many updates each round took; the coordinator is killed once, in an open round."""
    with running(folder / "fleet.toml", serve, SPEED) as coordinator:
        life = asyncio.create_task(fleet.run())
        while coordinator.ended < kill_after:
            await asyncio.sleep(0.02)
            assert not life.done()
        await asyncio.to_thread(coordinator.kill)
        coordinator.start()
        await life
        return [one.updates for one in coordinator.rounds()]


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [f"clients_per_round = {GOAL}\nover_selection = 2.0", f'mode = "async"\nbuffer_size = {GOAL}'],
    ids=["selected", "asynchronous"],
)
def test_rounds_go_on(seed: int, tmp_path: Path, keys: str) -> None:
    """Each update adds 1 to its version, so the model tells how many counted, and from where."""
    port = free_port()
    text = FLEET.replace("port = 0", f"port = {port}").replace("KEYS", keys)
    config = configured(tmp_path, text)
    habits = Habits(
        speed=SPEED, training_s=(8, 24), away=0.3, day_s=300, dropping=0.2, silent_s=(60, 200),
        seed=seed,
    )  # fmt: skip
    secrets = enrolled(config.state, DEVICES)
    fleet = DiurnalFleet(f"http://127.0.0.1:{port}", secrets, habits, added)
    updates = asyncio.run(asyncio.wait_for(live(fleet, tmp_path, 4), 120))
    assert fleet.counts["dropped"] > 0
    # The receipt of an update that counted may be lost with the coordinator.
    sent, refused = fleet.counts["sent"], fleet.counts["refused"]
    assert sent <= sum(updates) <= sent + refused
    assert sum(count < GOAL for count in updates[1:]) <= 1
    model = load_file(config.state / "global.safetensors")["w"]
    if "async" in keys:
        assert 0 < model.max() <= ROUNDS
    else:
        np.testing.assert_array_equal(model, np.full(SIZE, ROUNDS, np.float32))
