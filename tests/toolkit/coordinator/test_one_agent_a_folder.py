"""Agents that are killed during a join, and several agents on one state folder."""

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundles import everything
from device_agent.federation import round_loop
from device_agent.federation.membership import join, leave
from device_agent.federation.run_options import RunOptions
from killing import Job, die_at
from refusals import refused
from toolkit.coordinator.server import Server
from vector_fleet import CONFIG, assert_soon, configured, running, token, train_vector

FEW = CONFIG[: CONFIG.index("[[devices]]")] + '[[devices]]\nname = "board"\nsubmodel = "full"\n'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(configured(tmp_path / "c", FEW)) as started:
        yield started


def join_and_die(url: str, bearer: str, state: Path, write: int, before: bool) -> None:
    """Join in this process, which is killed at its write number `write`."""
    die_at(Job("", "", "", stop=write, before=before))
    join(url, bearer, "desk", state)


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False])
def test_a_join_that_is_killed_at_any_write(server: Server, tmp_path: Path, before: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["toolkit.coordinator.server", "device_agent.federation.membership"]
    )
    bearer, write, code = token(server.config, "board"), 0, -9
    while code == -9:
        write += 1
        state = tmp_path / str(write)
        arguments = (server.url, bearer, state, write, before)
        process = context.Process(target=join_and_die, args=arguments)
        process.start()
        process.join(30)
        code = process.exitcode
        again = join(server.url, bearer, "desk", state)  # the token is for one device
        assert [d.device for d in server.coordinator.status().devices if d.state != "left"] == [
            again.device
        ]
        assert set(everything(state)) == {"device.json", "device.key"}
        leave(state)
        assert not state.exists()
    assert code == 0
    assert write > 8


def test_one_agent_a_folder(server: Server, tmp_path: Path, said: list[str]) -> None:
    state, going_on = tmp_path / "a", threading.Event()
    options = RunOptions(data=str(server.config.held_out), state=state)

    def train(*arguments: object, **options: object) -> object:
        assert going_on.wait(20)
        return train_vector(*arguments, **options)  # type: ignore[arg-type]

    bearer = token(server.config, "board")
    join(server.url, bearer, "desk", state)
    agent = threading.Thread(
        target=round_loop.run, args=(options,), kwargs={"train": train, "sleep": lambda _: None}
    )
    agent.start()
    assert_soon(lambda: "Round 1: training" in said)
    with refused("state.in-use", path=str(state)):
        round_loop.run(options)
    with refused("state.in-use", path=str(state)):
        join(server.url, bearer, "desk", state, replace=True)
    assert join(server.url, bearer, "desk", state).device == "board-1"  # changes nothing
    going_on.set()
    agent.join(30)
    assert said[-1] == "The last round is over; 3 updates sent since this agent started."
    assert round_loop.run(options) == 0
