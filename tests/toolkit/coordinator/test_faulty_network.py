"""Agents behind a proxy that cuts, delays and truncates at random, in both directions."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from faulty_proxy import at_random, proxy
from profiles.errors import ClientError
from vector_fleet import CONFIG, VectorModel, configured, running, token, train_vector

HEAD = CONFIG[: CONFIG.index("[[devices]]")]
KIND = '[[devices]]\nname = "phone"\nsubmodel = "full"\ncount = {}\n'
CLEAN = 0.2
"""Share of connections without a fault."""


@pytest.mark.parametrize(
    ("agents", "rounds", "numbers"),
    [(3, 3, 20_000), pytest.param(20, 10, 200_000, marks=pytest.mark.long)],
)
def test_every_round_has_every_update(
    tmp_path: Path, seed: int, agents: int, rounds: int, numbers: int
) -> None:
    text = HEAD.replace("rounds = 3", f"rounds = {rounds}") + KIND.format(agents)
    config = configured(tmp_path / "c", text)
    sent: dict[str, int] = {}

    def take_part(url: str, state: Path) -> None:
        while True:
            try:  # a join is not repeated by itself once it may have reached the coordinator
                join(url, token(config, "phone"), state.name, state)
                break
            except ClientError:
                continue
        options = RunOptions(data=str(config.held_out), state=state)
        patient = {"sleep": lambda seconds: time.sleep(0.05)}
        sent[state.name] = round_loop.run(options, train=train_vector, **patient)

    # Anywhere between the first byte of a request and the end of the weights.
    faults = at_random(seed, 2 * numbers, 4 * numbers, CLEAN)
    with (
        running(config, VectorModel(numbers)) as server,
        proxy(server.url, faults) as (url, carried),
    ):
        names = [f"agent{number}" for number in range(agents)]
        threads = [
            threading.Thread(target=take_part, args=(url, tmp_path / name), daemon=True)
            for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(550)
        status = server.coordinator.status()
        incoming = list((config.state / "incoming").iterdir())
    print(f"{agents} agents, {rounds} rounds: {carried}")
    assert sorted(sent) == sorted(names)
    assert (status.state, [r.updates for r in status.history]) == (
        "finished",
        [0] + rounds * [agents],
    )
    assert all(result.left_out == {} for result in status.history)
    assert [device.rounds_trained for device in status.devices] == [rounds] * agents
    expected = np.full(numbers, rounds, np.float32)
    np.testing.assert_array_equal(load_file(config.state / "global.safetensors")["w"], expected)
    assert carried.cut > agents
    assert len(incoming) == 0
