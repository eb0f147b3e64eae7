"""Join tokens that operators make: a number of devices, a lifetime, an end."""

from pathlib import Path

import pytest

from device_agent.federation import membership
from operators import coordinator_of, operator
from refusals import refused
from toolkit.coordinator.database.device_registry import DAY_S
from toolkit.coordinator.database.joins import Token
from toolkit.coordinator.server import Server
from vector_fleet import configured, running


def join(server: Server, token: str, folder: Path) -> str:
    return membership.join(server.url, token, "m", folder).device


def test_so_many_devices_join_as_the_token_is_for(server: Server, tmp_path: Path) -> None:
    actor = operator(server)
    made = actor.make_join_token("desktop", "for the office", count=1, days=2)
    assert (made.state.number, made.state.kind, made.state.count) == (1, "desktop", 1)
    assert join(server, made.token, tmp_path / "a") == "desktop-1"
    with refused("join.used-up-token", answer=USED_UP):
        join(server, made.token, tmp_path / "b")
    # A member joins again with its key.
    assert (
        membership.join(server.url, made.token, "m", tmp_path / "a", replace=True).device
        == "desktop-1"
    )
    assert [(t.number, t.kind, t.count, t.joined) for t in actor.join_tokens().tokens] == [
        (None, "desktop", 2, 1),
        (None, "board", 1, 0),
        (1, "desktop", 1, 1),
    ]


USED_UP = "This join token is used up: it was for 1 device. Ask the operator for another one."


def test_the_places_of_the_kind_limit_every_token(server: Server, tmp_path: Path) -> None:
    token = operator(server).make_join_token("board", "x").token
    assert join(server, token, tmp_path / "a") == "board-1"
    with refused("join.used-up-token"):
        join(server, token, tmp_path / "b")


def test_nobody_joins_with_a_revoked_token_and_members_stay(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        actor = operator(server)
        made = actor.make_join_token("desktop", "x")
        link = membership.join(server.url, made.token, "m", tmp_path / "a")
        assert actor.revoke_join_token(1, "it was copied").revoked is not None
        actor.revoke_join_token(1, "again")
        with refused("join.revoked-token"):
            join(server, made.token, tmp_path / "b")
        assert link.device == "desktop-1"
        assert actor.devices(state="enrolled").total == 1
        with refused("operator.unknown-join-token"):
            actor.revoke_join_token(2, "x")
        with refused("operator.unknown-kind"):
            actor.make_join_token("desk", "x")
        for count, days in ((0, None), (-1, None), (None, 0.0), (None, 1e9)):
            with refused("client.bad-request"):
                actor.make_join_token("desktop", "x", count, days)
        assert [entry.action for entry in actor.audit().entries] == ["make for desktop", "revoke"]
    kept = b"".join(file.read_bytes() for file in config.state.rglob("*") if file.is_file())
    assert made.token.partition(".")[0].encode() not in kept
    with running(config) as server, refused("join.revoked-token"):
        join(server, made.token, tmp_path / "b")


def test_an_expired_token_enrols_nobody(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    made = coordinator.make_join_token("desktop", None, 2.0, "x", "operator")
    secret = made.token.partition(".")[0]
    assert store.registry.free_places(secret) == ("desktop", 2)
    store.registry._now = lambda: made.state.expires + 1
    with refused("join.expired-token") as caught:
        store.registry.free_places(secret)
    assert str(caught.value).endswith("`edgetailor make-token desktop` makes it.")
    fresh = coordinator.make_join_token("desktop", None, None, "x", "operator").state.expires
    assert fresh - made.state.expires == pytest.approx(28 * DAY_S, abs=60)  # token_days is 30
    store.close()


@pytest.mark.parametrize(
    ("count", "most", "joined", "taken", "free"),
    [
        (5, None, 0, 2, 3),
        (5, 2, 1, 2, 1),
        (5, 9, 1, 4, 1),
        (None, 9, 1, 4, 8),
        (None, None, 0, 4, None),
    ],
)
def test_free_places(
    count: int | None, most: int | None, joined: int, taken: int, free: int | None
) -> None:
    assert Token("board", count, 0.0, 1, most, joined).free(taken) == free
