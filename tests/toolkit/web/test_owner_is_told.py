"""What an owner is told before and after joining, beside what the page really sends."""

import json
from pathlib import Path

import numpy as np
import pytest

from disclosure import Listener, assert_told, told
from phones import (
    KEEP_VIEWS,
    NativeAgent,
    Phone,
    fleet,
    keep_records,
    samples,
    token,
    with_script_before_worker,
)

pytestmark = pytest.mark.web

HTML = "<img src=x onerror=\"document.title='run'\"> <b>Ripe</b> or not"
DIGITS = {"model": "toolkit.models:digits_cnn", "shape": (1, 8, 8), "classes": 10}
TOLD = f"""
title = {json.dumps(HTML)}
purpose = "Tells ripe tomatoes from unripe ones"
contact = "Ada, ada@example.org"
"""
LONG_PAUSES = """
const [post, now] = [self.postMessage.bind(self), performance.now.bind(performance)];
let later = 0;
performance.now = () => now() + later;
self.postMessage = (message) => {
  post(message);
  if (message.view?.stage === "paused") later += 3_600_000;
};
"""
"""The clock of the worker goes on by an hour in each pause."""
UPDATE = "POST /rounds/{round}/update"
PHONE = {"width": 390, "height": 844}


def test_a_sensor_in_another_unit(browser, serve, tmp_path: Path, seed: int) -> None:
    """The owner is told, and the update says the same of the inputs as that of an agent."""
    given = {"model": "sample_models:series_last", "shape": (7, 6), "classes": 3}
    with np.load(samples(tmp_path, seed, 0, 50, (7, 6), 3)) as arrays:
        x, y = arrays["x"], arrays["y"]
    x[:, 3] *= 1000
    np.savez(tmp_path / "a.npz", x=x, y=y)
    with serve(*fleet(tmp_path / "c", **given, rounds=1, count=2)) as server:
        records = keep_records(server)
        agent = NativeAgent(server, "phone", tmp_path / "native", tmp_path / "a.npz")
        agent.start()
        phone = Phone.opened(browser, server, "phone")
        phone.train(tmp_path / "a.npz", "phone")
        phone.page.get_by_text("Check the unit of your data: your values of channel 4").wait_for()
        phone.wait_for("finished")
        agent.finish()
    (first, second) = (np.array(record["inputs"]["channels"]) for record in records)
    assert first.shape == (7, 3)
    # The last of two digits may be rounded up or down.
    np.testing.assert_allclose(first, second, rtol=0.11)


def bottom(page, selector: str) -> float:
    box = page.locator(selector).bounding_box()
    return box["y"] + box["height"]


def test_from_the_link_to_the_end(browser, serve, tmp_path: Path) -> None:
    data = samples(tmp_path, 0, 0, 40, (1, 8, 8), 3)
    judged = "masked = true\n[evaluation]\nshare = 0.2"
    training = {"batch_size": 4, "epochs": 60, "training": judged}
    kinds = {"phone": "low-rank:0.5"}
    toml = fleet(tmp_path / "c", **DIGITS, **training, kinds=kinds, top=TOLD)
    with serve(*toml, page=with_script_before_worker(LONG_PAUSES)) as server:
        records = keep_records(server)
        phone = Phone.opened(browser, server, "phone")
        page, listener = phone.page, Listener(phone.page)
        page.set_viewport_size(PHONE)
        page.get_by_role("button", name="Join").wait_for()
        page.reload()  # the link's token is not in the address bar any more
        page.get_by_role("button", name="Join").wait_for()
        assert page.inner_text("h1") == HTML
        assert page.title() != "run"
        estimate = "2 rounds, each of at most 10 min"
        for text in ("Tells ripe tomatoes", "Questions: Ada, ada@", estimate):
            page.get_by_text(text).wait_for()
        assert bottom(page, "#join button") < PHONE["height"]
        assert page.locator("#shares h2").first.bounding_box()["y"] < PHONE["height"]
        phone.train(data, "tablet")
        phone.wait_for("training")
        page.get_by_text("Round 1 of 2: Training").wait_for()
        page.get_by_text("of training left in all rounds").wait_for()
        page.get_by_role("button", name="Pause").click()
        phone.wait_for("paused")
        assert phone.view()["trainedSeconds"] > 0
        page.get_by_role("button", name="Continue").click()
        phone.wait_for("finished")
        assert phone.view()["trainedSeconds"] < 3600
        phone.reloaded()
        phone.wait_for("finished")
        page.get_by_text("stays until you press “Leave and erase”").wait_for()
        words = page.inner_text("main")
        assert not [word for word in ("When to train", "Change or add data") if word in words]
        assert "It trains the model in a compressed form." in words
        assert not [word for word in ("low-rank", "Loss", "samples", "numpy") if word in words]
        assert_told(page, listener, "POST /progress", UPDATE, f"{UPDATE} profile")
        assert "your examples" in told(page)[f"{UPDATE} classes"]
        assert [record["classes"] for record in records] == [[0, 1, 2]] * 2
        phone.leave()
        page.get_by_text("You have left.").wait_for()
        page.locator("#problem").wait_for(state="hidden")
        assert token(server, "phone") not in page.content()


def test_links_that_are_not_whole(browser, serve, tmp_path: Path) -> None:
    """One cut within the fingerprint of the coordinator's key, and one cut before it."""
    with serve(*fleet(tmp_path / "c", **DIGITS)) as server:
        link = token(server, "phone")
        cut = Phone.opened(browser, server, "phone", link=link[:-5])
        cut.wait_for_problem("join.unknown-token")
        cut.page.get_by_text("Open the complete link that you got from the operator").wait_for()
        bare = Phone.opened(browser, server, "phone", link=link.rpartition(".")[0])
        whole = Phone.opened(browser, server, "phone")
        for phone, warned in ((bare, True), (whole, False)):
            phone.page.get_by_role("button", name="Join").wait_for()
            assert phone.page.get_by_text("does not contain a fingerprint").is_visible() == warned
        assert not cut.page.get_by_role("button", name="Join").is_visible()


def test_words_that_somebody_on_the_way_has_altered(browser, serve, tmp_path: Path) -> None:
    def other(route) -> None:
        response = route.fetch()
        answer = response.json() | {"contact": "eve@example.org"}
        route.fulfill(response=response, body=json.dumps(answer))

    with serve(*fleet(tmp_path / "c", **DIGITS, top=TOLD)) as server:
        page = browser.new_context(locale="de").new_page()
        page.add_init_script(KEEP_VIEWS)
        page.route("**/v1/invitation", other)
        page.goto(f"{server.url}/join/#{token(server, 'phone')}")
        Phone(page).wait_for_problem("trust.forged-invitation")
        assert "eve@" not in page.content()
        page.get_by_text("nicht von ihrem Koordinator unterschrieben").wait_for()
