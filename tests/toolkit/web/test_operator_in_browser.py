"""The operator's page in Chromium: a round watched to its end, actions, and every view by axe."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from device_agent.federation import membership
from operators import operator
from phones import assert_accessible_page
from toolkit.coordinator.federation_source import FILE
from toolkit.coordinator.server import Server
from toolkit.web.built_page import read_page
from vector_fleet import VectorModel, configured, enrol, running, send_all, send_trained, task

pytestmark = pytest.mark.web

VIEWS = (
    "login",
    "",
    "devices",
    "devices/board-1",
    "unused",
    "tokens",
    "settings",
    "audit",
    "public",
    "devices/nobody",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(configured(tmp_path / "c"), page=read_page()) as started:
        yield started


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """A page that has logged in, and that no error was written about."""
    opened, said = browser.new_context().new_page(), []
    opened.on(
        "console", lambda message: said.append(message.text) if message.type == "error" else 0
    )
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(server.url)
    opened.get_by_label("Operator's token").fill(server.coordinator.operator_token)
    opened.get_by_role("button", name="Log in").click()
    opened.get_by_role("heading", name="Overview").wait_for()
    yield opened
    assert [line for line in said if "404" not in line] == []


def send_form(page: Any, button: str, reason: str, **fields: str) -> None:
    form = page.locator("details.action", has=page.locator("summary", has_text=button))
    form.locator("summary").click()
    for name, value in fields.items():
        form.locator(f"[name={name}]").fill(value)
    form.get_by_label("Reason").fill(reason)
    form.get_by_role("button", name=button).click()


def test_a_round_is_watched_to_its_end(page: Any, server: Server, tmp_path: Path) -> None:
    page.get_by_text("0 of 3 devices have joined.").wait_for()
    links = enrol(server, tmp_path)
    task(links["board-1"])
    page.get_by_text("0 of 3 updates have come.").wait_for()  # without a reload
    page.get_by_role("link", name="board-1").wait_for()
    page.locator("summary", has_text="Close the round").click()
    page.get_by_label("Reason").first.fill("half a reas")
    send_trained(links["desktop-1"], 1, tmp_path / "a")
    page.get_by_text("1 of 3 updates has come.").wait_for()
    reason = page.get_by_label("Reason").first
    assert (reason.is_visible(), reason.input_value()) == (True, "half a reas")
    assert page.evaluate("document.activeElement.name") == "reason"
    send_trained(links["desktop-2"], 1, tmp_path / "b")
    send_trained(links["board-1"], 1, tmp_path / "c2")
    page.get_by_role("heading", name="Round 2 of 3").wait_for()
    page.locator("#quality-chart canvas").wait_for()
    assert "--" not in page.locator("#quality-chart .u-legend").inner_text()
    page.locator("#quality-chart .u-over").hover()
    shown = page.locator("#quality-chart .u-legend").inner_text()
    assert "0.5" in shown, shown
    page.get_by_role("rowheader", name="1", exact=True).wait_for()


def test_actions(page: Any, server: Server, tmp_path: Path) -> None:
    links = enrol(server, tmp_path)
    task(links["board-1"])
    for name in ("desktop-1", "desktop-2"):
        send_trained(links[name], 1, tmp_path / name)
    page.get_by_text("2 of 3 updates have come.").wait_for()
    page.reload()  # the login stays
    send_form(page, "Close the round", "the board is away")
    page.get_by_text("Round 1 closes with the updates that have come.").wait_for()
    page.get_by_role("link", name="Devices").click()
    page.get_by_label("Id or name").fill("BOARD")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("1 device, 1 to 1 shown.").wait_for()
    page.get_by_role("link", name="board-1").click()
    send_form(page, "Remove", "sold")
    page.get_by_text("board-1 is removed.").wait_for()
    page.get_by_text("removed by the operator: sold").first.wait_for()
    page.get_by_role("link", name="Join tokens").click()
    page.locator("summary", has_text="Make a token").click()
    page.get_by_label("Kind").select_option("board")
    page.locator("summary", has_text="Make a token").click()
    send_form(page, "Make a token", "a new board", count="1")
    page.get_by_role("img", name="QR code of the link").wait_for()
    made = page.locator("pre").inner_text()
    assert membership.join(server.url, made, "new", tmp_path / "new").device == "board-2"
    server.coordinator.make_model = lambda config: VectorModel()
    file = server.config.state.parent / "fleet.toml"
    server.coordinator.store.set_value(FILE, str(file))
    file.write_text(file.read_text().replace("epochs = 1", "learning_rate = 0.01"))
    page.get_by_role("link", name="Settings").click()
    page.get_by_role("cell", name="0.01").wait_for()
    send_form(page, "Apply the file", "it overfits")
    page.get_by_text("The changes take effect from the next round on.").wait_for()
    page.get_by_role("link", name="Audit log").click()
    page.get_by_role("cell", name="a new board").wait_for()
    assert [entry.reason for entry in operator(server).audit().entries] == [
        "the board is away",
        "sold",
        "a new board",
        "it overfits",
    ]
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Operator's token").wait_for()
    page.goto(f"{server.url}/operator/devices")
    page.get_by_label("Operator's token").wait_for()


def test_a_reader_sees_the_role_and_that_tables_scroll(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    links = enrol(server, tmp_path)
    registry = server.coordinator.store.registry
    registry._keep(replace(registry.device("board-1"), name="a\u202eb"))
    opened = browser.new_context(viewport={"width": 360, "height": 740}).new_page()
    opened.goto(server.url)
    made = operator(server).add_operator("anna", "read-only", "plots")
    opened.get_by_label("Operator's token").fill(made.token)
    opened.get_by_role("button", name="Log in").click()
    opened.get_by_text("anna, read-only").wait_for()
    assert opened.locator("header").get_by_text("anna, read-only").is_visible()
    opened.goto(f"{server.url}/operator/devices")
    opened.get_by_role("cell", name=r"a\u202eb").wait_for()
    table = opened.locator(".scroll").first
    wide, narrow, shades = table.evaluate(
        "(e) => [e.scrollWidth, e.clientWidth, getComputedStyle(e).backgroundImage]"
    )
    assert wide > narrow
    assert shades.count("gradient") == 4
    right = {"x": 0, "y": 0, "width": 360, "height": 740}
    before = opened.screenshot(clip=right)
    table.evaluate("(e) => { e.scrollLeft = e.scrollWidth }")
    assert opened.screenshot(clip=right) != before
    assert task(links["board-1"]).round == 1


def test_every_view(page: Any, server: Server, tmp_path: Path) -> None:
    links = enrol(server, tmp_path)
    send_all(links, 1, tmp_path)
    task(links["board-1"])
    operator(server).act("pause", "desktop-2", "x" * 200)
    for view in VIEWS:
        page.goto(f"{server.url}/operator/{view}")
        for summary in page.locator("summary").all():
            summary.click()
        assert_accessible_page(page, view, [(360, 740), (1280, 800)])
