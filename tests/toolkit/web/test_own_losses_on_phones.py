"""A phone trains a model of several outputs with the user's own loss, as a native agent does."""

from pathlib import Path

import numpy as np
import pytest

from phone_counts import Counts, assert_same
from phones import NativeAgent, Phone, fleet

pytestmark = pytest.mark.web

EVALUATION = """
[evaluation]
share = 0.3
"""


def boxes(path: Path, seed: int, size: int = 40) -> Path:
    """Samples with a class and a box that a model can learn."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((size, 6), dtype=np.float32)
    known = np.tanh(x[:, :2])
    kind = np.digitize(known[:, 0], (-0.4, 0.4))
    np.savez(path, x=x, y_kind=kind, y_box=np.repeat(known, 2, 1))
    return path


def test_a_page_trains_as_an_agent(browser, serve, tmp_path: Path, seed: int) -> None:
    data = boxes(tmp_path / "local.npz", seed)
    given = {
        "model": "own_losses:Boxes",
        "shape": (6,),
        "count": 2,
        "rounds": 3,
        "training": f'loss = "own_losses:detection"\nlearning_rate = 0.1{EVALUATION}',
    }
    toml, folder = fleet(tmp_path / "c", **given)
    boxes(folder / "held_out.npz", seed + 1)
    with serve(toml, folder) as server:
        counts = Counts(server)
        agent = NativeAgent(server, "phone", tmp_path / "agent phone", data)
        agent.start()
        phone = Phone.opened(browser, server, "phone")
        phone.train(data, "page phone")
        phone.wait_for("finished")
        agent.finish()
        history = server.coordinator.store.history.results()
    losses = [result.loss for result in history]
    assert losses == sorted(losses, reverse=True), losses
    page, native = counts.updates["page phone"], counts.updates["agent phone"]
    assert len(page) == len(native) == 3
    for one, other in zip(page, native, strict=True):
        for when in ("before", "after"):
            metrics = other[when]["metrics"]
            assert metrics.keys() == {"distance", "right"}
            assert_same(one[when], other[when] | {"metrics": pytest.approx(metrics, rel=1e-5)})
