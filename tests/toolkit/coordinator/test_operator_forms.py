"""The forms of the operator's page: what each does, what it says, and what it refuses."""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership
from operator_pages import built_files, form_token, log_in
from operators import operator
from toolkit.coordinator.federation_source import FILE
from toolkit.coordinator.server import Server
from vector_fleet import VectorModel, configured, enrol, running, send_trained, task


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Server, dict[str, CoordinatorClient]]]:
    with running(configured(tmp_path / "c"), page=built_files(tmp_path)) as server:
        yield server, enrol(server, tmp_path)


@pytest.fixture
def browser(fleet: tuple[Server, object]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet[0].url, headers={"Accept": "text/html"}) as client:
        log_in(client, fleet[0].coordinator.operator_token)
        yield client


def send(browser: httpx.Client, path: str, **fields: object) -> str:
    """Send a form, and return what the next page says about it."""
    given = {"form_token": form_token(browser), **fields}
    answer = browser.post(f"/operator/{path}", data=given, follow_redirects=True)
    found = re.search(r'<p class="(?:done|problem)" role="\w+">([^<]*)</p>', answer.text)
    assert found is not None, answer.text
    return html.unescape(found[1])


def buttons(browser: httpx.Client, path: str) -> list[str]:
    return re.findall(r"<summary>([^<]*)</summary>", browser.get(f"/operator/{path}").text)


def test_malformed_requests_are_refused(browser: httpx.Client) -> None:
    """None of them is an internal error, which would answer 500."""
    given = {"form_token": form_token(browser), "reason": "x"}
    odd = browser.post("/operator/login", data={"token": "x"}, headers={"Origin": "http://["})
    assert odd.status_code == 403
    assert browser.get(f"/operator/audit?before={'9' * 5000}").status_code == 200
    for path in ("tokens/0", f"tokens/{'9' * 5000}", "tokens/x"):
        answer = browser.post(f"/operator/{path}/revoke", data=given, follow_redirects=True)
        assert answer.status_code == 200, path
        assert 'class="problem"' in answer.text
    for name in ("%E2%82%AC", "x%0d%0aX-Evil:%201", "x%3f%23"):
        answer = browser.post(f"/operator/devices/{name}/pause", data=given)
        assert answer.status_code == 303
        assert unquote(answer.headers["Location"]).endswith(f"devices/{unquote(name)}")
        assert "X-Evil" not in answer.headers


ASK = "Ask for a new secret"


def test_actions_on_a_device(
    fleet: tuple[Server, dict[str, CoordinatorClient]], browser: httpx.Client
) -> None:
    server, _ = fleet
    page = "devices/board-1"
    assert buttons(browser, page) == ["Pause", "Remove", "Ban", ASK]
    assert send(browser, f"{page}/pause", reason="broken") == "board-1 is paused."
    assert (
        "<strong>paused</strong>: by the operator: broken" in browser.get(f"/operator/{page}").text
    )
    assert "board-1 is paused." not in browser.get(f"/operator/{page}").text  # said once
    assert buttons(browser, page) == ["Resume", "Remove", "Ban", ASK]
    said = send(browser, f"{page}/secret", days=7, reason="seen by others")
    assert said == "board-1 is asked for a new secret."
    assert (
        "asked for a new secret; the old secret is valid until 20"
        in browser.get(f"/operator/{page}").text
    )
    assert buttons(browser, page) == ["Resume", "Remove", "Ban"]  # asking twice changes nothing
    assert send(browser, f"{page}/resume", reason="repaired") == "board-1 takes part again."
    assert send(browser, f"{page}/remove", reason="sold") == "board-1 is removed."
    assert buttons(browser, page) == ["Ban", "Let in"]
    assert send(browser, f"{page}/ban", reason="noise") == "board-1 is banned."
    assert send(browser, f"{page}/let-in", reason="other one") == "board-1 is let in again."
    log = [(e.who, e.action, e.reason) for e in operator(server).audit().entries]
    assert log == [
        ("operator", "pause", "broken"),
        ("operator", "rotate secret", "seen by others"),
        ("operator", "resume", "repaired"),
        ("operator", "remove", "sold"),
        ("operator", "ban", "noise"),
        ("operator", "let-in", "other one"),
    ]
    text = browser.get("/operator/audit").text
    assert text.index("other one") < text.index("broken")


def test_a_refused_form_changes_nothing(
    fleet: tuple[Server, dict[str, CoordinatorClient]], browser: httpx.Client
) -> None:
    server, links = fleet
    links["board-1"].leave()
    said = send(browser, "devices/board-1/pause", reason="x")
    assert said == "board-1 has left this federation, so it cannot be paused."
    assert "Expected `str` of length >= 1" in send(browser, "devices/desktop-1/ban", reason="")
    assert "matching regex" in send(browser, "devices/desktop-1/ban", reason="a\nb")
    assert "no action 'sell'" in send(browser, "devices/desktop-1/sell", reason="x")
    assert "did you mean 'desktop-1'" in send(browser, "devices/desktop-11/ban", reason="x")
    long = {"form_token": form_token(browser), "reason": "x" * 5000}
    assert browser.post("/operator/devices/desktop-1/ban", data=long).status_code == 413
    stranger = {"form_token": "guess", "reason": "x"}
    assert browser.post("/operator/devices/desktop-1/ban", data=stranger).status_code == 403
    assert operator(server).audit().entries == []


def test_the_open_round(
    fleet: tuple[Server, dict[str, CoordinatorClient]], browser: httpx.Client, tmp_path: Path
) -> None:
    server, links = fleet
    assert task(links["board-1"]).round == 1
    few = send(browser, "round/close", round=1, reason="nobody comes")
    assert few.startswith("Round 1 has 0 updates, and needs 2")
    moved = send(browser, "round/deadline", round=1, minutes=2880, reason="weekend")
    assert moved == "Round 1 has a new deadline."
    with server.coordinator.lock:
        remaining = server.coordinator.rounds.remaining_s(server.coordinator.clock())
    assert 47 * 3600 < remaining <= 48 * 3600
    for wrong in ({"minutes": "soon"}, {"minutes": "nan"}, {"minutes": -1}, {"round": "x"}):
        given = {"minutes": 1, "round": 1, "reason": "x", **wrong}
        assert send(browser, "round/deadline", **given).startswith("The form cannot be used")
    for name in ("desktop-1", "desktop-2"):
        send_trained(links[name], 1, tmp_path / name)
    closed = send(browser, "round/close", round=1, reason="the board is away")
    assert closed == "Round 1 closes with the updates that have come."
    assert task(links["desktop-1"]).round == 2
    actions = [entry.action for entry in operator(server).audit().entries]
    assert actions == ["end in 172800 s", "close"]


def test_updates_are_dropped_and_rounds_paused(
    fleet: tuple[Server, dict[str, CoordinatorClient]], browser: httpx.Client, tmp_path: Path
) -> None:
    server, links = fleet
    assert "Drop its update" not in buttons(browser, "devices/desktop-1")
    send_trained(links["desktop-1"], 1, tmp_path / "first")
    assert buttons(browser, "devices/desktop-1")[-1] == "Drop its update"
    dropped = send(browser, "devices/desktop-1/update/drop", round=1, reason="a wrong file")
    assert dropped == "Round 1 goes on without the update of desktop-1."
    send_trained(links["desktop-2"], 1, tmp_path / "second")
    aborted = send(browser, "round/abort", round=1, reason="wrong data")
    assert aborted == "Round 1 opens again without its updates."
    paused = send(browser, "rounds/pause", reason="maintenance")
    assert paused == "No new round opens until you resume the rounds."
    assert "paused by the operator: maintenance" in browser.get("/operator/").text
    assert "Resume the rounds" in buttons(browser, "")
    assert send(browser, "rounds/resume", reason="done") == "New rounds open again."
    assert task(links["board-1"]).round == 1
    gone = send(browser, "model", round=7, reason="x")
    assert "round 7" in gone.lower()
    back = send(browser, "model", round=0, reason="begin again")
    assert back == "The next round starts from the model after round 0."
    log = [(entry.action, entry.target) for entry in operator(server).audit().entries]
    assert log == [
        ("drop update of round 1", "desktop-1"),
        ("abort", "round 1"),
        ("pause", "rounds"),
        ("resume", "rounds"),
        ("go back", "round 0"),
    ]


def test_a_learning_rate_is_changed(
    fleet: tuple[Server, dict[str, CoordinatorClient]], browser: httpx.Client
) -> None:
    server, links = fleet
    assert task(links["board-1"]).round == 1
    server.coordinator.make_model = lambda config: VectorModel()
    assert "The file agrees with the settings in effect." in browser.get("/operator/settings").text
    file = server.config.state.parent / "fleet.toml"
    server.coordinator.store.set_value(FILE, str(file))
    text = file.read_text()
    file.write_text(text.replace("epochs = 1", "learning_rate = 0.01"))
    page = browser.get("/operator/settings").text
    assert "<td>0.05</td><td>0.01</td>" in page
    assert "take effect from round 2 on" in page
    assert (
        send(browser, "settings", reason="overfits")
        == "The changes take effect from the next round on."
    )
    page = browser.get("/operator/settings").text
    assert "Applied changes, in effect from round 2 on" in page
    assert buttons(browser, "settings") == ["Rotate the key"]
    file.write_text(text.replace("digits_cnn", "other"))
    assert 'role="alert"' in browser.get("/operator/settings").text
    [entry] = operator(server).audit().entries
    assert (entry.action, entry.reason) == ("set training.learning_rate: 0.05 -> 0.01", "overfits")


def test_the_key_is_rotated_and_the_login_stays(
    fleet: tuple[Server, dict[str, CoordinatorClient]], browser: httpx.Client
) -> None:
    coordinator = fleet[0].coordinator
    old = coordinator.key.fingerprint
    said = send(browser, "key", key=old, days=30, reason="yearly")
    assert said.startswith("The coordinator has a new key. Devices change to it when")
    page = browser.get("/operator/settings").text
    assert f"Its fingerprint is <code>{coordinator.key.fingerprint}</code>" in page
    until = f"with the earlier key <code>{old}</code> can change to the present key until 20"
    assert until in page
    assert "The form cannot be used" in send(browser, "key", key=old, days=0, reason="x")
    assert [entry.action for entry in operator(fleet[0]).audit().entries] == ["rotate key"]


def test_a_token_is_shown_once_and_revoked(
    fleet: tuple[Server, dict[str, CoordinatorClient]], browser: httpx.Client, tmp_path: Path
) -> None:
    server, links = fleet
    links["board-1"].leave()
    fields = {"kind": "board", "count": 1, "days": "", "reason": "a new one"}
    made = browser.post("/operator/tokens", data={"form_token": form_token(browser), **fields})
    assert (made.status_code, "<path" in made.text) == (200, True)
    [token] = re.findall(r"<pre[^>]*>([^<]*)</pre>", made.text)
    [link] = re.findall(r'href="([^"]*/join/[^"]*)"', made.text)
    assert unquote(link) == f"{server.url}/join/#{token}"
    assert token not in browser.get("/operator/tokens").text
    joined = membership.join(server.url, token.split(".")[0], "new", tmp_path / "new")
    assert joined.device == "board-2"
    said = send(browser, "tokens/1/revoke", reason="used")
    assert said == "No more devices can join with token 1."
    assert "revoked" in browser.get("/operator/tokens").text
    assert "no kind 'bord'" in send(browser, "tokens", kind="bord", reason="x")
