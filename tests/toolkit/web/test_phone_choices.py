"""What a page tells its coordinator of its own accord, and what it keeps to."""

import json
from pathlib import Path

import numpy as np
import pytest

from models_for_tests import CLASSES, INPUT_SHAPE
from phones import HEAD, Phone, images, with_script_before_worker

pytestmark = pytest.mark.web

KIND = '[[devices]]\nname = "phone"\nsubmodel = "full"\ncount = {}\n'
STORED = """(name) => new Promise((done) => {
  const opened = indexedDB.open("edgetailor");
  opened.onsuccess = () => {
    const wanted = opened.result.transaction("values").objectStore("values").get(name);
    wanted.onsuccess = () => { opened.result.close(); done(wanted.result); };
  };
})"""
STORE = """([name, value]) => new Promise((done) => {
  const opened = indexedDB.open("edgetailor");
  opened.onsuccess = () => {
    const change = opened.result.transaction("values", "readwrite");
    change.objectStore("values").put(value, name);
    change.oncomplete = () => { opened.result.close(); done(); };
  };
})"""
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


def federation(tmp_path: Path, seed: int, model: str, places: int) -> tuple[str, Path]:
    """A federation's file whose rounds take long, and the folder with its samples."""
    folder = tmp_path / "c"
    folder.mkdir()
    images(folder, seed, 99, 20).rename(folder / "held_out.npz")
    toml = HEAD.format(model=f"models_for_tests:{model}", shape=list(INPUT_SHAPE))
    return toml.replace("epochs = 2", "epochs = 5000") + KIND.format(places), folder


def test_the_form_of_the_graphs_is_chosen_once(browser, serve, tmp_path: Path, seed: int) -> None:
    toml, folder = federation(tmp_path, seed, "wide_cnn", 3)
    data = images(tmp_path, seed, 0, 16)
    with serve(toml, folder) as server:
        phones = [Phone.opened(browser, server, "phone") for _ in range(3)]
        for phone in phones:
            phone.join("phone")
            phone.wait_for("joined")
            phone.page.get_by_label("Data file").set_input_files(str(data))
            phone.page.get_by_text("16 ").first.wait_for()
        measuring, *told = phones
        measuring.page.get_by_role("button", name="Start training").click()
        measuring.wait_for("training")
        choice = measuring.page.evaluate(STORED, "winograd")
        for phone, faster in zip(told, (True, False), strict=True):
            phone.page.evaluate(STORE, ["winograd", choice | {"faster": faster}])
            phone.page.get_by_role("button", name="Start training").click()
            phone.wait_for("training")
        for phone, faster in zip(phones, (choice["faster"], True, False), strict=True):
            secret = phone.page.evaluate(STORED, "device")["secret"]
            fetched = phone.page.evaluate(FETCHED, secret)
            assert any("winograd" in name for name in fetched) == faster
            assert any(name == "train.onnx" for name in fetched)


def test_a_page_that_cannot_go_on_says_so(browser, serve, tmp_path: Path, seed: int) -> None:
    """The browser has removed its data: no round waits for it."""
    toml, folder = federation(tmp_path, seed, "smooth_cnn", 1)
    with serve(toml, folder) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        phone.wait_for("joined")
        phone.page.get_by_label("Data file").set_input_files(str(images(tmp_path, seed, 0, 16)))
        phone.page.get_by_text("16 ").first.wait_for()
        phone.page.evaluate(
            "navigator.storage.getDirectory().then("
            "(root) => root.removeEntry('data', { recursive: true }))"
        )
        with phone.page.expect_request("**/v1/stopped") as said:
            phone.page.get_by_role("button", name="Start training").click()
        phone.wait_for_problem("storage.lost")
        words = json.loads(said.value.post_data)
        assert (words["code"], words["round"]) == ("storage.lost", 1)
        assert words["reason"] == "The browser has removed the data of this page."
        [device] = server.coordinator.status().devices
        assert device.state == "stopped"


def test_a_training_that_diverged_is_reported_at_once(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    toml, folder = federation(tmp_path, seed, "smooth_cnn", 1)
    data = tmp_path / "large.npz"
    x = np.full((16, *INPUT_SHAPE), 1e38, np.float32)
    x[::2] *= -1
    np.savez(data, x=x, y=np.arange(16) % CLASSES)
    with serve(toml, folder) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        phone.wait_for("joined")
        phone.page.get_by_label("Data file").set_input_files(str(data))
        with phone.page.expect_request("**/v1/problems", timeout=60_000) as said:
            phone.page.get_by_role("button", name="Start training").click()
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
    toml, folder = federation(tmp_path, seed, "smooth_cnn", 2)
    with serve(toml, folder, page=with_script_before_worker(SAY_WAITS)) as server:
        phone = Phone.opened(browser, server, "phone")
        waits: list[str] = []
        phone.page.on("console", lambda message: waits.append(message.text))

        def later(route) -> None:
            response = route.fetch()
            answer = response.json() | {"ask_again_s": 77.5}
            route.fulfill(response=response, body=json.dumps(answer))

        phone.page.route("**/v1/work", later)
        phone.train(images(tmp_path, seed, 0, 16), "phone")
        phone.wait_for("waiting")
        phone.page.wait_for_timeout(500)
        for _ in range(100):
            if "waits 77500" in waits:
                break
            phone.page.wait_for_timeout(100)
        assert "waits 77500" in waits
