"""Measures the costs of submodels: sizes by counting, time and memory by profiling bundles.

The digits model takes about 1 MB in a process of 75 MB, so the memory of its submodels differs
little. Therefore the peak memory of a larger model's submodels is measured, too.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from profiles.documents.bundle_profile import Profile
from profiles.documents.profile_reading import read_profile
from toolkit.demo import demo_settings
from toolkit.demo.child_processes import Child, Processes
from toolkit.demo.demo_fleet import AGENT, SERVER
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_result import TrainingMemory
from toolkit.demo.demo_settings import Member
from toolkit.exporting.output_places import folder_name
from toolkit.inspection import Inspection, inspect
from toolkit.submodels.model_loading import load_model

PROFILE_S = 120.0
"""Time limit of a profile of the fleet's model, in seconds."""
LARGER_S = 900.0
"""Time limit of the export of the larger model, and of each of its profiles, in seconds."""
LARGER_RUNS = 5
"""Counted runs of each phase; peaks hardly differ from run to run."""


def keep_bundles(folder: DemoFolder, members: Iterable[Member]) -> None:
    """Copy one bundle for each kind of device to bundles/KIND.

    It is the last bundle that the first device of this kind received.
    """
    for member in members:
        to = folder.bundles / member.kind.name
        if not to.exists():
            shutil.copytree(folder.state_of(member.name) / "bundle", to)


def sizes(members: Iterable[Member]) -> dict[str, Inspection]:
    """Parameters and capacity by submodel."""
    specs = list(dict.fromkeys(member.kind.submodel for member in members))
    model, batch = load_model(demo_settings.MODEL), demo_settings.TRAINING.batch_size
    inspections = inspect(model, demo_settings.INPUT_SHAPE, specs, batch)
    return dict(zip(specs, inspections, strict=True))


def profile_fleet(
    folder: DemoFolder, processes: Processes, members: Sequence[Member]
) -> dict[str, Profile]:
    """Profile each submodel with one thread, one after another. Returns profiles by submodel."""
    kinds = {member.kind.submodel: member.kind.name for member in reversed(members)}
    return {
        spec: _profile(folder, processes, kind, folder.bundles / kind, PROFILE_S)
        for spec, kind in kinds.items()
    }


def start_export(folder: DemoFolder, processes: Processes) -> Child:
    """Start to export the submodels of the larger model as bundles."""
    specs = [word for spec in demo_settings.LARGER_SPECS for word in ("--submodel", spec)]
    shape = ",".join(map(str, demo_settings.LARGER_SHAPE))
    # Verification would take longer than the export, and the bundles are only profiled.
    arguments = [
        *("export", demo_settings.LARGER_MODEL, "--input-shape", shape),
        *("--batch", demo_settings.LARGER_BATCH, *specs),
        *("--out", folder.larger_model, "--no-verify"),
    ]
    return processes.start("larger-model", SERVER, arguments)


def larger_memory(
    folder: DemoFolder, processes: Processes, export: Child
) -> tuple[TrainingMemory, ...]:
    """Profile each exported submodel of the larger model, one after another.

    Returns:
        The peak memory of each training step minus the memory of an idle agent, in the order of
        `LARGER_SPECS` in the settings.
    """
    processes.finish([export], LARGER_S)
    measured = []
    for spec in demo_settings.LARGER_SPECS:
        bundle = folder.larger_model / folder_name(spec)
        name = f"larger-model-{bundle.name}"
        profile = _profile(folder, processes, name, bundle, LARGER_S, "--runs", LARGER_RUNS)
        measured.append(TrainingMemory(spec, _peak_above_idle(profile)))
    return tuple(measured)


def _profile(
    folder: DemoFolder,
    processes: Processes,
    name: str,
    bundle: Path,
    limit_s: float,
    *options: object,
) -> Profile:
    """Profile a bundle with one thread, within `limit_s` seconds."""
    document = folder.profiles / f"{name}.json"
    arguments = ["profile", bundle, "--threads", demo_settings.THREADS, *options, "--json"]
    child = processes.start(f"profile-{name}", AGENT, arguments, stdout=document)
    processes.finish([child], limit_s)
    return read_profile(document)


def _peak_above_idle(profile: Profile) -> int | None:
    """Bytes that the most demanding phase of training adds to the idle agent; None if unknown."""
    peaks = [
        phase.memory.above_idle_bytes
        for phase in profile.phases
        if phase.role in ("stage", "step", "train") and phase.memory is not None
    ]
    return max((peak for peak in peaks if peak is not None), default=None)
