"""Routes for programs that watch a coordinator: health, readiness, and figures for Prometheus."""

import shutil
import subprocess
from pathlib import Path

import urllib3
from prometheus_client.parser import text_string_to_metric_families

from toolkit.coordinator.http.server_socket import answer_preparing, bind, url_of
from toolkit.coordinator.server import Server
from vector_fleet import Fleet, send_trained, task


def figures(server: Server) -> dict[str, float]:
    """Each figure by its name and labels."""
    headers = {"Authorization": f"Bearer {server.coordinator.operator_token}"}
    answer = urllib3.request("GET", f"{server.url}/metrics", headers=headers)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    samples = [s for f in text_string_to_metric_families(answer.data.decode()) for s in f.samples]
    if (tool := shutil.which("promtool")) is not None:
        subprocess.run([tool, "check", "metrics"], input=answer.data, check=True)
    return {
        sample.name + "".join(f" {label}" for label in sample.labels.values()): sample.value
        for sample in samples
    }


def test_the_figures_are_those_of_the_status(new_fleet: Fleet, tmp_path: Path) -> None:
    server, links = new_fleet
    before = figures(server)
    assert before["edgetailor_rounds_total"] == 0
    for name in ("desktop-1", "board-1"):
        send_trained(links[name], 1, tmp_path / name)
    in_round = figures(server)
    assert in_round["edgetailor_round_open"] == 1
    assert in_round["edgetailor_round_updates"] == 2
    assert in_round["edgetailor_round_updates_needed"] == 2
    assert in_round["edgetailor_round_late_devices"] == 1
    assert 0 < in_round["edgetailor_round_remaining_seconds"] <= server.config.deadline_s
    send_trained(links["desktop-2"], 1, tmp_path / "desktop-2")
    assert task(links["board-1"]).round == 2
    server.coordinator.act("pause", "board-1", "x", "operator")
    after, status = figures(server), server.coordinator.status()
    assert after["edgetailor_rounds_total"] == 1
    assert after["edgetailor_devices board paused"] == 1
    assert sum(v for n, v in after.items() if n.startswith("edgetailor_devices ")) == 3
    assert after["edgetailor_model_loss held_out"] == status.history[-1].loss == 1.0
    assert after["edgetailor_model_accuracy held_out"] == status.history[-1].accuracy
    for direction, counted in (("fetched", "bytes_down"), ("sent", "bytes_up")):
        total = sum(getattr(device, counted) for device in status.devices)
        assert after[f"edgetailor_traffic_bytes_total {direction}"] == total > 0
    assert after["edgetailor_operator_actions_total"] == 1


def test_without_the_operators_token_there_are_no_figures(new_fleet: Fleet) -> None:
    server, _ = new_fleet
    assert urllib3.request("GET", f"{server.url}/metrics").status == 401
    headers = {"Authorization": "Bearer guess"}
    assert urllib3.request("GET", f"{server.url}/metrics", headers=headers).status == 401


def test_health_needs_no_credentials(new_fleet: Fleet) -> None:
    for route in ("healthz", "readyz"):
        answer = urllib3.request("GET", f"{new_fleet[0].url}/{route}")
        assert (answer.status, answer.json()) == (200, "ok")


def test_alive_and_not_ready_while_it_starts(tmp_path: Path) -> None:
    listening = bind("127.0.0.1", 0, tmp_path)
    with answer_preparing(listening):
        url = url_of(listening, "127.0.0.1")
        answers = {
            route: urllib3.request("GET", f"{url}/{route}", retries=False).status
            for route in ("healthz", "readyz", "metrics")
        }
    listening.close()
    assert answers == {"healthz": 200, "readyz": 503, "metrics": 503}
