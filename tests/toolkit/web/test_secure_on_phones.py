"""A page in secure sums with native agents: the sum is that of their plain updates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from device_agent.formats.manifest import WEIGHTS
from device_agent.formats.update import read_update
from disclosure import Listener, assert_told
from phones import NativeAgent, Phone, fleet, keep_records, samples
from toolkit.coordinator.server import Server
from vector_fleet import assert_soon

pytestmark = pytest.mark.web

CHANGE, AGENTS, DEADLINE_S = 4.0, 3, 25
SECURE = f"""
momentum = 0.9

[evaluation]
share = 0.2

[privacy]
secure_aggregation = true
smallest_group = {AGENTS}
most_change = {CHANGE}
most_samples = 40
"""
TRAINED = """async (copy) => {
  const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("results");
  const file = await folder.getFileHandle(`update.${copy}`).catch(() => null);
  const content = file && (await (await file.getFile()).arrayBuffer());
  if (content === null || content.byteLength < 44) return null;
  const length = new DataView(content).getUint32(40);
  return JSON.parse(new TextDecoder().decode(content.slice(44, 44 + length))).sha256;
}"""
"""The hash of a stored update."""
SUMS = ("keys", "shares", "input", "confirmation", "unmasking")


def mean_of(updates: Sequence[Path]) -> dict[str, np.ndarray]:
    """The oracle: the mean of plain updates, weighted by samples."""
    read = [read_update(update) for update in updates]
    weights = [record.samples for record, _ in read]
    return {
        name: np.average([tensors[name].astype(float) for _, tensors in read], 0, weights)
        for name, first in read[0][1].items()
        if first.dtype == np.float32
    }


def started(server: Server, folder: Path, data: Sequence[Path]) -> list[NativeAgent]:
    """Agents that train on their own data."""
    agents = [
        NativeAgent(server, "phone", folder / f"agent {number}", own)
        for number, own in enumerate(data)
    ]
    for agent in agents:
        agent.start()
    return agents


def assert_close(found: Path, expected: dict[str, np.ndarray], close: float) -> None:
    tensors = load_file(found)
    for name, value in expected.items():
        assert np.abs(tensors[name] - value).max() <= close, name


def test_a_page_and_agents_add_up_their_updates(browser, serve, tmp_path: Path, seed: int) -> None:
    """In the second round, the page is closed after it has shared its secrets."""
    data = [samples(tmp_path, seed, number, 20 + 10 * number) for number in range(AGENTS)]
    given = {"count": AGENTS + 1, "training": SECURE, "top": f"deadline_s = {DEADLINE_S}"}
    with serve(*fleet(tmp_path / "c", **given)) as server:
        records = keep_records(server)
        agents = started(server, tmp_path, data)
        phone = Phone.opened(browser, server, "phone")
        only = f"only the sum of the updates of at least {AGENTS} devices"
        phone.page.get_by_text(only).wait_for()
        listener, cut = Listener(phone.page), list[str]()

        def lose(route: Any) -> None:
            cut.append(route.request.url)
            route.abort()

        phone.page.context.route("**/v1/rounds/2/tensors/*", lose)
        phone.train(data[1], "page")
        phone.wait_until("() => window.view?.losses.length === 1")
        assert_told(phone.page, listener, *(f"POST /rounds/{{round}}/sum/{part}" for part in SUMS))
        while not cut:
            phone.page.wait_for_timeout(50)  # lets the handler of the route run
        phone.page.context.unroute_all(behavior="ignoreErrors")
        phone.killed()
        phone.wait_for("finished")
        for agent in agents:
            agent.finish()
        history = server.coordinator.status().history
        devices = {device.name: device for device in server.coordinator.status().devices}
        assert phone.view()["problem"] is None
    assert not records
    assert [result.updates for result in history] == [0, AGENTS + 1, AGENTS]
    assert [devices["page"].rounds_trained, devices["agent 0"].rounds_trained] == [1, 2]
    # The page trains like the agent with the same data, whose roundings are a little different.
    first = [agent.sent[1] for agent in agents]
    middle = agents[0].state / "bundle" / WEIGHTS
    assert_close(middle, mean_of([*first, first[1]]), 1e-5)
    second = [agent.sent[2] for agent in agents]
    assert_close(server.config.state / "global.safetensors", mean_of(second), 1e-6)
    assert all(device.loss is None for device in devices.values())


def test_a_page_leaves_a_sum_whose_group_nobody_has_signed(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    """It sends no masked update; owner and operator read why. It does not train again."""
    settings = {"count": '"any"', "training": SECURE, "top": "min_devices = 1"}
    with serve(*fleet(tmp_path / "c", **settings)) as server:
        phone = Phone.opened(browser, server, "phone")
        listener = Listener(phone.page)
        forged = {"step": "shares", "round": 1, "members": [], "signature": "AAAA"}
        phone.page.context.route("**/v1/rounds/1/sum", lambda route: route.fulfill(json=forged))
        phone.train(samples(tmp_path, seed, 0, 30), "page")
        phone.wait_for_problem("trust.forged-work")
        phone.page.get_by_text("The list of devices of a secure sum is not signed").wait_for()
        assert_soon(lambda: server.coordinator.status().devices[0].note is not None, 30)
        (device,) = server.coordinator.status().devices
        assert "The list of devices of a secure sum is not signed" in device.note
        update = phone.page.evaluate(TRAINED, 1)
        phone.page.wait_for_timeout(5000)
        assert phone.page.evaluate(TRAINED, 0) is None
        # After an update was sent, the round may open again: this device then trains again.
        phone.store(secureSums={"round": 1, "masked": 1, "used": update})
        phone.wait_until(f"async () => ![null, '{update}'].includes(await ({TRAINED})(0))")
    assert {name for name in listener.sent if "/sum/" in name or "tensors" in name} == {
        f"POST /rounds/{{round}}/sum/keys {field}"
        for field in ("bundle", "mask_key", "share_key", "signature")
    }


def test_a_page_clips_its_change_and_adds_noise(browser, serve, tmp_path: Path, seed: int) -> None:
    """With almost no noise, the model moves by the sum of the clipped changes over the devices."""
    clip, noise = 0.02, 1e-6
    private = f"""
momentum = 0.9
batch_norm = "static"

[privacy]
secure_aggregation = true
smallest_group = {AGENTS}
clip = {clip}
delta = 0.1
noise_multiplier = {noise}
"""
    data = [samples(tmp_path, seed, number, 20 + 10 * number) for number in range(AGENTS)]
    given = {"count": AGENTS + 1, "training": private, "top": f"deadline_s = {DEADLINE_S}"}
    with serve(*fleet(tmp_path / "c", **given)) as server:
        records = keep_records(server)
        agents = started(server, tmp_path, data)
        phone = Phone.opened(browser, server, "phone")
        phone.train(data[1], "page")
        phone.wait_for("finished")
        for agent in agents:
            agent.finish()
        history = server.coordinator.status().history
        assert phone.view()["problem"] is None
    assert not records
    assert [result.updates for result in history] == [0, AGENTS + 1, AGENTS + 1]
    assert all(result.privacy is not None for result in history[1:])
    received = load_file(agents[0].state / "bundle" / WEIGHTS)
    total: dict[str, Any] = {}
    for sent in [*(agent.sent[2] for agent in agents), agents[1].sent[2]]:
        _, tensors = read_update(sent)
        changes = {name: own.astype(float) - received[name] for name, own in tensors.items()}
        norm = np.sqrt(sum(np.square(change).sum() for change in changes.values()))
        assert norm > clip
        for name, change in changes.items():
            total[name] = total.get(name, 0.0) + change * clip / norm
    expected = {name: received[name] + own / (AGENTS + 1) for name, own in total.items()}
    assert_close(server.config.state / "global.safetensors", expected, 1e-5)
