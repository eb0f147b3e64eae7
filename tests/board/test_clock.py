"""A board whose clock is wrong joins and trains once the clock is right, and says what is wrong."""

import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from board_federation import FEDERATION, FIXED, KIND, Installed, Served, serving
from emulated_board import HOST, Board, new_state_disk
from toolkit.coordinator.http.certificates import new_certificate

DAY_S = 86400
WRONG = {"1970": None, "a week behind": -7 * DAY_S, "a month ahead": 30 * DAY_S}
AGENT = "SSL_CERT_FILE=authority.pem edgetailor/bin/edgetailor-agent"
TLS = 'tls_cert = "tls/cert.pem"\ntls_key = "tls/key.pem"\n'


@pytest.fixture(params=["http", "https"])
def coordinator(request: pytest.FixtureRequest, installed: Installed) -> Iterator[Served]:
    """A federation of one board, so that its first round waits for nobody else.

    With https, its certificate is signed by an authority that the board trusts: itself.
    """
    folder = installed.folder / "clock-fleet"
    shutil.rmtree(folder, ignore_errors=True)
    new_certificate(folder / "tls", [HOST])
    config = FEDERATION + KIND.format("pi", FIXED, 1)
    with serving(folder, TLS + config if request.param == "https" else config) as served:
        served.scheme = request.param
        yield served


@pytest.mark.parametrize("clock", WRONG)
def test_a_wrong_clock_delays_a_board_and_no_more(
    clock: str, coordinator: Served, installed: Installed, seen: Callable[[str, str], None]
) -> None:
    board = installed.board("clock", new_state_disk(installed.folder / "clock.raw"))
    try:
        board.root("systemctl stop systemd-timesyncd")
        board.put(coordinator.token("pi"), "clock.token")
        board.put(coordinator.folder / "tls" / "cert.pem", "authority.pem")
        set_wrong(board, clock)
        join = board.follow(f"{AGENT} join {coordinator.url} --token-file clock.token")
        what = join.until("Joined|clock")
        if "Joined" not in what:
            set_right(board)
            join.until("Joined")
        set_wrong(board, clock)
        agent = board.follow(f"{AGENT} run --data local.npz --threads 1")
        why = agent.until("clock|training")
        if "clock" in why:
            set_right(board)
        agent.until("Round .*: training")
        assert "Traceback" not in join.text + agent.text
        joined = "at once" if "Joined" in what else "when it was set"
        trained = "when it was set" if "clock" in why else "at once"
        seen(f"clock: {clock}, {coordinator.scheme}", f"joined {joined}, trained {trained}")
    finally:
        board.cut()


def set_wrong(board: Board, clock: str) -> None:
    shift = WRONG[clock]
    board.root(f"date -s @{3600 if shift is None else time.time() + shift:.0f}")


def set_right(board: Board) -> None:
    board.root(f"date -s @{time.time():.0f}")
