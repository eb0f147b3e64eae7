"""The doctor against real sockets: coordinators, certificates of every kind, and others."""

import datetime
import http.server
import ipaddress
import json
import os
import re
import shutil
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import onnx.checker
import onnx.reference
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from commands import ROOT, run
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.doctor import library_checks, machine_checks
from device_agent.doctor.coordinator_checks import check_connection
from device_agent.doctor.doctor import lines, run_checks
from device_agent.doctor.finding import Finding
from device_agent.federation.membership import leave
from device_agent.federation.state_folder import StateFolder
from device_agent.formats.protocol import JoinRequest
from device_agent.system.clock import Clock
from profiles.errors import ClientError
from vector_fleet import Fleet, token

DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)


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
    assert one("coordinator", tmp_path, "ftp://x").detail == (
        "Invalid URL of a coordinator 'ftp://x': write it like http://192.168.1.10:8123, as "
        "`edgetailor serve` prints it."
    )


def test_tokens(fleet: Fleet) -> None:
    server, _ = fleet
    used = token(server.config, "board")
    assert found(server.url, None, used)["token"] == (
        "FAIL",
        "This join token is used up: it is for 1 device of kind 'board'. Use the token of another "
        "kind, or start a federation with more devices.",
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


class Page(http.server.BaseHTTPRequestHandler):
    date = "Sat, 01 Jan 2000 00:00:00 GMT"
    body = b"<html>"
    status = 401

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response_only(self.status)
        self.send_header("Date", self.date)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def page(
    certificate: Path | None = None, context: ssl.SSLContext | None = None, **fields: object
) -> Iterator[int]:
    """The port of a server that has `fields` for its pages, with TLS where it has a certificate."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("P", (Page,), fields))
    if certificate is not None:
        context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


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


def certificate(
    folder: Path, name: str, begins: datetime.timedelta, ends: datetime.timedelta
) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + begins)
        .not_valid_after(NOW + ends)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name))]), False
        )
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + signed.public_bytes(pem))
    return path


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
            "a host name in the URL that the certificate is for",
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


def test_the_tiny_graph_is_valid() -> None:
    model = onnx.load_from_string(library_checks.TINY_GRAPH)
    onnx.checker.check_model(model, full_check=True)
    evaluator = onnx.reference.ReferenceEvaluator(model)
    assert evaluator.run(None, {"x": np.array([21], np.float32)})[0] == [42]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def one(check: str, state: Path, url: str | None = None) -> Finding:
    return next(finding for finding in run_checks(url, state) if finding.check == check)


def test_a_key_that_others_can_read(state: Path) -> None:
    (state / "device.key").write_bytes(b"k")
    (state / "device.key").chmod(0o644)
    assert one("state", state).remedy == f"chmod 600 {state}/device.key"


def test_a_damaged_state(state: Path) -> None:
    (state / "device.json").write_bytes(b"{")
    assert one("state", state).result == "FAIL"


def test_a_state_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for state in (tmp_path / "file", tmp_path / "file" / "below"):
        findings = [finding for finding in run_checks(None, state) if finding.check == "state"]
        assert [(f.result, f.detail) for f in findings] == [("FAIL", f"{tmp_path}/file is a file")]


def test_a_full_disk_a_small_machine_and_a_broken_runtime(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "LEAST_DISK", 1 << 60)
    monkeypatch.setattr(machine_checks, "LEAST_MEMORY", 1 << 60)
    monkeypatch.setattr(library_checks, "RUN_TINY", "import os; os.abort()")
    assert one("disk", state).result == "FAIL"
    assert one("memory", state).result == "FAIL"
    broken = one("onnxruntime", state)
    assert broken.detail == "running a graph ended with exit code -6: no output"
    assert lines(broken) == [
        "FAIL  onnxruntime  running a graph ended with exit code -6: no output",
        "                   -> reinstall it: pip install --force-reinstall onnxruntime",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_state_folder_of_another_user(state: Path) -> None:
    state.chmod(0o555)
    assert one("state", state).result == "FAIL"


LIBSTDCXX = "libstdc++.so.6: cannot open shared object file: No such file or directory"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def hide(folder: Path, library: str, content: str = f"raise ImportError({LIBSTDCXX!r})") -> str:
    """Put a broken `library` into `folder`. Returns a PYTHONPATH that finds it first."""
    (folder / library).mkdir()
    (folder / library / "__init__.py").write_text(content)
    return f"{folder}:{ROOT}"


def forget_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the libraries be loaded again, which a process that has them does not do."""
    for module in library_checks.LIBRARIES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize("library", list(library_checks.LIBRARIES))
def test_a_library_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(library_checks, "RUN_TINY", "print('1 2.0')")
    forget_libraries(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", hide(tmp_path, library))
    checks = {finding.check: finding for finding in library_checks.check_libraries()}
    assert (checks[library].result, checks["libraries"].result) == ("FAIL", "PASS")
    assert checks[library].remedy == (
        "install the system library libstdc++.so.6; on Debian: sudo apt install libstdc++6"
    )
    assert "libstdc++.so.6: cannot open" in checks[library].detail
    assert library not in checks["libraries"].detail


def test_a_version_that_was_not_verified_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, said in (("1.31.1", "1.31.1 runs graphs"), ("1.25.0", "verified with 1.19.2, ")):
        monkeypatch.setattr(library_checks, "RUN_TINY", f"print('{version} 2.0')")
        checks = {finding.check: finding for finding in library_checks.check_libraries()}
        assert checks["onnxruntime"].result == "PASS"
        assert said in checks["onnxruntime"].detail


def test_a_library_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_libraries(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", hide(tmp_path, "safetensors", CRASH))
    checks = {finding.check: finding for finding in library_checks.check_libraries()}
    assert checks["safetensors"].detail == "loading it ended with exit code -4: no output"
    assert checks["onnxruntime"].result == "PASS"


@pytest.mark.parametrize("library", ["numpy", "cryptography", "msgspec", "urllib3"])
def test_the_doctor_works_where_a_library_does_not_load(tmp_path: Path, library: str) -> None:
    hide(tmp_path, "ai_edge_litert")  # it takes long to load
    (tmp_path / "token").write_text("guess")
    with page(body=b'{"code": "client.not-authorised", "message": "Who?"}') as port:
        done = run(
            "edgetailor-agent", "doctor", f"http://127.0.0.1:{port}", "--state", "s",
            "--token-file", "token", cwd=tmp_path, PYTHONPATH=hide(tmp_path, library),
        )  # fmt: skip
    assert (done.code, done.stderr) == (2, "")
    results = re.findall("^(PASS|SKIP|FAIL)  ([^ ]+) ", done.stdout, re.M)
    assert ("FAIL", library) in results
    checks = {check for _, check in results}
    assert {"coordinator", "state", "disk", "libraries", "memory", "temperature", "power"} <= checks
    if library not in ("msgspec", "urllib3"):  # these two speak with the coordinator
        assert {"clock", "token"} <= checks


def test_a_check_that_raises_is_a_line_and_the_others_go_on(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("nobody foresaw\nthis")

    for name in ("_writable", "_disk", "check_libraries", "check_litert", "_memory"):
        monkeypatch.setattr(machine_checks, name, fails)
    monkeypatch.setattr("device_agent.system.sensors.temperature_c", fails)
    monkeypatch.setattr("device_agent.system.sensors.charging", fails)
    monkeypatch.setattr("device_agent.federation.state_folder.StateFolder.identity", fails)
    findings = list(run_checks(None, state))
    assert [finding.check for finding in findings] == [
        "coordinator", "state", "disk", "libraries", "litert", "memory", "temperature", "power",
    ]  # fmt: skip
    assert {(finding.result, finding.detail) for finding in findings} == {
        ("FAIL", "cannot be checked: RuntimeError: nobody foresaw this")
    }


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
