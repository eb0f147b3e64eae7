"""TLS of the coordinator itself: real certificates, real handshakes, real agents."""

import hashlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from commands import edgetailor, run
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.doctor.coordinator_checks import check_connection
from device_agent.federation.device_state import DeviceState
from device_agent.federation.fleet_status import fleet_status
from device_agent.federation.membership import join, leave
from profiles.errors import ClientError
from refusals import refused
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.http.certificates import Certificate, new_certificate
from toolkit.coordinator.http.server_socket import answer_preparing, bind
from toolkit.coordinator.startup_message import startup_message
from vector_fleet import CONFIG, configured, full_token, messages_to, running

FILES = 'tls_cert = "tls/cert.pem"\ntls_key = "tls/key.pem"\n'
NAMES = ["localhost", "127.0.0.1"]


@pytest.fixture
def config(tmp_path: Path) -> CoordinatorConfig:
    new_certificate(tmp_path / "c" / "tls", NAMES)
    return configured(tmp_path / "c", FILES + CONFIG)


def presented(port: int) -> str:
    """The SHA-256 of the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain) as wrapped,
    ):
        return hashlib.sha256(wrapped.getpeercert(True) or b"").hexdigest()


def pin(config: CoordinatorConfig) -> str:
    assert config.tls_cert is not None
    pem = config.tls_cert.read_text()
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


def test_an_agent_that_knows_the_certificate(config: CoordinatorConfig, tmp_path: Path) -> None:
    state = tmp_path / "a"
    with running(config) as server:
        assert server.url.startswith("https://127.0.0.1:")
        token = full_token(config, "board")
        join(server.url, token, "desk", state, certificate=pin(config))
        assert fleet_status(state).devices[0].device == "board-1"
        findings = {f.check: f for f in check_connection(None, DeviceState(state).identity(), None)}
        assert findings["TLS"].detail.endswith("the same certificate as at the join")
        assert findings["membership"].result == "PASS"
        # Without the fingerprint an authority has to have signed it.
        with pytest.raises(ClientError, match=r"self-signed certificate"):
            join(server.url, token, "b", tmp_path / "b")
        with pytest.raises(ClientError, match="is not the one that --certificate named"):
            join(server.url, token, "b", tmp_path / "b", certificate="0" * 64)
        leave(state)
    assert not (tmp_path / "b" / "device.json").exists()


def test_an_agent_that_trusts_the_authority(
    config: CoordinatorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(config.tls_cert))
    with running(config) as server:
        join(server.url, full_token(config, "board"), "desk", tmp_path / "a")
        assert fleet_status(tmp_path / "a").devices[0].device == "board-1"


def test_the_command_line(config: CoordinatorConfig, tmp_path: Path) -> None:
    token = tmp_path / "board.token"
    with running(config) as server:
        token.write_text(full_token(config, "board"))
        url, fingerprint = server.url, pin(config)
        lines = startup_message(config, url, Path("f.toml"), True, fingerprint)
        assert f"  --certificate {fingerprint}" in lines
        assert any("phones need a certificate of an authority" in line for line in lines)
        written = ":".join(fingerprint[n : n + 2] for n in range(0, 64, 2)).upper()
        args = ("--token-file", token, "--state", "a", "--certificate", written)
        done = run("edgetailor-agent", "join", url, *map(str, args), cwd=tmp_path)
        assert (done.code, done.stdout) == (
            0, "board-1 has joined; next: edgetailor-agent run --data DATA --state a\n"
        )  # fmt: skip
    plain = run(
        *("edgetailor-agent", "join", "http://127.0.0.1:1", "--token-file", str(token)),
        *("--certificate", fingerprint),
        cwd=tmp_path,
    )
    assert plain.code == 2
    assert "--certificate needs a URL that begins with https://" in plain.stderr


def test_a_renewed_certificate_is_used_without_a_restart(
    config: CoordinatorConfig, tmp_path: Path
) -> None:
    assert config.tls_cert is not None
    assert config.tls_key is not None
    certificate = Certificate(config.tls_cert, config.tls_key)
    listening = bind("127.0.0.1", 0, Path("f.toml"))
    port = listening.getsockname()[1]
    with listening, answer_preparing(listening, certificate):
        first = presented(port)
        assert first == certificate.fingerprint
        second = new_certificate(tmp_path / "new", NAMES)
        shutil.copy(tmp_path / "new" / "cert.pem", config.tls_cert)
        said: list[str] = []
        with messages_to(said.append):
            certificate.renew()
            certificate.renew()
        assert presented(port) == first  # its key is not there yet
        assert [line.split(":")[0] for line in said] == ["The renewed certificate is not used"]
        assert "the key belongs to another certificate" in said[0]
        shutil.copy(tmp_path / "new" / "key.pem", config.tls_key)
        certificate.renew()
        assert presented(port) == second
        config.tls_cert.unlink()
        certificate.renew()
        assert presented(port) == second


def test_a_coordinator_that_is_starting(config: CoordinatorConfig) -> None:
    assert config.tls_cert is not None
    assert config.tls_key is not None
    certificate = Certificate(config.tls_cert, config.tls_key)
    listening = bind("127.0.0.1", 0, Path("f.toml"))
    url = f"https://127.0.0.1:{listening.getsockname()[1]}"
    with listening, answer_preparing(listening, certificate):
        link = CoordinatorClient(url, "x", patience_s=0, certificate=pin(config))
        with pytest.raises(ClientError, match="is still preparing"):
            link.work()


def test_new_files(tmp_path: Path) -> None:
    done = edgetailor("tls", "new", "tls", "--name", "fleet.lan", "--name", "::1", cwd=tmp_path)
    fingerprint = Certificate(tmp_path / "tls/cert.pem", tmp_path / "tls/key.pem").fingerprint
    assert (done.code, done.stdout) == (0, FILES)
    assert done.stderr.splitlines() == [
        "In the federation's file, for fleet.lan, ::1:",
        "Devices join with this option, as `edgetailor serve` says, too:",
        f"--certificate {fingerprint}",
    ]
    assert (tmp_path / "tls/key.pem").stat().st_mode & 0o777 == 0o600
    if openssl := shutil.which("openssl"):
        shown = subprocess.run(
            [openssl, "x509", "-in", tmp_path / "tls/cert.pem", "-noout", "-ext", "subjectAltName"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert "DNS:fleet.lan, IP Address:0:0:0:0:0:0:0:1" in shown
    before = (tmp_path / "tls/key.pem").read_bytes()
    again = edgetailor("tls", "new", "tls", cwd=tmp_path)
    assert (again.code, again.stdout) == (2, "")
    assert "tls/cert.pem exists" in again.stderr
    assert (tmp_path / "tls/key.pem").read_bytes() == before
    wrong = edgetailor("tls", "new", "other", "--name", "https://x", cwd=tmp_path)
    assert wrong.code == 2
    assert "Invalid name 'https://x'" in wrong.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("damage", ["missing", "no PEM", "another key"])
def test_files_that_cannot_be_used(config: CoordinatorConfig, tmp_path: Path, damage: str) -> None:
    assert config.tls_cert is not None
    assert config.tls_key is not None
    if damage == "missing":
        config.tls_key.unlink()
    elif damage == "no PEM":
        config.tls_key.write_bytes(b"key")
    else:
        new_certificate(tmp_path / "new", NAMES)
        shutil.copy(tmp_path / "new" / "key.pem", config.tls_key)
    with refused("service.unusable-certificate"):
        Certificate(config.tls_cert, config.tls_key)


def test_one_file_without_the_other(tmp_path: Path) -> None:
    with refused("config.bad-value", "`tls_cert` and `tls_key` belong together"):
        configured(tmp_path, FILES.splitlines()[0] + "\n" + CONFIG)
