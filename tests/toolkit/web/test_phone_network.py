"""A page on networks that stand still, break off or are away, over real sockets."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gate_proxy import Gate, gate
from phones import KEEP_VIEWS, Phone, fleet, keep_updates, samples, token, with_timers
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.http.server_socket import answer_preparing, bind
from toolkit.coordinator.server import Server

pytestmark = pytest.mark.web

WIDE = {"model": "models_for_tests:wide_cnn", "epochs": 1, "training": ""}
KEPT = """async () => ({
  caches: await caches.keys(),
  databases: (await indexedDB.databases()).map(({ name }) => name),
  files: await Array.fromAsync((await navigator.storage.getDirectory()).keys()),
  workers: (await navigator.serviceWorker.getRegistrations()).map(({ scope }) => scope),
  settings: Object.keys(localStorage),
  session: Object.keys(sessionStorage),
})"""


@pytest.fixture
def network(browser, serve, tmp_path: Path, seed: int):
    """Serves a federation behind a gate: the server, a page that has not joined, the gate, data."""

    @contextmanager
    def serving(rounds: int = 1, **options: object) -> Iterator[tuple[Server, Phone, Gate, Path]]:
        data = samples(tmp_path, seed, 0, 16)
        served = serve(*fleet(tmp_path / "c", rounds=rounds, **WIDE), **options)
        with served as server, gate(server.url) as (url, network):
            yield server, Phone.opened(browser, server, "phone", url=url), network, data

    return serving


def test_a_request_that_stands_still_is_made_again(network) -> None:
    """What still moves, however slowly, is not ended."""
    with network(page=with_timers(0.05)) as (_, phone, gate, data):
        phone.join("phone")
        phone.wait_for("joined")
        phone.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        # 50 kB in a second: the model takes longer than a request may stand still.
        gate.piece = 1000
        phone.page.get_by_label("Data file").set_input_files(str(data))
        phone.start()
        phone.wait_for("training")
        assert phone.view()["problem"] is None
        gate.piece, gate.state = None, "still"
        phone.wait_for_problem("client.away")
        phone.page.get_by_text("The coordinator does not answer.").wait_for()
        gate.state = "open"
        phone.wait_for("finished")
        assert phone.view()["problem"] is None


def test_an_upload_that_breaks_off_continues(network) -> None:
    with network(page=with_timers(0.05)) as (server, phone, gate, data):
        sent = keep_updates(server)
        phone.train(data, "phone")
        phone.wait_for("training")
        size = sum(
            value.nbytes for value in load_file(server.config.state / "global.safetensors").values()
        )
        gate.limit = size // 3
        phone.wait_for("finished")
    assert sum(value.nbytes for value in sent["phone", 1].values()) > 2 * gate.limit
    assert all(np.isfinite(value).all() for value in sent["phone", 1].values())


@pytest.mark.parametrize("state", ["still", "refuse"])
def test_pausing_without_a_network(network, state: str) -> None:
    """Nothing waits for a request that stands still: it would do so for hours here."""
    with network(page=with_timers(1000, longer_than_ms=4000)) as (_, phone, gate, data):
        phone.joined("phone", data)
        gate.state = state
        phone.start()
        phone.wait_for("waiting")
        phone.page.get_by_role("button", name="Pause").click()
        phone.wait_for("paused")
        gate.state = "open"
        phone.page.get_by_role("button", name="Continue").click()
        phone.wait_for("finished")


@pytest.mark.parametrize("again", ["button", "online"])
def test_a_coordinator_that_was_away(network, again: str) -> None:
    """Waits take 1, 2 and 4 seconds, and from then on hours here."""
    with network(page=with_timers(1000, longer_than_ms=4000)) as (_, phone, gate, data):
        phone.joined("phone", data)
        gate.state = "refuse"
        phone.start()
        phone.page.get_by_text("Trying again in 3 s.").wait_for()  # of 4
        phone.wait_until("() => view.problem?.retryAt > Date.now() + 5000")
        gate.state = "open"
        if again == "button":
            phone.page.get_by_role("button", name="Try now").click()
        else:
            phone.page.evaluate("dispatchEvent(new Event('online'))")
        phone.wait_for("finished")
        phone.page.get_by_role("button", name="Try now").wait_for(state="hidden")


def test_another_program_in_the_place_of_the_coordinator(network) -> None:
    """A login page of the network, or a proxy that wants a password, ends nothing."""
    with network(page=with_timers(0.05)) as (_, phone, _, data):
        answers = iter([(404, "<p>no"), (403, "<p>pay"), (407, ""), (511, "<p>"), (200, "<p>hi")])

        def answer(route) -> None:
            status, body = next(answers, (0, ""))
            if status:
                route.fulfill(status=status, body=body, content_type="text/html")
            else:
                route.continue_()

        phone.page.context.route(re.compile("/v1/work$"), answer)
        phone.train(data, "phone")
        phone.wait_for("finished")
        assert next(answers, None) is None


def test_a_proxy_without_its_coordinator(network) -> None:
    """The page opens from its copy, waits, and goes on by itself."""
    with network(rounds=1000, page=with_timers(0.05)) as (_, phone, gate, data):
        phone.train(data, "phone")
        phone.wait_for("training")
        phone.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        gate.state = "bad"
        phone.page.reload()
        phone.wait_for_problem("client.away")
        phone.page.get_by_text("cannot be reached at the moment (HTTP 502).").wait_for()
        gate.state = "open"
        phone.wait_for("training")


def test_a_coordinator_that_is_starting(browser, tmp_path: Path) -> None:
    toml, folder = fleet(tmp_path / "c", **WIDE)
    file = folder / "fleet.toml"
    file.write_text(toml)
    config, page = load_config(file), with_timers(0.05)
    listening = bind("127.0.0.1", 0, file)
    opened = browser.new_page()
    opened.add_init_script(KEEP_VIEWS)
    phone = Phone(opened)
    model = federation(config)
    tokens = Server(config, model, file)
    tokens.close()
    with answer_preparing(listening, page=page):
        port = listening.getsockname()[1]
        opened.goto(f"http://127.0.0.1:{port}/join/#{token(tokens, 'phone')}")
        phone.join("phone")
        phone.wait_for_problem("client.away")
        opened.get_by_text("still preparing the federation").wait_for()
    server = Server(config, model, file, page=page, listening=listening)
    thread = threading.Thread(target=server.run)
    thread.start()
    phone.wait_for("joined")
    opened.close()
    server.stop()
    thread.join()


@pytest.mark.parametrize("state", ["open", "still"])
def test_leaving_erases_everything(network, state: str) -> None:
    """Whether the coordinator answers or not."""
    with network(rounds=1000, page=with_timers(0.05)) as (server, phone, gate, data):
        phone.train(data, "phone")
        phone.wait_for("training")
        page = phone.page
        earlier = {"name": "old", "probability": 1}
        phone.store(
            predictions={"round": 7, "before": earlier, "after": earlier},
            losses=[{"round": 7, "loss": 1}],
        )
        phone.wait_until("async () => (await caches.keys()).length > 0")
        page.get_by_label("Pause while this page is hidden").check()
        before = page.evaluate(KEPT)
        assert all(before[kind] for kind in before if kind != "session"), before
        gate.state = state
        phone.leave()
        phone.wait_for("new")
        nothing = f"async () => Object.values(await ({KEPT})()).flat().length === 0"
        phone.wait_until(nothing)
        if state == "still":
            assert phone.view()["problem"]["code"] == "leave.untold"
            page.get_by_text("tell the operator that “phone” (phone-1) has left").wait_for()
            gate.state = "open"
            return
        assert phone.view()["problem"] is None
        assert [device.state for device in server.coordinator.status().devices] == ["left"]
        phone.join("again")
        phone.wait_for("joined")
        assert (phone.view()["predictions"], phone.view()["losses"]) == (None, [])
        assert phone.view()["data"] is None
        phone.leave()
        phone.wait_for("new")
        phone.wait_until(nothing)
        page.reload()
        phone.wait_for("new")
        phone.wait_until(nothing)
