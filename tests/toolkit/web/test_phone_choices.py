"""What a page tells its coordinator of its own accord, and what it keeps to."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from models_for_tests import CLASSES, INPUT_SHAPE
from phones import Phone, fleet, samples, with_script_before_worker

pytestmark = pytest.mark.web

FETCHED = """async (secret) => {
  const headers = { Authorization: `Bearer ${secret}` };
  const { files } = await (await fetch("/v1/work", { headers })).json();
  const root = await navigator.storage.getDirectory();
  const have = await Array.fromAsync((await root.getDirectoryHandle("bundle")).keys());
  return files.filter(({ sha256 }) => have.includes(sha256)).map(({ name }) => name);
}"""
SAY_WAITS = """
const later = self.setTimeout;
self.setTimeout = (f, ms) => { console.log(`waits ${ms}`); return later(f, ms); };
"""


LONG = {"epochs": 5000}
"""Settings with which a round does not end."""


def test_the_form_of_the_graphs_is_chosen_once(browser, serve, tmp_path: Path, seed: int) -> None:
    data = samples(tmp_path, seed, 0, 16)
    model = "models_for_tests:wide_cnn"
    with serve(*fleet(tmp_path / "c", model=model, count=3, **LONG)) as server:
        phones = [Phone.opened(browser, server, "phone").joined("phone", data) for _ in range(3)]
        measuring, *told = phones
        measuring.start()
        measuring.wait_for("training")
        choice = measuring.stored("winograd")
        for phone, faster in zip(told, (True, False), strict=True):
            phone.store(winograd=choice | {"faster": faster})
            phone.start()
            phone.wait_for("training")
        for phone, faster in zip(phones, (choice["faster"], True, False), strict=True):
            fetched = phone.page.evaluate(FETCHED, phone.stored("device")["secret"])
            assert any("winograd" in name for name in fetched) == faster
            assert any(name == "train.onnx" for name in fetched)


def test_a_page_that_cannot_go_on_says_so(browser, serve, tmp_path: Path, seed: int) -> None:
    """The browser has removed its data: no round waits for it."""
    data = samples(tmp_path, seed, 0, 16)
    with serve(*fleet(tmp_path / "c", **LONG)) as server:
        phone = Phone.opened(browser, server, "phone").joined("phone", data)
        phone.page.evaluate(
            "navigator.storage.getDirectory().then("
            "(root) => root.removeEntry('data', { recursive: true }))"
        )
        with phone.page.expect_request("**/v1/stopped") as said:
            phone.start()
        phone.wait_for_problem("storage.lost")
        words = json.loads(said.value.post_data)
        assert (words["code"], words["round"]) == ("storage.lost", 1)
        assert words["reason"] == "The browser has removed the data of this page."
        [device] = server.coordinator.status().devices
        assert device.state == "stopped"


def test_a_training_that_diverged_is_reported_at_once(browser, serve, tmp_path: Path) -> None:
    data = tmp_path / "large.npz"
    x = np.full((16, *INPUT_SHAPE), 1e38, np.float32)
    x[::2] *= -1
    np.savez(data, x=x, y=np.arange(16) % CLASSES)
    with serve(*fleet(tmp_path / "c", **LONG)) as server:
        phone = Phone.opened(browser, server, "phone").joined("phone", data)
        with phone.page.expect_request("**/v1/problems", timeout=60_000) as said:
            phone.start()
        report = json.loads(said.value.post_data)
        for _ in range(2):  # the second one begins after the first one's answer
            with phone.page.expect_request("**/v1/work*", timeout=60_000):
                pass
        phone.page.locator("#problem").get_by_text("gave no usable numbers").wait_for()
    assert report["code"] in ("update.diverged", "update.not-finite")
    assert (report["round"], report["failures"], report["submodel"]) == (1, 1, "full")


def test_a_page_asks_again_when_the_coordinator_says(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    page = with_script_before_worker(SAY_WAITS)
    with serve(*fleet(tmp_path / "c", count=2, **LONG), page=page) as server:
        phone = Phone.opened(browser, server, "phone")
        waits: list[str] = []
        phone.page.on("console", lambda message: waits.append(message.text))

        def later(route) -> None:
            response = route.fetch()
            answer = response.json() | {"ask_again_s": 77.5}
            route.fulfill(response=response, body=json.dumps(answer))

        phone.page.route("**/v1/work", later)
        phone.train(samples(tmp_path, seed, 0, 16), "phone")
        phone.wait_for("waiting")
        phone.page.wait_for_timeout(500)
        # Each wait is up to a fifth longer or shorter.
        waited = r"waits (6[2-9]|[78]\d|9[0-2])\d\d\d(\.\d+)?"
        for _ in range(100):
            if any(re.fullmatch(waited, wait) for wait in waits):
                break
            phone.page.wait_for_timeout(100)
        assert any(re.fullmatch(waited, wait) for wait in waits), waits
