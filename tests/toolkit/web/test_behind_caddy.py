"""The proxy of the documentation in front of the coordinator: a real Caddy, real agents."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import free_port
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.membership import join
from vector_fleet import (
    CONFIG,
    DOCS,
    VectorModel,
    assert_soon,
    configured,
    full_token,
    running,
    send,
    trained,
)

pytestmark = pytest.mark.web
SIZE = 3_000_000
ALONE = re.sub(r'\[\[devices\]\]\nname = "board".*', "", CONFIG, flags=re.S)


@contextmanager
def caddy(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a Caddy with the file of the documentation, for localhost; agents trust it."""
    text = (DOCS / "guides" / "coordinator.md").read_text()
    [block] = re.findall(r"```\n(fleet\.example\.org \{.*?\n\})\n```", text, re.S)
    url = f"https://localhost:{free_port()}"
    ours = block.replace("fleet.example.org {", f"{url} {{\n tls internal")
    settings = "{\n admin off\n skip_install_trust\n auto_https disable_redirects\n}\n"
    (folder / "Caddyfile").write_text(settings + ours.replace("127.0.0.1:8123", backend))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    running_caddy = subprocess.Popen(
        ["caddy", "run", "--config", "Caddyfile"], cwd=folder, stderr=subprocess.DEVNULL
    )
    try:
        root = folder / "caddy/pki/authorities/local/root.crt"
        assert_soon(root.exists, 30)
        monkeypatch.setenv("SSL_CERT_FILE", str(root))
        yield url
    finally:
        running_caddy.terminate()
        running_caddy.wait(30)


def test_two_rounds_behind_caddy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path / "c", ALONE.replace("count = 2", ""))
    model = VectorModel(SIZE)
    with running(config, model) as server:
        backend = server.url.removeprefix("http://")
        with caddy(tmp_path, backend, monkeypatch) as url:
            known = join(url, full_token(config, "desktop"), "desk", tmp_path / "a")
            link = CoordinatorClient(url, known.secret, patience_s=10)
            for round_ in (1, 2):
                work, _, update = trained(link, tmp_path / str(round_))
                assert work.round == round_
                send(link, round_, update)
            assert_soon(lambda: len(model.folded) == 2)
    assert model.weights.shape == (SIZE,)
    assert set(model.weights) == {2.0}
