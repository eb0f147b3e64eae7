"""Real agents in rounds that select devices: who is not needed continues, and nobody waits long."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from device_agent.federation import membership, round_loop
from device_agent.federation.fleet_status import lines
from device_agent.federation.run_options import RunOptions
from operator_pages import built_files, log_in
from vector_fleet import (
    CONFIG,
    VectorModel,
    assert_soon,
    configured,
    running,
    token,
    train_vector,
)

AGENTS, GOAL, ASKED, ROUNDS = 5, 2, 3, 3
KEYS = f"clients_per_round = {GOAL}\nbudget_s = 7.5\n"


def test_agents_that_are_not_needed_go_on_to_the_next_round(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", KEYS + CONFIG.replace("count = 2", f"count = {AGENTS - 1}"))
    model, budgets, sent = VectorModel(), [], []
    # All that are asked in round 1 have begun before the first ends, and none of them has sent.
    together, looked = threading.Barrier(ASKED), threading.Event()
    rounds: dict[str, int] = {}

    def train(folder: Path, data: str, out: Path, **more: Any) -> object:
        budgets.append(more["options"].budget_s)
        name = threading.current_thread().name
        rounds[name] = rounds.get(name, 0) + 1
        if model.folded == []:
            together.wait(30)
            looked.wait(30)
        return train_vector(folder, data, out, **more)

    def run(number: int) -> None:
        options = RunOptions(data=str(config.held_out), state=tmp_path / str(number))
        sent.append(round_loop.run(options, train=train, sleep=lambda seconds: time.sleep(0.02)))

    with running(config, model, page=built_files(tmp_path)) as server:
        for number in range(AGENTS):
            kind = "board" if number == 0 else "desktop"
            state = tmp_path / str(number)
            membership.join(server.url, token(config, kind), f"machine {number}", state)
        threads = [threading.Thread(target=run, args=(n,), name=str(n)) for n in range(AGENTS)]
        for thread in threads:
            thread.start()
        assert_soon(lambda: len(rounds) == ASKED, 30)
        status = server.coordinator.status()
        bearer = {"Authorization": f"Bearer {server.coordinator.operator_token}"}
        answer = urllib3.request("GET", f"{server.url}/metrics", headers=bearer)
        with httpx.Client(base_url=server.url, headers={"Accept": "text/html"}) as browser:
            log_in(browser, server.coordinator.operator_token)
            page = browser.get("/operator/").text
        looked.set()
        for thread in threads:
            thread.join(60)
        history = server.coordinator.store.history.results()[1:]
    assert lines(status)[1] == f"  {ASKED} devices selected, 0 of {GOAL} updates came"
    assert f"{lines(status)[1].strip()}. The round needs at least 2 updates." in page
    families = text_string_to_metric_families(answer.data.decode())
    figures = {sample.name: sample.value for one in families for sample in one.samples}
    assert figures["edgetailor_round_selected_devices"] == ASKED
    assert figures["edgetailor_not_needed_devices"] == 0
    assert model.folded == [GOAL] * ROUNDS
    assert [(one.updates, one.asked) for one in history] == [(GOAL, ASKED)] * ROUNDS
    assert sum(sent) == GOAL * ROUNDS
    assert set(budgets) == {7.5}
