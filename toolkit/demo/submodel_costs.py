"""The costs of each submodel of the fleet: sizes by counting, time and memory by measuring."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from profiles.documents.bundle_profile import Profile
from profiles.documents.profile_reading import read_profile
from toolkit.demo import demo_settings
from toolkit.demo.child_processes import Processes
from toolkit.demo.demo_fleet import AGENT
from toolkit.demo.demo_folder import DemoFolder
from toolkit.demo.demo_settings import THREADS, Member
from toolkit.inspection import Inspection, inspect
from toolkit.submodels.model_loading import load_model

LIMIT_S = 120.0
"""The longest that one profile may take, in seconds."""


def keep_bundles(folder: DemoFolder, members: Iterable[Member]) -> None:
    """Copy the last bundle of each kind, from the first of its devices, to bundles/KIND."""
    for member in members:
        to = folder.bundles / member.kind.name
        if not to.exists():
            shutil.copytree(folder.state_of(member.name) / "bundle", to)


def sizes(members: Iterable[Member]) -> dict[str, Inspection]:
    """Parameters and capacity by submodel."""
    model = load_model(demo_settings.MODEL)
    specs = _specs(members)
    found = inspect(model, demo_settings.INPUT_SHAPE, specs, demo_settings.TRAINING.batch_size)
    return dict(zip(specs, found, strict=True))


def measure(
    folder: DemoFolder, processes: Processes, members: Sequence[Member]
) -> dict[str, Profile]:
    """Profile each submodel with one thread, one after another. Returns profiles by submodel."""
    found = {}
    for spec in _specs(members):
        member = next(m for m in members if m.kind.submodel == spec)
        found[spec] = _profile(folder, processes, member.kind.name)
    return found


def _profile(folder: DemoFolder, processes: Processes, kind: str) -> Profile:
    document: Path = folder.profiles / f"{kind}.json"
    arguments = ["profile", folder.bundles / kind, "--threads", THREADS, "--json"]
    child = processes.start(f"profile-{kind}", AGENT, arguments, stdout=document)
    processes.finish([child], LIMIT_S)
    return read_profile(document)


def _specs(members: Iterable[Member]) -> list[str]:
    """The submodels of the fleet, each once, in its order."""
    return list(dict.fromkeys(member.kind.submodel for member in members))
