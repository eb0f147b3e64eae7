"""A phone trains models of several outputs with the users' own losses, as a native agent does."""

from pathlib import Path

import numpy as np
import pytest

from own_loss_tasks import TASKS
from phone_counts import Counts, assert_same
from phones import NativeAgent, Phone, fleet

pytestmark = pytest.mark.web

EVALUATION = """
[evaluation]
share = 0.3
"""


@pytest.mark.parametrize(
    "name",
    ["detection", "segmentation", "multi-task", "triplet", "quantiles", "speech", "no labels"],
)
def test_a_page_trains_as_an_agent(browser, serve, name: str, tmp_path: Path, seed: int) -> None:
    task, draw = TASKS[name], np.random.default_rng(seed)
    local, judges = task.data(draw), task.data(draw)
    np.savez(tmp_path / "local.npz", **local)
    given = {
        "model": f"own_losses:{task.model}",
        "shape": local["x"].shape[1:],
        "count": 2,
        "rounds": 3,
        "training": f"loss = {task.toml}\nlearning_rate = 0.1{EVALUATION}",
    }
    toml, folder = fleet(tmp_path / "c", **given)
    np.savez(folder / "held_out.npz", **judges)
    with serve(toml, folder) as server:
        counts = Counts(server)
        agent = NativeAgent(server, "phone", tmp_path / "agent phone", tmp_path / "local.npz")
        agent.start()
        phone = Phone.opened(browser, server, "phone")
        phone.train(tmp_path / "local.npz", "page phone")
        phone.wait_for("finished")
        agent.finish()
        history = server.coordinator.store.history.results()
    losses = [result.loss for result in history]
    assert losses[-1] < losses[0], losses
    page, native = counts.updates["page phone"], counts.updates["agent phone"]
    assert len(page) == len(native) == 3
    for one, other in zip(page, native, strict=True):
        for when in ("before", "after"):
            metrics = other[when].get("metrics") or {}
            near = pytest.approx(metrics, rel=1e-5)
            assert_same(one[when], other[when] | ({"metrics": near} if metrics else {}))
