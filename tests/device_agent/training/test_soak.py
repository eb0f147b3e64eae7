"""Hundreds of rounds in one process leak neither memory nor open files."""

import json
from pathlib import Path

import pytest

from bundles import BundleOf, write_data
from commands import run_code

# Simulates rounds: collects a bundle that differs in each, trains it, keeps the personal model and
# reads the update. Prints resident bytes and the number of open files after each round.
PROGRAM = """
import json, os, shutil, sys
from pathlib import Path
given = json.loads(sys.argv[1])
from device_agent.system import process_memory as memory
from device_agent.federation.device_state import DeviceState
from device_agent.formats.atomic_files import fingerprint, fingerprint_file
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
from device_agent.formats.update import read_update

state = DeviceState(Path("state"))
bundles = [Path(name) for name in given["bundles"]]
seen = []
for number in range(given["rounds"]):
    bundle = bundles[number % len(bundles)]
    about = json.loads((bundle / MANIFEST).read_bytes())
    about["base"] = f"{number:064x}"
    manifest = json.dumps(about).encode()
    sources = {fingerprint(manifest).sha256: manifest}
    files = {MANIFEST: fingerprint(manifest)}
    for name in about["files"]:
        files[name] = fingerprint_file(bundle / name)
        sources[files[name].sha256] = (bundle / name).read_bytes()
    offers = [FileOffer(name=n, size=f.size, sha256=f.sha256) for n, f in files.items()]

    def fetch(offer, to):
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(sources[offer.sha256])

    assert state.trained(state.collect(offers, fetch)) is None
    options = TrainingOptions(threads=1, seed=number, validation=0.2)
    train_bundle(state.bundle, given["data"], state.update, options,
                 personal=state.personal(), keep=state.keep_personal)
    assert read_update(state.update)[0].base == about["base"]
    seen.append((memory.resident_bytes(), len(os.listdir("/proc/self/fd"))))
print(json.dumps(seen))
"""


def play(folder: Path, bundles: list[Path], rounds: int) -> list[tuple[int, int]]:
    """Run `rounds` rounds with `bundles` in turn. Return the memory and open files after each."""
    given = {
        "bundles": [str(bundle) for bundle in bundles],
        "data": str(write_data(folder / "local.npz", count=40)),
        "rounds": rounds,
    }
    done = run_code(PROGRAM, json.dumps(given), cwd=folder, limit_s=1800).succeeded()
    left = {path.name for path in (folder / "state").iterdir()}
    assert left == {"bundle", "files", "update", "personal.safetensors"}
    return [(int(memory), int(files)) for memory, files in json.loads(done.stdout)]


def check_flat(seen: list[tuple[int, int]], warm_up: int, bytes_: int) -> None:
    """Check that files stay constant, and memory grows by less than `bytes_` after `warm_up`."""
    assert len({files for _, files in seen}) == 1
    memory = [resident for resident, _ in seen]
    growth = max(memory[-warm_up:]) - max(memory[:warm_up])
    print(f"{len(seen)} rounds: {memory[0]} bytes, {max(memory[:warm_up])}, {memory[-1]}")
    assert growth < bytes_


@pytest.mark.long
def test_rounds_in_one_process(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundles = [bundle_of(family) for family in ("full", "slice", "cp")]
    check_flat(play(tmp_path, bundles, 45), 15, 4 << 20)


@pytest.mark.long
def test_five_hundred_rounds_in_one_process(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundles = [bundle_of(family) for family in ("full", "low-rank", "slice", "cp")]
    check_flat(play(tmp_path, bundles, 500), 60, 4 << 20)
