"""Who may operate a federation: named tokens with roles, and what each route asks for."""

import re
import sqlite3
from pathlib import Path

import pytest
import urllib3
from starlette.routing import Route

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.identity.device_keys import DeviceKey
from killed_actions import Step, audit, kill_at_every_write
from operators import coordinator_of, operator
from parameters import some_long
from refusals import refused
from toolkit.coordinator.http.http_api import create_app
from toolkit.coordinator.operation.operator_client import OperatorClient
from toolkit.coordinator.server import Server
from vector_fleet import Fleet, configured, running, token

UNKNOWN = (
    "There is no operator 'ana': did you mean 'anna'? `edgetailor operators` lists all operators."
)


def test_the_log_names_who_acted(server: Server) -> None:
    owner = operator(server)
    made = owner.add_operator("anna", "operator", "a new colleague")
    anna = OperatorClient(server.url, made.token)
    watcher = OperatorClient(server.url, anna.add_operator("grafana", "read-only", "plots").token)
    shown = watcher.operators().operators
    assert [(one.name, one.role, one.revoked) for one in shown] == [
        ("anna", "operator", None),
        ("grafana", "read-only", None),
    ]
    with refused("operator.read-only"):
        watcher.add_operator("eve", "operator", "x")
    assert watcher.status().round == 0
    assert anna.revoke_operator("grafana", "no longer used").revoked is not None
    anna.revoke_operator("grafana", "again")
    with refused("client.not-authorised"):
        watcher.devices()
    assert [(e.who, e.action, e.target, e.reason) for e in anna.audit().entries] == [
        ("operator", "add operator", "operator anna", "a new colleague"),
        ("anna", "add read-only", "operator grafana", "plots"),
        ("anna", "revoke", "operator grafana", "no longer used"),
    ]
    for name in ("anna", "grafana", "operator"):
        with refused("operator.used-name"):
            owner.add_operator(name, "operator", "x")
    with refused("operator.own-token"):
        anna.revoke_operator("operator", "x")
    with refused("operator.unknown-operator", answer=UNKNOWN):
        owner.revoke_operator("ana", "x")
    for wrong in ("", "a b", "x" * 41, "a\nb", "bob\n", "../x"):
        with refused("client.bad-request"):
            owner.add_operator(wrong, "operator", "x")
    assert len(owner.audit().entries) == 3


def test_no_device_joins_with_an_operators_token(server: Server) -> None:
    made = operator(server).add_operator("anna", "read-only", "x")
    headers = {"Authorization": f"Bearer {made.token}"}
    answer = urllib3.request("GET", f"{server.url}/v1/invitation", headers=headers)
    assert (answer.status, answer.json()["code"]) == (403, "join.operator-token")


def test_only_hashes_are_kept_and_a_restart_knows_them(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        valid = operator(server).add_operator("anna", "operator", "x").token
        gone = operator(server).add_operator("bob", "operator", "x").token
        operator(server).revoke_operator("bob", "left")
    kept = b"".join(file.read_bytes() for file in config.state.rglob("*") if file.is_file())
    assert valid.encode() not in kept
    with running(config) as server:
        assert OperatorClient(server.url, valid).devices().total == 0
        with refused("client.not-authorised"):
            OperatorClient(server.url, gone).devices()


def test_every_route_of_operators_is_closed_to_others(new_fleet: Fleet) -> None:
    server, links = new_fleet
    owner = operator(server)
    removed, left = links["desktop-2"], owner.add_operator("bob", "operator", "x")
    owner.act("remove", "desktop-2", "x")
    owner.revoke_operator("bob", "x")
    read_only = owner.add_operator("grafana", "read-only", "x").token
    entries = owner.audit().entries
    given = {
        None: 401,
        "guess": 401,
        token(server.config, "board"): 401,
        secret_of(links["desktop-1"]): 403,
        secret_of(removed): 401,
        left.token: 401,
    }
    document = urllib3.request("GET", f"{server.url}/openapi.json").json()
    routes = [
        (method.upper(), path.format(device="board-1", action="ban", round=1, name="bob", number=1))
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/v1/operator/") or path == "/metrics"
    ]
    assert len(routes) == 23
    for method, path in routes:
        for secret, status in given.items():
            assert ask(server, method, path, secret) == status, (method, path, secret)
        expected = 200 if method == "GET" else 403
        assert ask(server, method, path, read_only) == expected, (method, path)
    assert owner.audit().entries == entries
    for method, path in routes:
        assert ask(server, method, path, server.coordinator.operator_token) not in (401, 403)


def test_void_credentials_open_no_more_than_none(new_fleet: Fleet, tmp_path: Path) -> None:
    """Of all routes of the app: a removed device's secret, a replaced one, a revoked token."""
    server, links = new_fleet
    owner, coordinator = operator(server), server.coordinator
    replaced = secret_of(links["board-1"])
    key = tmp_path / "fleet" / "2" / "device.key"
    owner.rotate_secret("board-1", 7, "x")
    challenge = links["board-1"].work().new_secret
    links["board-1"].renew_secret(
        DeviceKey.from_pem(key.read_bytes(), key).new_secret(challenge, "the next one")
    )
    revoked = owner.add_operator("bob", "operator", "x").token
    owner.revoke_operator("bob", "x")
    owner.act("remove", "desktop-2", "x")
    void = (secret_of(links["desktop-2"]), replaced, revoked)
    values = {"device": "desktop-1", "action": "ban", "round": 1, "name": "bob", "number": 1}
    values |= {"sha256": "0" * 64}
    app = create_app(coordinator)
    paths = {p: {m.upper() for m in methods} for p, methods in app.openapi()["paths"].items()}
    for route in app.routes:  # the pages, which the description leaves out
        if isinstance(route, Route):
            paths[route.path] = paths.get(route.path, set()) | (route.methods or set())
    routes = {
        (method, re.sub(r":\w+", "", path).format(**values))
        for path, methods in paths.items()
        for method in methods
    }
    assert len(routes) > 80
    entries, opened = owner.audit().entries, set()
    for method, path in sorted(routes):
        stranger = ask(server, method, path, None)
        if stranger in (401, 403):
            for secret in void:
                assert ask(server, method, path, secret) in (401, 403), (method, path)
        else:
            opened.add(path)
            assert {ask(server, method, path, secret) for secret in void} == {stranger}
    assert opened == OPEN
    assert owner.audit().entries == entries
    assert coordinator.store.registry.device("desktop-1").has_left is False


OPEN = {
    *("/healthz", "/readyz", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
    *("/operator/login", "/operator/files/bob", "/join", "/join/bob"),
}
"""What a stranger may see."""


def ask(server: Server, method: str, path: str, secret: str | None) -> int:
    """The status of the answer to a request with this secret."""
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    json = {"reason": "x"} if method == "POST" else None
    return urllib3.request(method, server.url + path, headers=headers, json=json).status


def secret_of(link: CoordinatorClient) -> str:
    return str(link._pool.headers["Authorization"]).removeprefix("Bearer ")


STEPS: list[Step] = [
    lambda coordinator: coordinator.add_operator("anna", "operator", "x", "operator"),
    lambda coordinator: coordinator.add_operator("bob", "read-only", "x", "anna"),
    lambda coordinator: coordinator.revoke_operator("anna", "x", "bob"),
    lambda coordinator: coordinator.make_join_token("board", 2, None, "x", "bob"),
    lambda coordinator: coordinator.revoke_join_token(1, "x", "bob"),
]
LOG = [("add operator", "operator anna"), ("add read-only", "operator bob")]
LOG += [("revoke", "operator anna")]
LOG += [("make for board", "join token 1"), ("revoke", "join token 1")]


def prepare(folder: Path) -> None:
    coordinator_of(folder)[1].close()


def check(folder: Path, done: int) -> None:
    log = audit(folder)
    assert log == LOG[: len(log)]
    assert len(log) >= done
    connection = sqlite3.connect(folder / "state" / "state.sqlite3")
    rows = connection.execute("SELECT name, role, revoked IS NOT NULL FROM operators").fetchall()
    made = connection.execute(
        "SELECT number, kind, revoked IS NOT NULL FROM join_tokens"
    ).fetchall()
    connection.close()
    assert made == [(1, "board", len(log) > 4)][: max(0, len(log) - 3)]
    assert rows == [("anna", "operator", len(log) > 2), ("bob", "read-only", False)][: len(log)]


@pytest.mark.parametrize(
    ("before", "step"), some_long([(True, 3), (True, 1), (False, 1)], (True, 1), (False, 1))
)
def test_killed_at_every_write_tokens_agree_with_the_log(
    tmp_path: Path, before: bool, step: int, seed: int
) -> None:
    writes = kill_at_every_write(tmp_path, STEPS, prepare, check, before, seed % step + 1, step)
    assert writes > 2 * len(STEPS)
