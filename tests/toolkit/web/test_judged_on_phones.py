"""Phones judge the models (federated evaluation): the same samples and counts as native agents."""

import json
from pathlib import Path

import numpy as np
import pytest

from device_agent.training.batching import held_out
from disclosure import Listener, assert_told
from page_modules import run_with
from phone_counts import Counts, assert_same
from phones import NativeAgent, Phone, fleet, samples
from profiles.errors import DataError

pytestmark = pytest.mark.web

KEPT_APART = """
const chosen = JSON.parse(given[0]).map(([samples, share]) => [...page.heldOut(samples, share)]);
console.log(JSON.stringify(chosen));
"""


def test_the_same_samples_are_kept_apart(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    given = [(10, 0.25), (14, 0.25), (6, 0.25), (2, 0.5), (3, 0.5), (4, 0.1), (1, 0.5), (0, 0.2)]
    given += [(int(draw.integers(2, 400)), float(draw.integers(1, 51) / 100)) for _ in range(100)]
    chosen = json.loads(run_with("held_out", KEPT_APART, tmp_path, json.dumps(given)))
    for (number, share), indices in zip(given, chosen, strict=True):
        try:
            expected = held_out(number, share).tolist()
        except DataError:
            expected = []
        assert indices == expected, (number, share)


EVALUATION = """
[evaluation]
share = 0.3
by_class = true
committee = 6
"""
KINDS = {
    "whole": "full",
    "part": "slice:residual",
    "personal": "cp:2.0,penalty=2.0,personal-steps=2,factor-steps=3,factor-rate=0.001",
}


def test_pages_and_agents_count_the_same(browser, serve, tmp_path: Path, seed: int) -> None:
    """A page and an agent of each kind, on the same file: also with the model of the last round."""
    data = samples(tmp_path, seed, 0, 40)
    given = {"kinds": KINDS, "count": 2, "rounds": 2, "training": f"momentum = 0.9{EVALUATION}"}
    with serve(*fleet(tmp_path / "c", **given)) as server:
        counts = Counts(server)
        agents, phones = [], []
        for kind in KINDS:
            options = {"report_classes": kind != "part"}
            agents.append(NativeAgent(server, kind, tmp_path / f"agent {kind}", data, options))
            agents[-1].start()
        for kind in KINDS:
            phone = Phone.opened(browser, server, kind)
            phone.page.get_by_text("30% of your examples are kept apart").wait_for()
            if kind != "part":
                phone.page.get_by_label("Also send these counts for each kind").check()
            phones.append(phone)
        listener = Listener(phones[0].page)
        for kind, phone in zip(KINDS, phones, strict=True):
            phone.train(data, f"page {kind}")
        for phone in phones:
            phone.wait_for("finished")
        for agent in agents:
            agent.finish()
        judged = server.coordinator.store.history.results()[-1].devices
    for kind in KINDS:
        page, agent = counts.updates[f"page {kind}"], counts.updates[f"agent {kind}"]
        assert len(page) == len(agent) == 2
        for round_, (one, other) in enumerate(zip(page, agent, strict=True), 1):
            assert one["trained"] == other["trained"] == 28
            assert ("classes" in one["before"]) == (kind != "part")
            assert one["before"]["samples"] == one["after"]["samples"] == 12
            assert_same(one["before"], other["before"])
            # From the second round on, Adam amplifies the rounding of personal tensors.
            if kind != "personal" or round_ == 1:
                assert_same(one["after"], other["after"])
        assert_same(counts.last[f"page {kind}"], counts.last[f"agent {kind}"])
    assert judged is not None
    assert_told(phones[0].page, listener, "POST /rounds/{round}/evaluation")
    whole = counts.last["page whole"]
    said = f"This model was judged on 12 of your own examples and got {whole['correct']} right"
    phones[0].page.get_by_text(f"from the shared model after the last round. {said}").wait_for()
    phones[2].page.get_by_text("from your personal model").wait_for()
