"""Which releases devices compare, and which kinds get a training bundle to fine-tune them."""

from pathlib import Path

import pytest

from device_agent.formats.protocol.fleet import RoundResult
from log_messages import logged
from toolkit.coordinator.database.key_log import KEY
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.deployment.fine_tuning_bundles import write_training_bundles
from toolkit.deployment.release import make_release

CONFIG = """
model = "own_losses:{model}"
input_shape = {shape}
rounds = 1

[evaluation]
share = 0.2

[training]
loss = "{loss}"

[[devices]]
name = "board"
submodel = "full"
"""


@pytest.mark.parametrize(
    ("model", "shape", "loss", "compared"),
    [
        ("Points", [2, 4, 4], "cross-entropy", True),
        ("Boxes", [6], "box=mse", False),
        ("Boxes", [6], "own_losses:detection", False),
        ("Forecast", [8], "mae", False),
    ],
)
def test_only_models_that_devices_can_compare(
    tmp_path: Path, model: str, shape: list[int], loss: str, compared: bool
) -> None:
    file, out = tmp_path / "federation.toml", tmp_path / "bundles"
    file.write_text(CONFIG.format(model=model, shape=shape, loss=loss))
    config = load_config(file)
    store = Store(config.state, 1)
    result = RoundResult(round=1, accuracy=None, loss=1.0, updates=1)
    store.add_result(result, federation(config).save())
    store.close()
    (config.state / KEY).write_bytes(CoordinatorKey().pem())
    out.mkdir()
    with logged("toolkit") as messages:
        write_training_bundles(config, 1, ["board"], 5, out)
    assert bool(list(out.iterdir())) is compared
    assert any("board is not fine-tuned" in message for message in messages) is not compared
    with logged("toolkit") as messages:
        make_release(config, 1)
    said = f"present model: only the loss {loss} knows what the outputs mean."
    assert any(said in message for message in messages) is not compared
