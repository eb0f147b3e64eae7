"""How many copies of a large model the coordinator holds at most, measured in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = 5
NETS = """
from torch import nn

def wide(units):
    return nn.Sequential(nn.Linear(units, units), nn.Tanh(), nn.Linear(units, 10))

def small():
    return wide(10)

def large():
    return wide(5000)
"""
ROUND = """
from pathlib import Path

import msgspec
import numpy as np

from device_agent.formats.manifest import MANIFEST, WEIGHTS, Manifest, encode, uploaded
from device_agent.formats.protocol.fleet import RoundResult
from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.closing.round_aggregation import RoundAggregation
from toolkit.coordinator.rounds.upload_validation import check_upload
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.published_files import publish
from toolkit.submodels.hyperparameters import TrainingConfig

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def federation(name, units):
    store = Store(Path(name))
    store.registry.set_token("kind", "token", 2, 1)
    model = Federation(f"nets:{name}", (units,), TrainingConfig())
    held_out = np.zeros((8, units), np.float32), np.zeros(8, np.int64)
    loss = model.evaluate(*held_out)[1]
    keep(store, model, RoundResult(round=0, loss=loss, accuracy=0, updates=0))
    made = ((spec, model.bundle(spec)) for spec in ["full"])
    bundle = store.set_bundles(1, made)["full"]
    encoded = store.blobs.path(bundle[MANIFEST].sha256).read_bytes()
    manifest = msgspec.json.decode(encoded, type=Manifest)
    for number in range(2):
        send(store, bundle, encoded, manifest, number, model)
    folding = RoundAggregation(model, store, held_out, 1)
    assert (folding.run(), folding.left_out) == (2, {})
    loss = folding.quality.loss
    keep(store, model, RoundResult(round=1, loss=loss, accuracy=0, updates=2))
    model.load(store.model())  # as after a restart
    store.close()
    return peak()

def send(store, bundle, encoded, manifest, number, model):
    # The tensors as they were offered, piece by piece.
    device, _ = store.registry.enrol("token", "x", str(number), "{}", lambda kind: None)
    entry = bundle[WEIGHTS]
    record = UpdateRecord(
        bundle=bundle[MANIFEST].sha256, base=manifest.base, submodel="full", samples=10, steps=1,
        loss_first=2, loss_last=1, tensors=uploaded(manifest.tensors), file=entry,
    )
    incoming = store.incoming.open(device.id, entry.sha256, 0, entry.size)
    with incoming, store.blobs.path(entry.sha256).open("rb") as file:
        while piece := file.read(1 << 16):
            assert incoming.write(piece)
        store.keep_upload(device.id, incoming)
    check_upload(device.id, record, encoded, entry.sha256, store.blobs, model.check)
    store.add_update(1, device.id, record)

def keep(store, model, result):
    data = model.save()
    store.add_result(result, data)
    publish(store.folder, data, store.history.results(), store.history.models())

before = federation("small", 10)
print((federation("large", 5000) - before) / (5000 * 5010 * 4))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_round_of_a_100_mb_model(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    folders = [str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ROUND],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= MODELS
    assert float(done.stdout) > 1  # the large model was there at all
