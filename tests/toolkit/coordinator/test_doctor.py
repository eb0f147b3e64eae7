"""The doctor against real sockets: coordinators, certificates of every kind, and other servers."""

import datetime
import json
import re
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from commands import run
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.doctor.coordinator_checks import check_connection
from device_agent.doctor.doctor import run_checks
from device_agent.federation.identity.state_folder import StateFolder
from device_agent.federation.membership import leave
from device_agent.formats.protocol.joining import JoinRequest
from device_agent.system.clock import Clock
from other_servers import DAY, NOW, certificate, page
from profiles.errors import ClientError
from vector_fleet import Fleet, token


def found(*arguments: object) -> dict[str, tuple[str, str]]:
    return {f.check: (f.result, f.detail) for f in check_connection(*arguments)}  # type: ignore[arg-type]


def test_a_member(fleet: Fleet, tmp_path: Path) -> None:
    server, _ = fleet
    shutil.move(server.config.state.parent / "0", tmp_path / "state")
    done = run("edgetailor-agent", "doctor", "--state", "state", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    results = re.findall("^(PASS|SKIP|FAIL)  ([^ ]+) ", done.stdout, re.M)
    assert results[:-2] == [
        ("PASS", "name"), ("PASS", "TCP"), ("SKIP", "TLS"), ("PASS", "coordinator"),
        ("PASS", "clock"), ("PASS", "membership"), ("PASS", "state"), ("PASS", "disk"),
        ("PASS", "libraries"), ("PASS", "onnxruntime"), ("PASS", "litert"),
        ("PASS", "memory"),
    ]  # fmt: skip
    assert [check for _, check in results[-2:]] == ["temperature", "power"]
    assert "PASS  membership   known there as desktop-1\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_and_the_exit_code(tmp_path: Path) -> None:
    done = run(
        "edgetailor-agent", "doctor", "http://127.0.0.1:1", "--state", "s", "--json", cwd=tmp_path
    )
    document = json.loads(done.stdout)
    assert (done.code, done.stderr, document["version"]) == (2, "", 1)
    assert document["checks"][1] == {
        "check": "TCP",
        "result": "FAIL",
        "detail": "127.0.0.1 port 1: connection refused",
        "remedy": "check that `edgetailor serve` runs there, that its `host` can be reached from "
        "other machines, and that no firewall blocks the port",
    }
    details = {finding.check: finding.detail for finding in run_checks("ftp://x", tmp_path)}
    assert details["coordinator"] == (
        "Invalid URL of a coordinator 'ftp://x': write it like http://192.168.1.10:8123, as "
        "`edgetailor serve` prints it."
    )


def test_tokens(fleet: Fleet) -> None:
    server, _ = fleet
    used = token(server.config, "board")
    assert found(server.url, None, used)["token"] == (
        "FAIL",
        "This join token is used up: it is for 1 device of kind 'board'. Use the token of another "
        "kind, or ask the operator for a higher `count`.",
    )
    assert found(server.url, None, "guess")["token"] == (
        "FAIL",
        "This join token is unknown here: give the content of one of the .token files that "
        "`edgetailor serve` names when it starts.",
    )
    assert found(server.url, None, (server.config.state / "operator.token").read_text().strip())[
        "token"
    ][:2] == (
        "FAIL",
        "This is not a join token, but the operator's token or the secret of a device.",
    )
    assert found(server.url, None, "two words")["token"] == (
        "FAIL",
        "A token is one word of ASCII characters. Give the file that `edgetailor serve` wrote, "
        "unaltered.",
    )
    leave(server.config.state.parent / "2")
    assert found(server.url, None, used)["token"] == (
        "PASS", "This is a join token for 1 device of kind 'board'.",
    )  # fmt: skip


def test_a_device_that_has_not_joined(fleet: Fleet) -> None:
    server, _ = fleet
    assert found(server.url, None, None)["membership"] == ("SKIP", "not joined there")


def test_another_key_of_the_coordinator(fleet: Fleet) -> None:
    server, _ = fleet
    known = StateFolder(server.config.state.parent / "1").member()
    assert found(server.url, known, None)["membership"][0] == "PASS"
    moved = msgspec.structs.replace(known, key="A" * 44)
    result, detail = found(server.url, moved, None)["membership"]
    assert result == "FAIL"
    assert detail.startswith("the coordinator's key differs from the key at the join")


def test_another_program(tmp_path: Path) -> None:
    with page() as port:
        assert found(f"http://127.0.0.1:{port}", None, None)["coordinator"] == (
            "FAIL",
            f"http://127.0.0.1:{port} answers (HTTP 401), but not like a coordinator",
        )


def test_a_clock_that_is_off() -> None:
    problem = b'{"code": "client.not-authorised", "message": "Say who you are."}'
    with page(body=problem) as port:
        checks = found(f"http://127.0.0.1:{port}", None, None)
    assert checks["membership"] == ("SKIP", "not joined there")
    result, detail = checks["clock"]
    assert result == "FAIL"
    ahead = re.fullmatch(r"(\d+) s ahead of the coordinator's", detail)
    assert ahead
    assert abs(int(ahead[1]) - (NOW.timestamp() - 946684800)) < 3600


def test_a_name_that_cannot_be_resolved() -> None:
    (only,) = check_connection("http://nobody.invalid", None, None)
    assert (only.check, only.result) == ("name", "FAIL")
    assert "nobody.invalid cannot be resolved" in only.detail


@pytest.mark.parametrize(
    ("name", "begins", "ends", "trusted", "says", "remedy"),
    [
        ("127.0.0.1", -DAY, DAY, True, r"TLSv1\.\d, certificate valid until ", ""),
        ("127.0.0.1", -DAY, DAY, False, "self-signed certificate", "SSL_CERT_FILE"),
        (
            "127.0.0.2",
            -DAY,
            DAY,
            True,
            r"IP address mismatch",
            "in the URL, use a host name that the certificate is for",
        ),
        (
            "127.0.0.1",
            -2 * DAY,
            -DAY,
            True,
            "expired according to this device's clock",
            "set the clock",
        ),
        ("127.0.0.1", DAY, 2 * DAY, True, "not yet valid according to this de", "set the clock"),
    ],
)
def test_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, begins: datetime.timedelta,
    ends: datetime.timedelta, trusted: bool, says: str, remedy: str,
) -> None:  # fmt: skip
    path = certificate(tmp_path, name, begins, ends)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with page(path) as port:
        url = f"https://127.0.0.1:{port}"
        tls = next(f for f in check_connection(url, None, None) if f.check == "TLS")
        with pytest.raises(ClientError) as refused:
            CoordinatorClient(url, "s", patience_s=0).work()
    assert re.search(says, tls.detail)
    assert (tls.result == "PASS") == (not remedy)
    assert remedy in (tls.remedy or "")
    if remedy:  # an agent says the same
        assert re.search(f"the secure connection failed: .*{says}.*{remedy}", str(refused.value))


def test_plain_http_where_tls_was_asked_for() -> None:
    with page() as port:
        tls = next(
            f for f in check_connection(f"https://127.0.0.1:{port}", None, None) if f.check == "TLS"
        )
    assert tls.detail == "the answer is not TLS"
    assert tls.remedy == "write http:// if the server does not use TLS"


@pytest.mark.parametrize(("begins", "ends"), [(DAY, 2 * DAY), (-2 * DAY, -DAY)])
def test_an_agent_waits_until_its_clock_agrees_with_the_certificate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
    begins: datetime.timedelta,
    ends: datetime.timedelta,
) -> None:
    for name, times in {"now": (-DAY, DAY), "other": (begins, ends)}.items():
        (tmp_path / name).mkdir()
        certificate(tmp_path / name, "127.0.0.1", *times)
    now, other = (tmp_path / name / "certificate.pem" for name in ("now", "other"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
    context, slept = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 8:  # as if the clock were set: OpenSSL reads the real one
            context.load_cert_chain(now)
            shutil.copy(now, tmp_path / "trusted.pem")

    wait = json.dumps({"state": "wait", "round": 1}).encode()
    reply = json.dumps({"device": "d", "secret": "s", "submodel": "full"}).encode()
    request = JoinRequest(name="n", public_key="", machine={}, timestamp=0, signature="")
    unset = Clock(lambda: 60, lambda: False)
    calls: list[tuple[bytes, Callable[[CoordinatorClient], object], float]] = [
        (wait, lambda client: client.work(), float("inf")),
        (reply, lambda client: client.join(lambda: request), 1),
    ]
    for body, call, patience in calls:
        said.clear()
        slept.clear()
        shutil.copy(other, tmp_path / "trusted.pem")
        with page(other, context, body=body, status=200) as port:
            url = f"https://127.0.0.1:{port}"
            client = CoordinatorClient(url, "s", sleep=sleep, patience_s=patience, clock=unset)
            call(client)
        assert len(slept) == 8
        assert [line.partition(" according")[0] for line in said] == [
            f"Coordinator at {url} cannot be reached (the secure connection failed: certificate "
            + ("is not yet valid" if begins > datetime.timedelta() else "has expired"),
            f"Coordinator at {url} answers again after 3 min 3 s.",
        ]
