"""The federation of the demo: a coordinator and an agent for each device, as real processes."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.protocol.fleet import Status
from profiles.errors import EdgeTailorError
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.join_links import ADDRESS, token_file
from toolkit.coordinator.startup_message import OPERATOR
from toolkit.demo import demo_settings
from toolkit.demo.child_processes import Child, Processes
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_settings import THREADS, Member
from toolkit.demo.live_display import Show

SERVER = "toolkit.cli"
AGENT = "device_agent.cli"
START_S = 120.0
"""How long the coordinator may take to start, in seconds."""
SILENCE_S = 60.0
"""How long a running coordinator may take to answer a request, in seconds."""
END_S = 60.0
"""How long processes may take to end after the last round, in seconds."""
LOOK_S = 0.5
SEEDS = 1000
"""The seeds of the devices of a demo count up from seed * SEEDS."""


def start_coordinator(
    folder: DemoFolder, processes: Processes, kinds: Sequence[DeviceKind], rounds: int, seed: int
) -> tuple[Child, CoordinatorClient]:
    """Start `edgetailor serve` on a free port.

    Returns:
        The process, and a client with the operator's token.

    Raises:
        EdgeTailorError: The coordinator did not start within `START_S` seconds.
    """
    folder.config.write_text(config_text(folder, kinds, rounds, seed))
    child = processes.start("coordinator", SERVER, ["serve", folder.config])
    address = folder.coordinator / ADDRESS
    until = time.monotonic() + START_S
    while not address.exists():
        if time.monotonic() > until:
            raise EdgeTailorError(
                "The coordinator did not start within {limit_s:.0f} s; see {log}.",
                code="demo.process-timeout",
                process=child.name,
                limit_s=START_S,
                log=str(child.log),
            )
        processes.pause(0.1)
    token = (folder.coordinator / OPERATOR).read_text().strip()
    link = CoordinatorClient(
        address.read_text().strip(), token, patience_s=SILENCE_S, sleep=processes.pause
    )
    return child, link


def start_agents(
    folder: DemoFolder, processes: Processes, members: Sequence[Member], url: str, seed: int
) -> list[Child]:
    """Enrol every device, then start its agent."""
    joining = [processes.start(m.name, AGENT, join_arguments(folder, m, url)) for m in members]
    processes.finish(joining, END_S)
    return [
        processes.start(member.name, AGENT, run_arguments(folder, member, SEEDS * seed + number))
        for number, member in enumerate(members)
    ]


def watch(link: CoordinatorClient, pause: Callable[[float], None], show: Show) -> None:
    """Show the fleet's status until the last round is over."""
    while (status := link.status()).state != "finished":
        show(status)
        pause(LOOK_S)
    show(status)


def finish(
    link: CoordinatorClient, processes: Processes, coordinator: Child, agents: Sequence[Child]
) -> Status:
    """Wait for the agents, then stop the coordinator. Returns the fleet's last status."""
    processes.finish(agents, END_S)
    status = link.status()
    processes.stop(coordinator, END_S)
    return status


def config_text(folder: DemoFolder, kinds: Iterable[DeviceKind], rounds: int, seed: int) -> str:
    """The coordinator's TOML file. Its paths are relative to its own folder."""
    top = {
        "model": demo_settings.MODEL,
        "input_shape": list(demo_settings.INPUT_SHAPE),
        "rounds": rounds,
        "held_out": _relative(folder.held_out, folder),
        "state": _relative(folder.coordinator, folder),
        "port": 0,  # any free port: the coordinator writes its address to a file
        "seed": seed,
    }
    lines = [*_table(top), "", "[training]", *_table(asdict(demo_settings.TRAINING))]
    lines += ["", "[evaluation]", *_table({"share": demo_settings.EVALUATION_SHARE})]
    for kind in kinds:
        lines += ["", "[[devices]]", *_table(kind.model_dump(exclude_none=True))]
    return "\n".join(lines) + "\n"


def join_arguments(folder: DemoFolder, member: Member, url: str) -> list[object]:
    """The arguments with which `edgetailor-agent` enrols `member`."""
    token = token_file(folder.coordinator, member.kind.name)
    state = folder.state_of(member.name)
    return ["join", url, "--token-file", token, "--name", member.name, "--state", state]


def run_arguments(folder: DemoFolder, member: Member, seed: int) -> list[object]:
    """The arguments with which `edgetailor-agent` takes part in the rounds as `member`."""
    data, state = folder.data_of(member.name), folder.state_of(member.name)
    return ["run", "--data", data, "--state", state, "--threads", THREADS, "--seed", seed]


def _relative(path: Path, folder: DemoFolder) -> str:
    return str(path.relative_to(folder.root))


def _table(values: dict[str, object]) -> list[str]:
    """TOML lines. Strings, numbers and lists are written the same in JSON and TOML.

    TOML has no null, so values that are None are left out.
    """
    given = {key: value for key, value in values.items() if value is not None}
    return [f"{key} = {json.dumps(value)}" for key, value in given.items()]
