"""Measures the costs of submodels: sizes by counting, time and memory by profiling bundles."""

import shutil
from collections.abc import Iterable, Sequence

from profiles.documents.bundle_profile import Profile
from profiles.documents.bundle_profile_reading import read_profile
from toolkit.demo import demo_settings
from toolkit.demo.child_processes import Processes
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_processes import AGENT
from toolkit.demo.demo_settings import Member
from toolkit.inspection import Inspection, inspect
from toolkit.submodels.model_loading import load_model

PROFILE_S = 120.0
"""Time limit of a profile, in seconds."""


def keep_bundles(folder: DemoFolder, members: Iterable[Member]) -> None:
    """Copy one bundle for each kind of device to bundles/KIND.

    The copy is the last bundle that the first device of the kind received.
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
    profiles = {}
    for member in members:
        kind = member.kind
        if kind.submodel in profiles:
            continue
        document = folder.profiles / f"{kind.name}.json"
        bundle = folder.bundles / kind.name
        arguments = ["profile", bundle, "--threads", demo_settings.THREADS, "--json"]
        child = processes.start(f"profile-{kind.name}", AGENT, arguments, stdout=document)
        processes.finish([child], PROFILE_S)
        profiles[kind.submodel] = read_profile(document)
    return profiles
