"""Run the whole demo, from the data to the report."""

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.formats.atomic_files import write_file
from device_agent.formats.protocol.fleet import Status
from profiles.documents.bundle_profile import Profile
from profiles.errors import InputError
from toolkit.demo import demo_processes, demo_settings, measurements
from toolkit.demo.baselines import Baselines
from toolkit.demo.child_processes import Child, Processes, interruptible
from toolkit.demo.demo_charts import draw
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_result import DemoResult, DeviceReport, TrainingMemory
from toolkit.demo.demo_settings import Member
from toolkit.demo.demo_table import as_json
from toolkit.demo.deployed_models import (
    Use,
    last_evaluation,
    predict_everywhere,
    start_deploying,
)
from toolkit.demo.digits_data import write_data
from toolkit.demo.live_display import display

logger = logging.getLogger(__name__)

COMPARISONS_S = 1800.0
"""How long the comparisons may take after the last round, in seconds."""


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
        status, comparisons = job.federate(processes, all_full)
        use = job.use_model(processes)
        baselines, memory = job.finish(processes, comparisons)
        logger.info("Measuring each submodel, one after another")
        profiles = measurements.profile_fleet(folder, processes, job.members)
    devices = device_reports(job, samples, status, profiles, use)
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
        deployed=use.models,
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

    def federate(self, processes: Processes, all_full: bool) -> tuple[Status, list[Child]]:
        """Run all rounds and keep the bundles and the global model.

        Returns:
            The last status, and the processes of `start_comparisons`, which may still run.
        """
        folder, members = self.folder, self.members
        logger.info("Starting the coordinator")
        kinds = list({member.kind.name: member.kind for member in members}.values())
        coordinator, link = demo_processes.start_coordinator(
            folder, processes, kinds, self.rounds, self.seed
        )
        logger.info(f"Starting {len(members)} agents while the coordinator makes training graphs")
        agents = demo_processes.start_agents(folder, processes, members, link.url, self.seed)
        comparisons = self.start_comparisons(processes, all_full)
        with display([member.name for member in members], self.start) as show:
            demo_processes.watch(link, processes.pause, show)
        status = demo_processes.finish(link, processes, coordinator, agents)
        measurements.keep_bundles(folder, members)
        shutil.copyfile(folder.coordinator / folder.model.name, folder.model)
        return status, comparisons

    def start_comparisons(self, processes: Processes, all_full: bool) -> list[Child]:
        """Start to train the baselines and to measure the memory of a larger model's submodels.

        These processes have a lower priority than processes of the fleet. Neither an accuracy nor a
        peak of memory depends on other processes.
        """
        folder = self.folder
        logger.info("Training two baselines: all devices full, and each device alone")
        arguments = [folder.root, self.rounds, self.seed, not all_full]
        training = processes.start(
            "baselines", "toolkit.demo.baselines", arguments, folder.baselines, background=True
        )
        logger.info("Measuring the memory of %s at the same time", demo_settings.LARGER_NAME)
        measuring = processes.start(
            "larger-model",
            "toolkit.demo.larger_model",
            [folder.root],
            folder.larger_memory,
            background=True,
        )
        return [training, measuring]

    def use_model(self, processes: Processes) -> Use:
        """Deploy the trained model, and let every device predict with it."""
        logger.info("Deploying the model; every device predicts new digits with it")
        deploying = start_deploying(self.folder, processes, self.members, self.rounds)
        return predict_everywhere(self.folder, processes, self.members, deploying)

    def finish(
        self, processes: Processes, comparisons: Sequence[Child]
    ) -> tuple[Baselines, tuple[TrainingMemory, ...]]:
        """Wait for `comparisons`, and read their results."""
        logger.info("Waiting for the baselines and the memory of %s", demo_settings.LARGER_NAME)
        processes.finish(comparisons, COMPARISONS_S)
        baselines = Baselines(**json.loads(self.folder.baselines.read_text()))
        measured = json.loads(self.folder.larger_memory.read_text())
        return baselines, tuple(TrainingMemory(**memory) for memory in measured)


def device_reports(
    job: Job,
    samples: Sequence[int],
    status: Status,
    profiles: Mapping[str, Profile],
    use: Use,
) -> tuple[DeviceReport, ...]:
    """The report of each device, in the order of the fleet."""
    members = job.members
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
            evaluation=last_evaluation(job.folder, member.name),
            correct=use.correct[member.name],
            profile=profiles[member.kind.submodel],
        )
        for member, count in zip(members, samples, strict=True)
    )
