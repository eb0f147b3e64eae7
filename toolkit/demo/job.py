"""The demo from the first scan to the report."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from device_agent.files import write_file
from device_agent.protocol import Status
from profiles.errors import InputError
from profiles.profile import Profile
from toolkit.demo import costs, data, fleet, settings
from toolkit.demo.curve import draw
from toolkit.demo.display import display
from toolkit.demo.folder import DemoFolder
from toolkit.demo.processes import Processes, interruptible
from toolkit.demo.report import as_json
from toolkit.demo.result import DemoResult, DeviceReport
from toolkit.demo.settings import Member
from toolkit.tables import Stages

Say = Callable[[str], None]


def run_demo(out: Path, *, rounds: int, seed: int, all_full: bool, force: bool) -> DemoResult:
    """Train one model on a whole fleet on this machine, and leave everything in the folder `out`.

    `all_full` gives every device the full model. Raises InputError where `out` exists (with
    `force`: where no demo made it), EdgeTailorError where a process of the fleet fails. However
    it ends, no process stays behind.
    """
    if seed < 0:
        raise InputError(f"A seed is a whole number from 0 up; it is {seed}.")
    start, say = time.monotonic(), Stages()
    folder = DemoFolder(out)
    folder.create(force)
    members = settings.members(settings.fleet(all_full))
    with interruptible(), Processes(folder.logs) as processes:
        say(f"Dealing the digits out to {len(members)} devices")
        held_out, samples = deal_out(folder, members, seed)
        status = federate(folder, processes, members, rounds, seed, say)
        say("Measuring each submodel on the quiet machine")
        profiles = costs.measure(folder, processes, members)
    devices = device_reports(members, samples, status, profiles)
    result = DemoResult(
        out=out,
        seed=seed,
        all_full=all_full,
        held_out_samples=held_out,
        elapsed_s=time.monotonic() - start,
        history=tuple(status.history),
        devices=devices,
    )
    draw(result, folder.curve)
    write_file(folder.report, json.dumps(as_json(result), indent=1).encode() + b"\n")
    return result


def deal_out(folder: DemoFolder, members: Sequence[Member], seed: int) -> tuple[int, list[int]]:
    """Write the data files; returns how many samples are held out, and how many each device has."""
    digits = data.digits()
    held_out, parts = data.deal(digits.y, len(members), settings.HELD_OUT, settings.ALPHA, seed)
    digits[held_out].save(folder.held_out)
    for member, part in zip(members, parts, strict=True):
        digits[part].save(folder.data_of(member.name))
    return len(held_out), [len(part) for part in parts]


def federate(
    folder: DemoFolder,
    processes: Processes,
    members: Sequence[Member],
    rounds: int,
    seed: int,
    say: Say,
) -> Status:
    """All rounds, and what they leave: the bundles and the global model."""
    say("Starting the coordinator")
    kinds = list({member.kind.name: member.kind for member in members}.values())
    coordinator, link = fleet.start_coordinator(folder, processes, kinds, rounds, seed)
    say(f"Starting {len(members)} agents, while training steps are turned into graphs")
    agents = fleet.start_agents(folder, processes, members, link.url, seed)
    with display([member.name for member in members], say) as show:
        fleet.watch(link, processes.pause, show)
    status = fleet.finish(link, processes, coordinator, agents)
    costs.keep_bundles(folder, members)
    shutil.copyfile(folder.coordinator / folder.model.name, folder.model)
    return status


def device_reports(
    members: Sequence[Member],
    samples: Sequence[int],
    status: Status,
    profiles: Mapping[str, Profile],
) -> tuple[DeviceReport, ...]:
    """Everything known about each device, in the order of the fleet."""
    sizes = costs.sizes(members)
    seen = {device.name: device for device in status.devices}
    return tuple(
        DeviceReport(
            name=member.name,
            submodel=member.kind.submodel,
            samples=count,
            params=sizes[member.kind.submodel].params,
            capacity=sizes[member.kind.submodel].capacity,
            bytes_down=seen[member.name].bytes_down,
            bytes_up=seen[member.name].bytes_up,
            profile=profiles[member.kind.submodel],
        )
        for member, count in zip(members, samples, strict=True)
    )
