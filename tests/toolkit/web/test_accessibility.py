"""Every view of the page by axe-core, on the narrowest phone and on a desktop, light and dark."""

from pathlib import Path

import pytest

from phones import Phone, assert_accessible_page, fleet, samples

pytestmark = pytest.mark.web

DIGITS = {"model": "toolkit.models:digits_cnn", "shape": (1, 8, 8), "classes": 10}
SAME = {"EdgeTailor", "Pause", "Training"}
"""Words that German shares with English."""


def assert_accessible(phone: Phone, view: str) -> None:
    assert_accessible_page(phone.page, view, [(320, 640), (360, 740), (1280, 800)])


def test_every_view(browser, serve, tmp_path: Path) -> None:
    toml, folder = fleet(tmp_path / "c", **DIGITS, rounds=1, batch_size=4, epochs=12)
    with serve(toml, folder) as server:
        phone = Phone.opened(browser, server, "phone")
        page = phone.page
        phone.wait_for("new")
        assert_accessible(phone, "joining")
        phone.join("a name of a device that is as long as names may be, 64 letters, ok")
        phone.wait_for("joined")
        assert_accessible(phone, "joined")
        (tmp_path / "broken.npz").write_bytes(b"no archive")
        page.get_by_label("Data file").set_input_files(str(tmp_path / "broken.npz"))
        page.locator("#data-problem").wait_for()
        assert_accessible(phone, "a problem")
        data = samples(tmp_path, 0, 0, 600, (1, 8, 8), 10)
        page.get_by_label("Data file").set_input_files(str(data))
        phone.start()
        phone.wait_for("training")
        page.get_by_role("button", name="Pause").click()
        phone.wait_for("paused")
        assert_accessible(phone, "paused")
        page.get_by_role("button", name="Leave and erase").first.click()
        page.locator("dialog[open]").wait_for()
        assert_accessible(phone, "leaving")
        page.get_by_role("button", name="Stay").click()
        page.locator("#pause").click()
        phone.wait_for("finished")
        assert_accessible(phone, "finished")
        page.locator("#try-file").set_input_files(str(data))
        page.get_by_text("Most probable: class").wait_for()
        assert_accessible(phone, "an answer")
        page.locator("#try-file").set_input_files(str(tmp_path / "broken.npz"))
        page.locator("#try-problem").wait_for()
        assert_accessible(phone, "no answer")
    without = browser.new_context().new_page()
    with serve(toml, folder) as server:
        without.goto(f"{server.url}/join/")
        without.get_by_text("Open the complete link").wait_for()
        assert_accessible(Phone(without), "no token")


@pytest.mark.parametrize(
    ("model", "shape", "data"),
    [
        ("pictures", (3, 16, 12), 'kind = "images"\nclasses = ["cat", "dog", "owl of the barn"]'),
        (
            "series_last",
            (7, 6),
            'kind = "series"\ncolumns = ["ax", "ay", "az", "gx", "gy", "gz"]\nlabel = "activity"\n'
            'classes = ["sitting", "walking", "running"]',
        ),
    ],
)
def test_the_fields_for_files(
    browser, serve, tmp_path: Path, model: str, shape: tuple[int, ...], data: str
) -> None:
    given = {"model": f"sample_models:{model}", "shape": shape, "top": f"[data]\n{data}"}
    with serve(*fleet(tmp_path / "c", **given, classes=3)) as server:
        phone = Phone.opened(browser, server, "phone")
        phone.join("phone")
        phone.wait_for("joined")
        assert_accessible(phone, model)


def test_german(browser, serve, tmp_path: Path) -> None:
    every = "[...document.querySelectorAll('[data-text]')].map(({ textContent }) => textContent)"
    with serve(*fleet(tmp_path / "c", **DIGITS)) as server:
        english = Phone.opened(browser, server, "phone", "fr")
        german = Phone.opened(browser, server, "phone", "de-AT")
        german.wait_for("new")
        english.wait_for("new")
        assert english.page.evaluate("document.documentElement.lang") == "en"
        assert german.page.evaluate("document.documentElement.lang") == "de"
        words = zip(english.page.evaluate(every), german.page.evaluate(every), strict=True)
        assert {word for word, other in words if word == other} <= SAME
        assert_accessible(german, "joining in German")
        german.page.get_by_label("Name dieses Geräts").fill("Gerät")
        german.page.get_by_role("button", name="Mitmachen").click()
        german.wait_for("joined")
        (tmp_path / "broken.npz").write_bytes(b"no archive")
        german.page.get_by_label("Datei mit Daten").set_input_files(str(tmp_path / "broken.npz"))
        german.page.get_by_text("broken.npz ist keine vollständige Datei").wait_for()
        assert_accessible(german, "a problem in German")
