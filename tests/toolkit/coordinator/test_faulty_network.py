"""Agents behind a proxy that cuts, delays and truncates at random, in both directions."""

import multiprocessing
import threading
import time
from functools import partial
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


def take_part(url: str, bearer: str, data: str, state: Path) -> None:
    """An agent, from its join to the last round."""
    while True:
        try:  # a join is not repeated by itself once it may have reached the coordinator
            join(url, bearer, state.name, state)
            break
        except ClientError:
            continue
    options = RunOptions(data=data, state=state)
    round_loop.run(options, train=train_vector, sleep=lambda seconds: time.sleep(0.05))


@pytest.mark.parametrize(
    ("agents", "rounds", "numbers", "processes"),
    [(3, 3, 20_000, False), pytest.param(20, 10, 200_000, True, marks=pytest.mark.long)],
)
def test_every_round_has_every_update(
    tmp_path: Path, seed: int, agents: int, rounds: int, numbers: int, processes: bool
) -> None:
    text = HEAD.replace("rounds = 3", f"rounds = {rounds}") + KIND.format(agents)
    config = configured(tmp_path / "c", text)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toolkit.coordinator.server", "vector_fleet"])
    start = context.Process if processes else partial(threading.Thread, daemon=True)
    with (
        running(config, VectorModel(numbers)) as server,
        proxy(lambda: server.url, at_random(seed, 4 * numbers)) as (url, carried),
    ):
        shared = (url, token(config, "phone"), str(config.held_out))
        made = [
            start(target=take_part, args=(*shared, tmp_path / f"agent{number}"))
            for number in range(agents)
        ]
        for agent in made:
            agent.start()
        for agent in made:
            agent.join(550)
        status = server.coordinator.status()
        incoming = list((config.state / "incoming").iterdir())
    print(f"{agents} agents, {rounds} rounds: {carried}")
    assert status.state == "finished"
    assert [result.updates for result in status.history] == [0] + rounds * [agents]
    assert all(result.left_out == {} for result in status.history)
    assert [device.rounds_trained for device in status.devices] == [rounds] * agents
    assert {device.name for device in status.devices} == {f"agent{n}" for n in range(agents)}
    expected = np.full(numbers, rounds, np.float32)
    np.testing.assert_array_equal(load_file(config.state / "global.safetensors")["w"], expected)
    assert carried.cut > (agents * rounds if processes else agents)
    assert incoming == []
    assert not any(agent.is_alive() for agent in made)
    if processes:
        assert [agent.exitcode for agent in made] == [0] * agents
