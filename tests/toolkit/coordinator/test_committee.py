"""A committee of devices accepts or rejects a new model before anybody else gets it."""

import json
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.evaluation_counts import Judgement
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.rounds import Work
from judging_fleet import WITHOUT_SAMPLES, JudgedModel, both, counts, update_with
from refusals import refused
from toolkit.aggregation.committee import DISAGREES, REJECTED
from toolkit.coordinator.closing.committee_judging import CANDIDATE
from toolkit.coordinator.rounds.upload_validation import Update
from toolkit.coordinator.server import Server
from vector_fleet import (
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    task,
)

COMMITTEE = WITHOUT_SAMPLES.replace("share = 0.5", "share = 0.5\ncommittee = 3")
BETTER, SAME, WORSE, LIE = 4.0, 8.0, 12.0, 3e30
"""Sums of losses of the new model; that of the model before is SAME."""


def play(links: Mapping[str, CoordinatorClient], folder: Path) -> None:
    """Let all devices send their updates, with counts of the model before."""
    for name, link in links.items():
        before = both(counts(6, 10, loss=SAME))
        round_, update = update_with(link, folder / name, before)
        send(link, round_, update)


def vote(link: CoordinatorClient, loss: float) -> Work:
    work = task(link)
    assert work.state == "judge", work
    offered = next(offer.sha256 for offer in work.files if offer.name == MANIFEST)
    link.send_judgement(work.round, Judgement(bundle=offered, counts=counts(6, 10, loss=loss)))
    return work


def published(server: Server) -> float:
    return float(load_file(server.config.state / "global.safetensors")["w"][0])


def weights_of(work: Work) -> str:
    return next(offer.sha256 for offer in work.files if offer.name == "weights.safetensors")


def test_a_new_model_is_published_once_its_committee_accepts_it(tmp_path: Path) -> None:
    told: list[str] = []
    with running(configured(tmp_path / "c", COMMITTEE), JudgedModel(), told.append) as server:
        links = enrol(server, tmp_path)
        first, second, third = links.values()
        play(links, tmp_path / "1")
        judged = vote(first, BETTER)
        assert (judged.round, judged.candidate) == (1, True)
        with refused("round.other-bundle"):
            second.send_judgement(1, Judgement(bundle="0" * 64, counts=counts(6, 10)))
        # Nobody has the new model yet: the folder, the history and other devices have the old one.
        assert first.work().state == "wait"
        assert (published(server), len(server.coordinator.store.history.results())) == (0.0, 1)
        assert vote(second, LIE).files == judged.files  # of the same kind
        assert published(server) == 0.0
        vote(third, SAME)
        works = [task(link) for link in links.values()]
        assert [(w.state, w.round, w.candidate) for w in works] == [("train", 2, False)] * 3
        assert weights_of(works[0]) == weights_of(judged)  # no member fetches them again
        assert published(server) == 1.0
        (result,) = server.coordinator.store.history.results()[1:]
        assert (result.updates, result.left_out) == (3, {})
    text = "it raises the loss of 1 of 3 devices by more than 10%"
    assert sum(text in line for line in told) == 1


REASON = (
    "the committee has rejected the new model: it raises the loss of 2 of 2 devices by more than "
    "10% (median 50%)"
)


def test_a_rejected_model_leaves_no_trace_in_the_next_round(tmp_path: Path) -> None:
    """Also after a restart in the middle of the judging.

    A member that claims an immense improvement changes nothing.
    """
    config = configured(tmp_path / "c", COMMITTEE)
    with running(config, JudgedModel()) as server:
        links = enrol(server, tmp_path)
        old = weights_of(task(next(iter(links.values()))))
        play(links, tmp_path / "1")
        vote(next(iter(links.values())), WORSE)
        candidate = server.coordinator.store.bundles(CANDIDATE)
        assert candidate["full"]["weights.safetensors"].sha256 != old
    told: list[str] = []
    with running(config, JudgedModel(), told.append) as server:
        links = {name: joined(server, tmp_path / str(n)) for n, name in enumerate(links)}
        first, second, third = links.values()
        vote(third, 0.0)
        vote(first, WORSE)  # once more, because its vote was not stored
        assert (published(server), server.coordinator.rounds.done) == (0.0, 0)
        vote(second, WORSE)
        assert_soon(lambda: server.coordinator.rounds.done == 1)
        works = [task(link) for link in links.values()]
        assert [(w.state, w.round) for w in works] == [("train", 2)] * 3
        assert weights_of(works[0]) == old
        (result,) = server.coordinator.store.history.results()[1:]
        assert (result.updates, set(result.left_out)) == (0, set(links))
        (reason,) = set(result.left_out.values())
        assert reason == REASON.replace("2 of 2", "2 of 3")
        assert sum("All its updates are left out" in line for line in told) == 1
    history = json.loads((config.state / "history.json").read_text())["history"]
    assert history[1]["left_out"] == result.left_out


def test_without_three_votes_a_model_is_rejected(tmp_path: Path) -> None:
    with running(configured(tmp_path / "c", COMMITTEE), JudgedModel()) as server:
        coordinator, links = server.coordinator, enrol(server, tmp_path)
        first, second, third = links.values()
        play(links, tmp_path / "1")
        vote(first, BETTER)
        vote(second, BETTER)
        assert task(third).state == "judge"
        third.leave()
        assert_soon(lambda: coordinator.rounds.done == 1)
        (result,) = coordinator.store.history.results()[1:]
    assert set(result.left_out.values()) == {
        "the committee could not judge the new model: 2 of 3 devices answered, and at least 3 must"
    }


class Suspicious(JudgedModel):
    """A model whose first update points against the others. Its weights are how many it has."""

    held_out = None

    def disagreeing(self, updates: Iterable[Update]) -> list[int]:
        return [0] if len([*updates]) == 3 else []

    def fold_checked(self, updates: Iterable[Update], limits: object = None) -> None:
        received = [*updates]
        super().fold_checked(received, limits)
        self.weights = np.full_like(self.weights, len(received))


@pytest.mark.parametrize("second", [BETTER, WORSE])
def test_a_committee_is_asked_again_without_what_disagrees(tmp_path: Path, second: float) -> None:
    """The same members, until the same deadline; only the second decision is told."""
    config, told = configured(tmp_path / "c", COMMITTEE), list[str]()
    with running(config, Suspicious(), told.append) as server:
        coordinator, links = server.coordinator, enrol(server, tmp_path)
        play(links, tmp_path / "1")
        first, *others = links.values()
        judged = vote(first, WORSE)
        assert_soon(lambda: coordinator.candidate is not None)
        candidate, ends = coordinator.candidate, coordinator.rounds._judging_ends_at
        for link in others:
            vote(link, WORSE)
        assert_soon(lambda: coordinator.candidate is not candidate and coordinator.rounds.judges)
        assert coordinator.rounds._judging_ends_at == ends
        again, *_ = [vote(link, second) for link in links.values()]
        assert (again.state, again.round) == ("judge", 1)
        assert weights_of(again) != weights_of(judged)
        assert_soon(lambda: coordinator.rounds.done == 1)
        (result,) = coordinator.store.history.results()[1:]
        accepted = second == BETTER
        assert published(server) == (2.0 if accepted else 0.0)
    assert (result.updates, len(result.left_out)) == ((2, 1) if accepted else (0, 3))
    reasons = [*result.left_out.values()]
    assert sum(r.startswith(f"{DISAGREES} {REJECTED}") for r in reasons) == 1
    assert sum(r.startswith(REJECTED) for r in reasons) == (0 if accepted else 2)
    assert sum("All its updates are left out" in line for line in told) == (not accepted)


class Slow(JudgedModel):
    """A model whose bundles of the second round are made for the committee at once, then slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.waits = threading.Event(), False

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        if round_ == 2 and self.waits:
            assert self.go_on.wait(60)
        return super().bundle(submodel, round_)


def test_a_kill_after_the_decision_offers_no_rejected_model(tmp_path: Path) -> None:
    """The coordinator is killed before it has made the bundles of the next round."""
    config, model = configured(tmp_path / "c", COMMITTEE), Slow()
    with running(config, model) as server:
        links = enrol(server, tmp_path)
        first, *others = links.values()
        old = weights_of(task(first))
        play(links, tmp_path / "1")
        vote(first, WORSE)
        model.waits = True
        for link in others:
            vote(link, WORSE)
        assert_soon(lambda: server.coordinator.rounds.done == 1)
        copy = configured(tmp_path / "copy", COMMITTEE)
        shutil.copytree(config.state, copy.state)
        model.go_on.set()
    with running(copy, JudgedModel()) as server:
        assert weights_of(task(joined(server, tmp_path / "0"))) == old
        assert published(server) == 0.0


def test_a_late_vote_changes_nothing(tmp_path: Path) -> None:
    """A member is waited for until the deadline. Later it may still send its vote, for a while."""
    config, model = configured(tmp_path / "c", COMMITTEE), Slow()
    with running(config, model) as server:
        coordinator, links = server.coordinator, enrol(server, tmp_path)
        play(links, tmp_path / "1")
        first, second, late = links.values()
        vote(first, BETTER)
        vote(second, BETTER)
        work, model.waits = task(late), True
        offered = next(offer.sha256 for offer in work.files if offer.name == MANIFEST)
        judgement = Judgement(bundle=offered, counts=counts(6, 10, loss=BETTER))
        assert coordinator.rounds.done == 0
        clock = coordinator.clock
        coordinator.clock = lambda: clock() + config.deadline_s
        assert_soon(lambda: coordinator.rounds.done == 1)
        late.send_judgement(1, judgement)
        model.go_on.set()
        assert task(late).state == "train"
        with refused("round.closed"):
            late.send_judgement(1, judgement)
        (result,) = coordinator.store.history.results()[1:]
    assert result.updates == 0


def test_a_late_vote_is_no_judgement_of_the_last_model(tmp_path: Path) -> None:
    """Although both are about the same bundle. A device that is asked for both answers both."""
    text = COMMITTEE.replace("rounds = 3", "rounds = 1")
    with running(configured(tmp_path / "c", text), JudgedModel()) as server:
        links = enrol(server, tmp_path)
        play(links, tmp_path / "1")
        assert_soon(lambda: server.coordinator.candidate is not None)
        candidate = server.coordinator.candidate
        for link in links.values():
            vote(link, BETTER)
        assert_soon(lambda: server.coordinator.status().state == "judging")
        first, *others = links.values()
        asked = task(others[0])
        offered = next(offer.sha256 for offer in asked.files if offer.name == MANIFEST)
        late = Judgement(bundle=offered, counts=counts(0, 10, loss=LIE))
        first.send_judgement(1, late)
        server.coordinator.candidate = candidate  # it stays until the last bundles are made
        first.send_judgement(1, late)
        server.coordinator.candidate = None
        for link in links.values():
            vote(link, BETTER)
        assert_soon(lambda: server.coordinator.status().state == "finished")
        figure = server.coordinator.store.history.results()[-1].devices
    assert figure is not None
    assert (figure.devices, figure.correct, figure.loss) == (3, 18, BETTER / 10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("share = 0.5", ""), "set `share`, too"),
        (("committee = 3", "committee = 2"), "greater than or equal to 3"),
        (("rounds = 3", 'rounds = 3\nmode = "async"\nbuffer_size = 2'), 'mode = "sync"'),
        (("rounds = 3", "rounds = 3\nquorum = 2"), "`quorum` allows 2"),
        (("count = 2", "count = 1"), "`count` allows 2"),
        (
            ("[[devices]]", "[privacy]\nsecure_aggregation = true\n\n[[devices]]"),
            "`committee` of [evaluation]",
        ),
    ],
)
def test_what_does_not_go_with_a_committee(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    with refused("config.bad-value", said):
        configured(tmp_path, COMMITTEE.replace(*change, 1))
