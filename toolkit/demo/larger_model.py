"""Peak memory of training steps on a model large enough that submodels differ.

The digits model takes about 1 MB beside a process of 75 MB, so its submodels look alike.
"""

from profiles.documents.profile_reading import read_profile
from toolkit.demo import demo_settings
from toolkit.demo.child_processes import Child, Processes
from toolkit.demo.demo_fleet import AGENT, SERVER
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_result import TrainingMemory
from toolkit.exporting.output_places import folder_name

LIMIT_S = 900.0
"""The longest that an export of all submodels, or one profile, may take, in seconds."""
RUNS = 5
"""Counted runs of each phase; peaks hardly differ from run to run."""


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


def measure(folder: DemoFolder, processes: Processes, export: Child) -> tuple[TrainingMemory, ...]:
    """Profile each exported submodel, one after another.

    Returns:
        The peak of each training step above the idle agent, in the order of the settings.
    """
    processes.finish([export], LIMIT_S)
    return tuple(
        TrainingMemory(spec, _peak_above_idle(folder, processes, folder_name(spec)))
        for spec in demo_settings.LARGER_SPECS
    )


def _peak_above_idle(folder: DemoFolder, processes: Processes, name: str) -> int | None:
    """Bytes that the most demanding phase of a bundle's training adds; None if not measurable."""
    document = folder.profiles / f"larger-model-{name}.json"
    bundle = folder.larger_model / name
    arguments = ["profile", bundle, "--threads", demo_settings.THREADS, "--runs", RUNS, "--json"]
    child = processes.start(f"profile-larger-model-{name}", AGENT, arguments, stdout=document)
    processes.finish([child], LIMIT_S)
    profile = read_profile(document)
    peaks = [
        phase.memory.above_idle_bytes
        for phase in profile.phases
        if phase.role in ("stage", "step", "train") and phase.memory is not None
    ]
    return max((peak for peak in peaks if peak is not None), default=None)
