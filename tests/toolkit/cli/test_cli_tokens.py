"""`edgetailor tokens`: what it lists, and codes that a phone can read."""

import json
from pathlib import Path

import pytest
import segno

from commands import edgetailor, refused
from toolkit.cli.printed.tokens_text import qr_code
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.join_links import NEEDS_HTTPS, NO_PAGE, join_link, phones_accept
from toolkit.web.built_page import is_built
from vector_fleet import configured, enrol, full_token, running

PROXY = "https://fleet.example.org"
NOTES = [] if is_built() else [NO_PAGE]


@pytest.fixture(scope="module")
def fleet_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation that was served, in which all three devices have joined."""
    folder = tmp_path_factory.mktemp("fleet")
    with running(configured(folder)) as server:
        enrol(server, folder)
    return folder


@pytest.fixture
def config(fleet_folder: Path) -> CoordinatorConfig:
    return configured(fleet_folder)


@pytest.mark.parametrize("place", ["fleet.toml", "state"])
def test_the_list(fleet_folder: Path, config: CoordinatorConfig, place: str) -> None:
    url = (config.state / "address").read_text().strip()
    done = edgetailor("tokens", place, cwd=fleet_folder)
    assert (done.code, done.stderr.splitlines()) == (0, NOTES)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("desktop: full, 2 of 2 places taken, until 20")
    assert lines[1:3] == [
        "  state/tokens/desktop.token",
        f"  {url}/join/#{full_token(config, 'desktop')}",
    ]
    assert lines[3].startswith("board: low-rank:0.5, 1 of 1 place taken, until 20")
    # A link is not wrapped, so that it can be copied.
    assert max(len(line) for line in lines if "/join/" not in line) <= 80


def test_as_json_with_the_address_of_a_proxy(fleet_folder: Path, config: CoordinatorConfig) -> None:
    done = edgetailor("tokens", "state", "--url", f"{PROXY}/", "--json", cwd=fleet_folder)
    document = json.loads(done.stdout)
    assert (done.stderr, document["url"], document["notes"]) == ("", PROXY, NOTES)
    assert [(one["kind"], one["count"], one["joined"]) for one in document["tokens"]] == [
        ("desktop", 2, 2),
        ("board", 1, 1),
    ]
    assert document["tokens"][1]["link"] == f"{PROXY}/join/#{full_token(config, 'board')}"
    assert document["tokens"][1]["file"] == "state/tokens/board.token"


def test_codes(fleet_folder: Path, config: CoordinatorConfig) -> None:
    done = edgetailor("tokens", "state", "--url", PROXY, "--qr", "board", cwd=fleet_folder)
    link = f"{PROXY}/join/#{full_token(config, 'board')}"
    head, code = done.stdout.split(f"  {link}\n")
    assert (done.code, "desktop" in head) == (0, False)
    assert code == f"{qr_code(link)}\n"
    assert max(map(len, code.splitlines())) <= 80
    everything = edgetailor("tokens", "state", "--url", PROXY, "--qr", cwd=fleet_folder).stdout
    assert code in everything
    assert f"{qr_code(join_link(PROXY, full_token(config, 'desktop')))}\n" in everything


@pytest.mark.parametrize("colours", [False, True])
def test_a_code_draws_its_modules(colours: bool) -> None:
    link = join_link("http://192.168.100.200:8123", "x" * 43)
    lines = qr_code(link, colours).splitlines()
    if colours:
        assert all(line.startswith("\x1b[97;40m") and line.endswith("\x1b[0m") for line in lines)
        lines = [line[8:-4] for line in lines]
    light = {"█": (0, 0), "▀": (0, 1), "▄": (1, 0), " ": (1, 1)}
    rows = [[light[c][half] for c in line] for line in lines for half in (0, 1)]
    expected = [list(row) for row in segno.make_qr(link, error="l").matrix_iter(border=4)]
    assert rows[: len(expected)] == expected


def test_refusals(fleet_folder: Path, tmp_path: Path) -> None:
    assert "did you mean 'desktop'? The kinds are desktop, board." in refused(
        fleet_folder, "tokens", "state", "--qr", "desktops"
    )
    both = edgetailor("tokens", "state", "--json", "--qr", cwd=fleet_folder)
    assert (both.code, json.loads(both.stdout)["error"]["code"]) == (2, "option.usage")
    assert "Invalid URL" in refused(fleet_folder, "tokens", "state", "--url", "fleet.example.org")
    assert "has no address file" in refused(tmp_path, "tokens", ".")
    assert "cannot be read" in refused(tmp_path, "tokens", "fleet.toml")
    (tmp_path / "empty").mkdir()
    assert "has no state.sqlite3" in refused(tmp_path, "tokens", "empty", "--url", PROXY)


def test_a_token_that_was_changed_or_removed(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config):
        pass
    path = config.state / "tokens" / "board.token"
    path.write_text("another\n")
    assert "Restart `edgetailor serve`" in refused(tmp_path, "tokens", "fleet.toml")
    path.unlink()
    assert "board.token is missing" in refused(tmp_path, "tokens", "fleet.toml")


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://192.168.1.10:8123", False),
        ("http://server.local", False),
        ("http://localhost.example.org", False),
        ("https://192.168.1.10", True),
        ("http://127.0.0.1:8123", True),
        ("http://127.8.0.1", True),
        ("http://[::1]:8123", True),
        ("http://localhost:8123", True),
        ("http://phone.localhost", True),
    ],
)
def test_where_browsers_give_pages_keys(url: str, accepted: bool) -> None:
    assert phones_accept(url) == accepted


def test_plain_http_is_named(fleet_folder: Path) -> None:
    done = edgetailor("tokens", "state", "--url", "http://192.168.1.10:8123", cwd=fleet_folder)
    assert done.stderr.splitlines() == [NEEDS_HTTPS, *NOTES]
    assert max(map(len, [NEEDS_HTTPS, NO_PAGE])) <= 78


def test_a_token_stays_in_the_fragment_whatever_it_has() -> None:
    assert join_link("http://a", "x/?&#%y") == "http://a/join/#x%2F%3F%26%23%25y"
