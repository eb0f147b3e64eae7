"""The device needs no training framework: these tests check the modules that its process loads."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bundles import FAMILIES, BundleOf, write_data
from commands import run_code
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from vector_fleet import running

FORBIDDEN = {"torch", "onnx", "onnx_ir", "onnxscript", "toolkit", "exporters", "sklearn", "rich"}

# Takes a JSON object: `bundles` and their `data`, the coordinator's `url` and `token`, and `local`
# data for its rounds. Writes to result.json what it did and every module that it has loaded.
AGENT = """
import json, sys
from pathlib import Path

given = json.loads(sys.argv[1])

import device_agent.cli
from device_agent.federation import fleet_status, membership, round_loop
from device_agent.formats.bundle import open_bundle
from device_agent.profiling import measure_messages, measure_process, profile_text, profiler
from device_agent.federation.run_options import RunOptions
from device_agent.training.standalone_training import train
from device_agent.training.training_options import TrainingOptions

for name, bundle in given["bundles"].items():
    train(Path(bundle), given["data"], Path(name), threads=1)
    for task in measure_messages.tasks(open_bundle(Path(bundle))):
        measure_process.measure(measure_messages.Request(
            folder=bundle, task=task, threads=1, runs=5, sustained_s=0,
            sysfs="/sys", started_s=0,
        ))
profile_text.summary(profiler.profile_bundle(Path(given["bundles"]["slice"]), 1))
state = Path("state")
membership.join(given["url"], Path(given["token"]).read_text().strip(), "desk", state)
options = RunOptions(data=given["local"], state=state, training=TrainingOptions(threads=1))
sent = round_loop.run(options, patience_s=60)
fleet = fleet_status.fleet_status(state)
result = {
    "sent": sent,
    "state": fleet.state,
    "accuracies": [result.accuracy for result in fleet.history],
    "modules": sorted(sys.modules),
}
Path("result.json").write_text(json.dumps(result))
"""

CONFIG = """
model = "bundles:tiny_cnn"
input_shape = [1, 6, 6]
rounds = 1
held_out = "tiny.npz"
port = 0

[training]  # with the graphs of the bundle of `full`
batch_size = 4
learning_rate = 0.05
epochs = 1

[[devices]]
name = "desk"
submodel = "full"
"""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a coordinator in this process, with its state under `folder`; yield its URL."""
    (folder / "fleet.toml").write_text(CONFIG)
    config = load_config(folder / "fleet.toml")
    with running(config, federation(config)) as server:
        yield server.url


def test_a_device_never_loads_a_training_framework(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundles = {family: str(bundle_of(family)) for family in FAMILIES}
    data = write_data(tmp_path / "tiny.npz")
    (tmp_path / "device").mkdir()
    with serving(tmp_path) as url:
        given = {
            "bundles": bundles,
            "data": str(data),
            "url": url,
            "token": str(tmp_path / "state" / "tokens" / "desk.token"),
            "local": str(data),
        }
        done = run_code(AGENT, json.dumps(given), cwd=tmp_path / "device")
    assert done.code == 0, done.stderr
    result = json.loads((tmp_path / "device" / "result.json").read_bytes())
    assert (result["sent"], result["state"], len(result["accuracies"])) == (1, "finished", 2)
    loaded = {name.partition(".")[0] for name in result["modules"]}
    assert {"device_agent", "profiles", "onnxruntime", "numpy"} <= loaded
    assert not loaded & FORBIDDEN


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--state", "nowhere"]])
def test_the_command_loads_no_training_framework(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules));"
        "sys.argv[0] = 'edgetailor-agent'; from device_agent.cli import main; main()"
    )
    done = run_code(code, *arguments, cwd=tmp_path)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "device_agent" in loaded
    assert not loaded & FORBIDDEN
