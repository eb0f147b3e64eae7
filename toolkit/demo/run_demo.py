"""Run the whole demo, from the data to the report."""

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.formats.atomic_files import write_file
from device_agent.formats.protocol import Status
from profiles.documents.bundle_profile import Profile
from profiles.errors import InputError
from toolkit.demo import demo_fleet, demo_settings, measurements
from toolkit.demo.baselines import Baselines
from toolkit.demo.child_processes import Processes, interruptible
from toolkit.demo.demo_charts import draw
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_result import DemoResult, DeviceReport, TrainingMemory
from toolkit.demo.demo_settings import Member
from toolkit.demo.demo_table import as_json
from toolkit.demo.digits_data import write_data
from toolkit.demo.live_display import display

logger = logging.getLogger(__name__)

BASELINES_S = 1800.0
"""Time limit of training the baselines, in seconds."""


def run_demo(out: Path, *, rounds: int, seed: int, all_full: bool, force: bool) -> DemoResult:
    """Train one model on a whole fleet on this machine. No process outlives this function.

    Args:
        out: The folder for everything that the demo makes.
        rounds: How many rounds to train.
        seed: Seed of the data split and of the training.
        all_full: Give every device the full model.
        force: Replace the folder of an earlier demo.

    Returns:
        The figures that the report shows.

    Raises:
        InputError: `out` exists; with `force`, `out` exists and no demo wrote it.
        EdgeTailorError: A process of the fleet failed.
    """
    if seed < 0:
        raise InputError(
            "Invalid seed {value}: use a whole number of at least 0.",
            code="option.invalid-value",
            option="seed",
            value=seed,
        )
    folder = DemoFolder(out)
    folder.create(force)
    job = Job(folder, demo_settings.members(demo_settings.fleet(all_full)), rounds, seed)
    with interruptible(), Processes(folder.logs) as processes:
        held_out, samples = job.distribute_data()
        status = job.federate(processes)
        logger.info("Measuring each submodel, one after another")
        profiles = measurements.profile_fleet(folder, processes, job.members)
        baselines, memory = job.compare(processes, all_full)
    devices = device_reports(job.members, samples, status, profiles)
    result = DemoResult(
        out=out,
        seed=seed,
        all_full=all_full,
        held_out_samples=held_out,
        elapsed_s=time.monotonic() - job.start,
        history=tuple(status.history),
        devices=devices,
        baselines=baselines,
        larger_model=memory,
    )
    draw(result, folder.curve)
    write_file(folder.report, json.dumps(as_json(result), indent=1).encode() + b"\n")
    return result


@dataclass(frozen=True)
class Job:
    """A running demo. `start` is in seconds of `time.monotonic`."""

    folder: DemoFolder
    members: Sequence[Member]
    rounds: int
    seed: int
    start: float = field(default_factory=time.monotonic)

    def distribute_data(self) -> tuple[int, list[int]]:
        """Write the data files.

        Returns how many samples are held out, and how many samples each device has.
        """
        logger.info(f"Distributing the digits over {len(self.members)} devices")
        return write_data(self.folder, [member.name for member in self.members], self.seed)

    def federate(self, processes: Processes) -> Status:
        """Run all rounds and keep the bundles and the global model. Returns the last status."""
        folder, members = self.folder, self.members
        logger.info("Starting the coordinator")
        kinds = list({member.kind.name: member.kind for member in members}.values())
        coordinator, link = demo_fleet.start_coordinator(
            folder, processes, kinds, self.rounds, self.seed
        )
        logger.info(f"Starting {len(members)} agents while the coordinator makes training graphs")
        agents = demo_fleet.start_agents(folder, processes, members, link.url, self.seed)
        with display([member.name for member in members], self.start) as show:
            demo_fleet.watch(link, processes.pause, show)
        status = demo_fleet.finish(link, processes, coordinator, agents)
        measurements.keep_bundles(folder, members)
        shutil.copyfile(folder.coordinator / folder.model.name, folder.model)
        return status

    def compare(
        self, processes: Processes, all_full: bool
    ) -> tuple[Baselines, tuple[TrainingMemory, ...]]:
        """Train the baselines and measure the memory of a larger model's submodels.

        Both run at the same time, because a memory peak does not depend on other processes.
        """
        folder = self.folder
        logger.info("Training two baselines: all devices full, and each device alone")
        arguments = [folder.root, self.rounds, self.seed, not all_full]
        training = processes.start(
            "baselines", "toolkit.demo.baselines", arguments, stdout=folder.baselines
        )
        logger.info("Measuring the memory of %s at the same time", demo_settings.LARGER_NAME)
        export = measurements.start_export(folder, processes)
        measured = measurements.larger_memory(folder, processes, export)
        processes.finish([training], BASELINES_S)
        return Baselines(**json.loads(folder.baselines.read_text())), measured


def device_reports(
    members: Sequence[Member],
    samples: Sequence[int],
    status: Status,
    profiles: Mapping[str, Profile],
) -> tuple[DeviceReport, ...]:
    """The report of each device, in the order of the fleet."""
    sizes = measurements.sizes(members)
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
