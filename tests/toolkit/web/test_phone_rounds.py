"""Pages and native agents in the same rounds: the same data and seed give the same update."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from device_agent.formats.update import read_update
from dropping_model import SHAPE as DROPPING_SHAPE
from firefox import firefox
from models_for_tests import INPUT_SHAPE
from phones import (
    KEEP_VIEWS,
    NativeAgent,
    Phone,
    fleet,
    keep_records,
    keep_updates,
    samples,
    token,
    with_slow_steps,
)
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server

pytestmark = pytest.mark.web

KINDS = {
    "whole": "full",
    "thin": "low-rank:0.25,keep=1",
    "weak": "slice:residual",
    "small": "slice:residual,recording=float16,frozen=int8",
    "personal": "cp:2.0,penalty=2.0,personal-steps=2,factor-steps=3,factor-rate=0.001",
    "narrow": "width:0.5",
}
CLOSE = 1e-5
CLOSE_WITH_ADAM = 1e-3
"""Adam divides by the square root of tiny second moments, and so amplifies rounding."""
CLOSE_IN_FLOAT16 = 1e-4
"""A rounding error of float32 may move an activation to the next number of float16."""
CLOSES = {"personal": CLOSE_WITH_ADAM, "small": CLOSE_IN_FLOAT16}
KILLS = 30
LONGEST_MS = 3000
LONG_STEP_MS = 5000


def assert_close(phone: dict[str, np.ndarray], native: Path, close: float = CLOSE) -> None:
    _, expected = read_update(native)
    assert phone.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.abs(value).max()), 1.0)
        difference = float(np.abs(phone[name] - value).max())
        assert difference <= close * scale, f"{name}: {difference:.1e}"


def assert_profiled(server: Server, name: str, native: Path) -> None:
    """The page's profile of a round is of the same graphs as the native agent's."""
    store = server.coordinator.store
    (device,) = (known for known in store.registry.devices() if known.name == name)
    profile = store.records.profiles(device.id)[-1]
    record, _ = read_update(native)
    assert record.profile is not None
    assert profile.structure == record.profile.structure
    (phase,), (other, *_) = profile.phases, record.profile.phases
    assert phase.role == other.role == "train"
    assert 0 < phase.steady.p10_s <= phase.steady.median_s <= phase.steady.p90_s
    assert phase.memory.peak_bytes >= 1 << 20


def test_a_page_whose_time_is_used_up_trains_one_batch(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    data = samples(tmp_path, seed, 0, 100)
    settings = {"rounds": 1, "epochs": 3, "top": "budget_s = 0.000001"}
    with serve(*fleet(tmp_path / "c", **settings)) as server:
        records = keep_records(server)
        phone = Phone.opened(browser, server, "phone").joined("a phone", data)
        phone.start()
        phone.wait_for("finished")
    assert [(record["steps"], record["samples"]) for record in records] == [(1, 8)]


@pytest.mark.parametrize("spec", ["full", "slice:residual", KINDS["small"]])
def test_a_tab_that_is_killed_again_and_again(
    browser, serve, tmp_path: Path, seed: int, spec: str
) -> None:
    draw = random.Random(seed)
    data = samples(tmp_path, seed, 0, 900)
    settings = {"kinds": {"phone": spec}, "count": 2, "rounds": 1, "epochs": 12}
    with serve(*fleet(tmp_path / "c", **settings)) as server:
        sent = keep_updates(server)
        whole = Phone.opened(browser, server, "phone")
        whole.train(data, "whole")
        phone = Phone.opened(browser, server, "phone")
        phone.train(data, "killed")
        phone.wait_for("training")
        kills = 0
        while kills < KILLS and ("killed", 1) not in sent:
            phone.page.wait_for_timeout(draw.uniform(20, LONGEST_MS))
            phone.killed()
            kills += 1
        for page in (phone, whole):
            page.wait_for("finished")
    assert kills > 3
    for name, value in sent["whole", 1].items():
        np.testing.assert_array_equal(sent["killed", 1][name], value, name)


@pytest.mark.parametrize("end", [Phone.reloaded, Phone.killed])
def test_interruptions_in_long_steps(
    browser, serve, tmp_path: Path, seed: int, end: Callable[[Phone], None]
) -> None:
    """The training goes on by itself each time, without a word about an error."""
    draw = random.Random(seed)
    data = samples(tmp_path, seed, 0, 32)
    toml = fleet(tmp_path / "c", rounds=1, count=2)
    with serve(*toml, page=with_slow_steps(LONG_STEP_MS)) as server:
        sent = keep_updates(server)
        whole = Phone.opened(browser, server, "phone")
        whole.train(data, "whole")
        phone = Phone.opened(browser, server, "phone")
        phone.train(data, "slow")
        phone.wait_for("training")
        for _ in range(KILLS):
            phone.page.wait_for_timeout(min(draw.expovariate(1 / LONG_STEP_MS), 3 * LONG_STEP_MS))
            assert (phone.view() or {}).get("problem") is None
            end(phone)
        for page in (phone, whole):
            page.wait_for("finished")
    for name, value in sent["whole", 1].items():
        np.testing.assert_array_equal(sent["slow", 1][name], value, name)


def test_two_tabs_and_the_back_button(browser, serve, tmp_path: Path, seed: int) -> None:
    """One tab trains. Another waits, says so, and goes on when the first one has ended."""
    with serve(*fleet(tmp_path / "c", rounds=1, epochs=500, count=2)) as server:
        first = Phone.opened(browser, server, "phone")
        first.train(samples(tmp_path, seed, 0, 40), "first")
        Phone.opened(browser, server, "phone").train(samples(tmp_path, seed, 1, 40), "other")
        first.wait_for("training")
        second = first.in_another_tab()
        second.wait_for("held")
        second.page.get_by_text("Waiting: this page is open in another tab").wait_for()
        first.page.goto("about:blank")
        second.wait_for("training")
        first.page.go_back()
        first.wait_for("held")
        second.page.close()
        first.wait_for("training")


def test_a_tab_that_crashes(browser, serve, tmp_path: Path, seed: int) -> None:
    """The crashed tab stays open. The page goes on in another one."""
    from playwright.sync_api import Error  # only `make test-web` installs it

    with serve(*fleet(tmp_path / "c", rounds=1, epochs=500)) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.train(samples(tmp_path, seed, 0, 40), "phone")
        phone.wait_for("training")
        again = phone.page.context.new_page()
        again.add_init_script(KEEP_VIEWS)
        address = phone.page.url
        with phone.page.expect_event("crash"), suppress(Error):  # it cannot answer
            phone.page.goto("chrome://crash", timeout=5000)
        again.goto(address)
        Phone(again).wait_for("training")
        assert Phone(again).view()["problem"] is None


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        pytest.param("foreign_models:Recurrent", (7, 6), id="lstm"),
        pytest.param("dropping_model:Dropping", DROPPING_SHAPE, id="dropout"),
        # The page trains Winograd's form, if it finds that it is faster there.
        pytest.param("models_for_tests:wide_cnn", INPUT_SHAPE, id="wide"),
    ],
)
def test_other_models_beside_a_native_agent(
    browser, serve, tmp_path: Path, seed: int, model: str, shape: tuple[int, ...]
) -> None:
    data = samples(tmp_path, seed, 0, 25, shape, 3)
    given = {"model": model, "shape": shape, "classes": 3, "count": 2}
    with serve(*fleet(tmp_path / "c", **given)) as server:
        sent = keep_updates(server)
        agent = NativeAgent(server, "phone", tmp_path / "native", data)
        agent.start()
        phone = Phone.opened(browser, server, "phone")
        phone.train(data, "phone")
        phone.wait_for("finished")
        agent.finish()
        for round_ in (1, 2):
            assert_close(sent["phone", round_], agent.sent[round_])


@pytest.mark.parametrize("spec", ["full", "slice:residual"])
def test_firefox_beside_a_native_agent(serve, tmp_path: Path, seed: int, spec: str) -> None:
    data = samples(tmp_path, seed, 0, 40)
    with serve(*fleet(tmp_path / "c", kinds={"phone": spec}, count=2)) as server:
        sent = keep_updates(server)
        agent = NativeAgent(server, "phone", tmp_path / "native", data)
        agent.start()
        with firefox(tmp_path / "profile") as tab:
            tab.before_pages(KEEP_VIEWS)
            tab.goto(f"{server.url}/join/#{token(server, 'phone')}")
            tab.wait_for("window.view?.stage === 'new'")
            tab.evaluate("document.getElementById('name').value = 'fox'")
            tab.click("#joining button")
            tab.wait_for("window.view?.stage === 'joined'")
            tab.choose_file("#npz", data)
            tab.wait_for("!document.getElementById('train').disabled")
            tab.click("#train")
            tab.wait_for("window.view?.stage === 'finished'")
        agent.finish()
        for round_ in (1, 2):
            assert_close(sent["fox", round_], agent.sent[round_])


def test_a_browser_that_erased_what_the_page_had_stored(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    """The device begins as a new one, and its old place becomes free."""
    data = samples(tmp_path, seed, 0, 900)
    top = 'min_devices = 1\nforget_after = "4s"'
    with serve(*fleet(tmp_path / "c", epochs=12, count='"any"', top=top)) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.train(data, "first")
        phone.wait_for("training")
        origin = {"origin": server.url, "storageTypes": "all"}
        devtools = phone.page.context.new_cdp_session(phone.page)
        devtools.send("Storage.clearDataForOrigin", origin)
        phone.killed()
        phone.wait_for("new")
        phone.page.get_by_text("Open the complete link").wait_for()
        again = Phone.opened(browser, server, "phone")
        again.train(data, "second")
        phone = again
        phone.wait_for("finished")
        states = {device.name: device.state for device in server.coordinator.status().devices}
    assert states["first"] == "absent"
    assert states["second"] in ("waiting", "finished")


def test_every_family_in_one_round_with_native_agents(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    data = {kind: samples(tmp_path, seed, i, 17 + i) for i, kind in enumerate(KINDS)}
    # The model below is the plain mean of what the native agents have sent.
    top = "aggregation = {bounds = false, judge = false}"
    with serve(*fleet(tmp_path / "c", kinds=KINDS, count=2, top=top)) as server:
        sent = keep_updates(server)
        agents = {k: NativeAgent(server, k, tmp_path / f"native-{k}", data[k]) for k in KINDS}
        for agent in agents.values():
            agent.start()
        phones = {kind: Phone.opened(browser, server, kind) for kind in KINDS}
        for kind, phone in phones.items():
            phone.train(data[kind], f"phone {kind}")
        for phone in phones.values():
            phone.wait_for("finished")
        for agent in agents.values():
            agent.finish()
        for kind in KINDS:
            for round_ in (1, 2):
                close = CLOSES.get(kind, CLOSE)
                assert_close(sent[f"phone {kind}", round_], agents[kind].sent[round_], close)
            assert_profiled(server, f"phone {kind}", agents[kind].sent[2])
        final = load_file(server.config.state / "global.safetensors")
        # The same two rounds with what the native agents have sent, twice.
        alone = federation(server.config)
        for round_ in (1, 2):
            for spec in KINDS.values():
                alone.bundle(spec, round_)
            updates = [read_update(agents[kind].sent[round_]) for kind in KINDS for _ in range(2)]
            alone.fold(updates)
        alone.save()
        expected = alone.model.tensors
        for name, value in expected.items():
            assert float(np.abs(final[name] - value.numpy()).max()) <= CLOSE_WITH_ADAM, name
