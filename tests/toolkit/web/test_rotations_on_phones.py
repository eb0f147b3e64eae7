"""A page follows a new key of its coordinator, and makes a new secret when the operator asks."""

from pathlib import Path
from typing import Any

import pytest

from operators import operator
from phones import Phone, fleet, samples, token
from vector_fleet import assert_soon

pytestmark = pytest.mark.web
ROUNDS = 4


def test_a_page_trains_across_a_new_key_and_a_new_secret(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    data = samples(tmp_path, seed, 0, 40)
    with serve(*fleet(tmp_path / "c", rounds=ROUNDS, epochs=1)) as server:
        coordinator, acting = server.coordinator, operator(server)
        phone = Phone.opened(browser, server, "phone").joined("a phone", data)
        first = phone.stored("device")
        acting.rotate_key(coordinator.key.fingerprint, 30, "before the first round")
        acting.rotate_secret(first["device"], 7, "before the first round")
        phone.start()
        assert_soon(lambda: coordinator.rounds.done > 0, 120)
        acting.rotate_key(coordinator.key.fingerprint, 30, "while the page runs")
        acting.rotate_secret(first["device"], 7, "while the page runs")
        phone.wait_for("finished")
        assert coordinator.rounds.done == ROUNDS
        assert phone.view()["problem"] is None
        assert_soon(lambda: coordinator.secrets_due == {}, 30)
        known = phone.stored("device")
    assert known["key"] == coordinator.key.public != first["key"]
    assert known["secret"] != first["secret"]


def test_a_page_that_gets_no_answer_uses_the_secret_that_the_coordinator_has_taken(
    browser, serve, tmp_path: Path, seed: int
) -> None:
    """The tab is closed when the request for a new secret is answered."""
    data = samples(tmp_path, seed, 0, 40)
    with serve(*fleet(tmp_path / "c", rounds=2, epochs=1)) as server:
        phone = Phone.opened(browser, server, "phone").joined("a phone", data)
        first = phone.stored("device")
        operator(server).rotate_secret(first["device"], 7, "x")
        cut: list[int] = []

        def lose(route: Any) -> None:
            if not cut:
                cut.append(route.fetch().status)
            route.abort()

        phone.page.context.route("**/v1/secret", lose)
        phone.start()
        for _ in range(1200):
            phone.page.wait_for_timeout(50)  # lets the handler of the route run
            if cut:
                break
        assert cut == [204]
        phone.page.context.unroute_all(behavior="wait")
        phone.reloaded()  # a page that was training goes on
        phone.wait_for("finished")
        known = phone.stored("device")
        assert known["secret"] != first["secret"]
        assert not known.get("nextSecret")


def test_a_link_from_before_the_new_key_joins(browser, serve, tmp_path: Path, seed: int) -> None:
    with serve(*fleet(tmp_path / "c", rounds=1, epochs=1)) as server:
        coordinator = server.coordinator
        before = token(server, "phone")
        operator(server).rotate_key(coordinator.key.fingerprint, 30, "x")
        assert before != token(server, "phone")
        phone = Phone.opened(browser, server, "phone", link=before)
        phone.join("a phone")
        phone.wait_for("joined")
        assert phone.stored("device")["key"] == coordinator.key.public
