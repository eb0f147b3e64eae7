"""The alerts and the dashboard: their figures exist, and a real Prometheus fires the alerts."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import urllib3

from commands import free_port
from toolkit.coordinator.server import Server
from toolkit.evaluation_sums import Evaluation
from vector_fleet import (
    CONFIG,
    DOCS,
    Fleet,
    VectorModel,
    assert_soon,
    configured,
    enrol,
    running,
    send_all,
    task,
)

ALERTS = DOCS / "monitoring" / "edgetailor-alerts.yml"
DASHBOARD = DOCS / "monitoring" / "edgetailor-dashboard.json"
GUIDE = DOCS / "guides" / "monitoring.md"
OF_SELECTED_ROUNDS = {"edgetailor_round_selected_devices", "edgetailor_not_needed_devices"}
FIGURE = re.compile(r"\b(?:edgetailor_[a-z_]+|process_[a-z_]+)\b")


def metrics(server: Server) -> str:
    headers = {"Authorization": f"Bearer {server.coordinator.operator_token}"}
    return urllib3.request("GET", f"{server.url}/metrics", headers=headers).data.decode()


def test_the_figures_of_alerts_dashboard_and_guide_exist(new_fleet: Fleet) -> None:
    server, links = new_fleet
    assert task(links["board-1"]).round == 1
    told = metrics(server)
    described = set(re.findall(r"^# TYPE (\S+)", told, re.M))
    expressions = [
        target["expr"]
        for p in json.loads(DASHBOARD.read_text())["panels"]
        for target in p["targets"]
    ]
    alerts = "\n".join(re.findall(r"^ +expr: (.*(?:\n {10}.*)*)", ALERTS.read_text(), re.M))
    for text in (alerts, "\n".join(expressions)):
        used = set(FIGURE.findall(text))
        assert used <= described, used - described
    ours = {name for name in described if name.startswith("edgetailor_")}
    listed = {name for name in FIGURE.findall(GUIDE.read_text()) if name[0] == "e"}
    assert listed == ours | OF_SELECTED_ROUNDS


def test_the_guide_lists_each_alert() -> None:
    rules = re.findall(r"alert: (\w+)", ALERTS.read_text())
    assert re.findall(r"^\| `(EdgeTailor\w+)`", GUIDE.read_text(), re.M) == rules


class Worsening(VectorModel):
    """A model that is worse after each round."""

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        usual = super().evaluation(x, y)
        return replace(usual, accuracy=1 - usual.loss / 10)


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes `server`, with the alerts; gives its URL."""
    token = folder / "operator.token"
    token.write_text(server.coordinator.operator_token)
    target = server.url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        f"""
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: [{ALERTS}]
scrape_configs:
  - job_name: edgetailor
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""
    )
    address = f"127.0.0.1:{free_port()}"
    program = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{address}"
    finally:
        program.kill()
        program.wait()


def firing(url: str) -> set[str]:
    """The names of the alerts that fire."""
    try:
        answer = urllib3.request("GET", f"{url}/api/v1/alerts", retries=False)
    except urllib3.exceptions.HTTPError:
        return set()  # it starts
    if answer.status != 200:
        return set()
    alerts = answer.json()["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.mark.long
def test_a_real_prometheus_fires_for_a_stalled_round_and_falling_quality(tmp_path: Path) -> None:
    """No device sends an update for round 4, whose deadlines pass."""
    text = CONFIG.replace("rounds = 3", "rounds = 4\ndeadline_s = 2\nmin_updates = 3")
    config = configured(tmp_path / "fleet", text)
    with running(config, Worsening()) as server, prometheus(server, tmp_path) as url:
        links = enrol(server, tmp_path / "fleet")
        assert firing(url) == set()
        for round_ in (1, 2, 3):
            send_all(links, round_, tmp_path / str(round_))
        wanted = {"EdgeTailorRoundStalled", "EdgeTailorQualityFalling"}
        assert_soon(lambda: firing(url) == wanted, 60)
        send_all(links, 4, tmp_path / "4")
        assert_soon(lambda: firing(url) == {"EdgeTailorQualityFalling"}, 60)


@pytest.mark.long
def test_promtool_accepts_the_rules_and_fires_each_of_them(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True)
    series = [("up", 'job="edgetailor"', 0)] + [
        ("edgetailor_devices", f'kind="{kind}", state="{state}"', count)
        for kind, state, count in [
            ("phone", "stopped", 4),
            ("phone", "waiting", 6),
            ("phone", "left", 90),
            ("board", "waiting", 9),
        ]
    ]
    inputs = "\n".join(
        f"      - {{series: '{name}{{{labels}, instance=\"a\"}}', values: '{value}x30'}}"
        for name, labels, value in series
    )
    (tmp_path / "test.yml").write_text(
        f"""
rule_files: [{ALERTS}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
{inputs}
    promql_expr_test:
      - expr: count by (alertname, kind) (ALERTS{{alertstate="firing"}})
        eval_time: 20m
        exp_samples:
          - {{labels: '{{alertname="EdgeTailorUnreachable"}}', value: 1}}
          - {{labels: '{{alertname="EdgeTailorDevicesStopped", kind="phone"}}', value: 1}}
"""
    )
    subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], check=True)
