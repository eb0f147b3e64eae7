"""Differential privacy in `serve`: real agents, their budget, and what people are told."""

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from commands import command, environment
from device_agent.federation.fleet_status import own_lines
from device_agent.federation.membership import join
from device_agent.privacy.sample_accountant import SampleSteps, epsilon_of
from hostile_fleet import samples
from models_for_tests import INPUT_SHAPE
from toolkit.aggregation.privacy.budget import PrivacyBudget, Sampled
from toolkit.coordinator.closing.private_rounds import Opening, PrivateRounds
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from toolkit.deployment.make_card import privacy_notes
from toolkit.deployment.trained_model import from_federation
from vector_fleet import running, token

NOISE, DELTA, EPSILON = 3.0, 0.01, 1.6
SAMPLE_NOISE = 2.0
FLEET = f"""
model = "models_for_tests:smooth_cnn"
input_shape = {list(INPUT_SHAPE)}
rounds = 9
held_out = "held_out.npz"
port = 0

[training]
batch_size = 8
batch_norm = "static"
sample_clip = 1.0
sample_noise = {SAMPLE_NOISE}

[privacy]
clip = 0.2
delta = {DELTA}
epsilon = {EPSILON}
noise_multiplier = {NOISE}

[[devices]]
name = "board"
submodel = "low-rank:0.25,keep=1"
count = 2
"""


def fleet(folder: Path, extra: str = "") -> CoordinatorConfig:
    x, y = samples(64, 0)
    np.savez(folder / "held_out.npz", x=x, y=y)
    (folder / "fleet.toml").write_text(extra + FLEET)
    return load_config(folder / "fleet.toml")


def test_agents_train_until_the_budget_is_spent(tmp_path: Path) -> None:
    config = fleet(tmp_path)
    said: list[str] = []
    with running(config, federation(config), said.append) as server:
        agents = [agent(server, name, token(config, "board")) for name in ("one", "two")]
        try:
            assert [process.wait(timeout=300) for process in agents] == [0, 0]
        finally:
            for process in agents:
                process.kill()
                process.wait()
        status, overview = server.coordinator.status(), server.coordinator.overview()
    rounds = status.history[1:]
    budget = PrivacyBudget(DELTA)
    for number, result in enumerate(rounds, 1):
        assert result.updates == 2
        assert result.privacy is not None
        assert result.privacy.epsilon == budget.spent([Sampled(1.0, NOISE)] * number)
    assert rounds[-1].privacy is not None
    assert rounds[-1].privacy.epsilon <= EPSILON
    assert budget.spent([Sampled(1.0, NOISE)] * (len(rounds) + 1)) > EPSILON
    assert 1 <= len(rounds) < 9
    assert overview.privacy == rounds[-1].privacy
    assert any("another round would exceed the privacy budget" in line for line in said)
    # Each device counts what its own 64 samples have spent, in steps with batches of 8.
    steps = [SampleSteps(8 / 64, SAMPLE_NOISE, 8 * len(rounds))]
    for name in ("one", "two"):
        spent = (
            f"epsilon {epsilon_of(steps, 1e-5):.3g} at delta 1e-05 after {8 * len(rounds)} steps"
        )
        assert f"the samples of this device have spent {spent}" in own_lines(tmp_path / name)
    published = json.loads((config.state / "history.json").read_text())["history"]
    assert published[-1]["privacy"]["epsilon"] == rounds[-1].privacy.epsilon
    assert "privacy" not in published[0]
    (note,) = privacy_notes(from_federation(config, len(rounds)))
    assert note.startswith("Trained with differential privacy")
    with running(config, federation(config)) as again:  # after a restart the rounds stay over
        assert again.coordinator.rounds.over


def test_each_device_is_asked_with_the_same_probability(tmp_path: Path) -> None:
    """As many draws as show a wrong probability; the bounds fail one correct run in 10^6."""
    config = fleet(tmp_path, "clients_per_round = 1\n")
    values: dict[str, str] = {}
    store = SimpleNamespace(set_value=values.__setitem__, value=values.get)
    devices = [SimpleNamespace(id=f"board-{n}") for n in (1, 2)]
    rounds = SimpleNamespace(present={device.id for device in devices})
    private = PrivateRounds(
        SimpleNamespace(
            config=config,
            privacy_plan=config.privacy_plan(),
            store=store,
            rounds=rounds,
            lock=nullcontext(),
            submodel=lambda d: "full",
        )  # type: ignore[arg-type]
    )
    draws = [private.asked(3, devices) for _ in range(4000)]  # type: ignore[arg-type]
    assert private.opening(3) == Opening(round=3, probability=2 / 3, devices={"full": 1.0})
    spread = 4.9 * (4000 * 0.25) ** 0.5
    for device in devices:
        assert abs(sum(device.id in asked for asked in draws) - 2000) < spread
    both, nobody = (sum(len(asked) == size for asked in draws) for size in (2, 0))
    limit = 4.9 * (4000 * 0.25 * 0.75) ** 0.5
    assert max(abs(both - 1000), abs(nobody - 1000)) < limit  # the draws are independent
    # With fewer members than expected, and with more, nobody is asked more often.
    assert config.asking_probability(1) == 0.5
    assert config.asking_probability(10) == 0.1


def agent(server: Server, name: str, token_: str) -> subprocess.Popen[bytes]:
    """A device that joins and trains."""
    folder = server.config.state.parent
    join(server.url, token_, name, folder / name)
    arguments = ("run", "--data", "held_out.npz", "--state", name)
    return subprocess.Popen(command("edgetailor-agent", *arguments), cwd=folder, env=environment())
