"""The memory of training a larger model's submodels.

The digits model takes about 1 MB in a process of 75 MB, so the memory of its submodels differs
little. Run this module as `python -m toolkit.demo.larger_model FOLDER`; it prints the results as
JSON.
"""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from device_agent.formats.atomic_files import write_file
from device_agent.profiling.profiler import profile_bundle
from exporters.recording.capture import SharedRecording
from profiles.documents.bundle_profile import Profile
from profiles.documents.bundle_profile_reading import encode_profile
from toolkit.demo import demo_settings
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_result import TrainingMemory
from toolkit.exporting.output_places import folder_name
from toolkit.exporting.submodel_export import export
from toolkit.splitting import split
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.model_loading import load_model
from toolkit.terminal_output import show_stages

logger = logging.getLogger("toolkit.demo.larger_model")  # not __main__, which shows no stages

RUNS = 1
"""Counted runs of each phase, after runs that warm up; peaks hardly differ from run to run."""


def training_memory(folder: DemoFolder) -> list[TrainingMemory]:
    """Export and profile each submodel of the larger model, one after another.

    Returns:
        The peak memory of each training step minus the memory of an idle agent, in the order of
        `LARGER_SPECS` in the settings.
    """
    model, shape = load_model(demo_settings.LARGER_MODEL), demo_settings.LARGER_SHAPE
    training, state = TrainingConfig(batch_size=demo_settings.LARGER_BATCH), from_model(model)
    recording, measured = SharedRecording(model, shape), []
    for spec in demo_settings.LARGER_SPECS:
        logger.info("exporting %s", spec)
        bundle = folder.larger_model / folder_name(spec)
        with recording:
            submodel = split(model, spec, shape, training)
        # Verification would take longer than the export, and the bundle is only profiled.
        export(submodel, state, bundle, verify=False)
        logger.info("profiling %s", spec)
        profile = profile_bundle(bundle, demo_settings.THREADS, runs=RUNS)
        document = folder.profiles / f"larger-model-{bundle.name}.json"
        write_file(document, encode_profile(profile))
        measured.append(TrainingMemory(spec, _peak_above_idle(profile)))
    return measured


def _peak_above_idle(profile: Profile) -> int | None:
    """Bytes that the most demanding phase of training adds to the idle agent; None if unknown."""
    peaks = [
        phase.memory.above_idle_bytes
        for phase in profile.phases
        if phase.role in ("stage", "step", "train") and phase.memory is not None
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def main(root: str) -> None:
    """Measure with files in the demo's folder `root`, and print the results as JSON."""
    show_stages()
    print(json.dumps([asdict(memory) for memory in training_memory(DemoFolder(Path(root)))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
