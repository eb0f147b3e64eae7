"""Somebody on the way to the page: what is altered is refused, and shown as text."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from phones import Phone, fleet, keep_updates, samples
from toolkit.aggregation.federation import Federation
from unsafe_graphs import in_a_branch

pytestmark = pytest.mark.web

DIGITS = {"model": "toolkit.models:digits_cnn", "shape": (1, 8, 8), "classes": 10, "rounds": 1}
HTML = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"


@pytest.fixture
def phone(browser, serve, tmp_path: Path, seed: int):
    """A page that has not joined yet, its coordinator's updates, and data for it."""
    data = samples(tmp_path, seed, 0, 30, (1, 8, 8), 10)
    with serve(*fleet(tmp_path / "c", **DIGITS)) as server:
        sent = keep_updates(server)
        yield Phone.opened(browser, server, "phone"), sent, data


def altered(change: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """Answers with the coordinator's JSON after `change`."""

    def handle(route) -> None:
        response = route.fetch()
        answer = response.json()
        change(answer)
        route.fulfill(response=response, body=json.dumps(answer))

    return handle


def swap(answer: dict[str, Any]) -> None:
    for offer in answer["files"]:
        if offer["name"] == "weights.safetensors":
            offer["sha256"] = "0" * 64


def unsigned(answer: dict[str, Any]) -> None:
    answer["signature"] = ""


def longer(route) -> None:
    response = route.fetch()
    route.fulfill(response=response, body=response.body() + b"\0" * 1000)


def other_bytes(route) -> None:
    response = route.fetch()
    body = response.body()
    route.fulfill(response=response, body=body[:-1] + bytes([body[-1] ^ 1]))


@pytest.mark.parametrize(
    ("path", "handle", "code"),
    [
        ("**/v1/work", altered(swap), "trust.forged-work"),
        ("**/v1/work", altered(unsigned), "trust.forged-work"),
        ("**/v1/files/*", longer, "client.too-long"),
        ("**/v1/files/*", other_bytes, "bundle.altered-file"),
    ],
)
def test_nothing_altered_is_trained(phone, path: str, handle, code: str) -> None:
    page, sent, data = phone
    page.page.route(path, handle)
    page.train(data, "phone")
    page.wait_for_problem(code)
    assert not sent


def test_a_graph_that_no_export_makes(
    browser, serve, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator itself has signed it. test_page_modules.py has graphs of other kinds."""
    make = Federation.bundle

    def bundle(self: Federation, submodel: str, round_: int) -> dict[str, bytes]:
        files = make(self, submodel, round_)
        manifest = json.loads(files["manifest.json"])
        for name in list(manifest["files"]):  # the plain graph and its other forms
            if name.startswith("train.") and name.endswith(".onnx"):
                graph = onnx.load_from_string(files[name])
                in_a_branch(graph)
                files[name] = graph.SerializeToString()
                manifest["files"][name] = {
                    "size": len(files[name]),
                    "sha256": hashlib.sha256(files[name]).hexdigest(),
                }
        return files | {"manifest.json": json.dumps(manifest).encode()}

    monkeypatch.setattr(Federation, "bundle", bundle)
    data = samples(tmp_path, seed, 0, 30, (1, 8, 8), 10)
    with serve(*fleet(tmp_path / "c", **DIGITS)) as server:
        page = Phone.opened(browser, server, "phone")
        page.train(data, "phone")
        page.wait_for_problem("bundle.unsafe-graph")
        page.page.locator("#problem").get_by_text("of the domain 'com.evil'. Exported").wait_for()


def test_a_join_that_another_coordinator_answers(phone) -> None:
    page, _, _ = phone

    def other_key(answer: dict[str, Any]) -> None:
        answer["key"] = "A" * 43 + "="

    page.page.route("**/v1/devices", altered(other_key))
    page.join("phone")
    page.wait_for_problem("trust.other-key")
    assert page.view()["device"] is None


def test_what_comes_from_elsewhere_is_shown_as_text(phone) -> None:
    page, _, _ = phone
    body = json.dumps({"code": "join.x", "message": HTML})
    page.page.route("**/v1/devices", lambda route: route.fulfill(status=403, body=body))
    page.join(HTML)
    page.wait_for_problem("join.x")
    page.page.locator("#problem").wait_for()
    assert page.page.inner_text("#problem") == HTML
    assert page.page.locator("main b, main img").count() == 0
    assert page.page.title() != "run"
