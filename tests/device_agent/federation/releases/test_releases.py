"""A device follows offers of releases: checked, fetched, tried, switched to, and taken back."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from device_agent.formats.evaluation_counts import EvaluationCounts, EvaluationRequest
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.inference.release_trial import TrialResult
from log_messages import logged
from release_offers import KEY, Shelf, broken, bundles, device, offer, refuse, take, whole_release
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey


def test_the_release_before_stays_and_older_ones_go(tmp_path: Path) -> None:
    shelf = Shelf()
    releases = device(tmp_path, shelf)
    for number in (1, 2, 3):
        releases.follow(offer(number))
        assert whole_release(tmp_path) == number
        assert bundles(tmp_path) == min(number, 2)
    fetched = len(shelf.fetched)
    releases.follow(offer(2, back=True, issued=200))
    assert (whole_release(tmp_path), bundles(tmp_path)) == (2, 1)
    assert len(shelf.fetched) == fetched  # it was still there
    releases.follow(offer(1, back=True, issued=201))  # this one has to be fetched again
    assert whole_release(tmp_path) == 1
    releases.follow(offer(0, back=True, issued=202))
    assert (whole_release(tmp_path), bundles(tmp_path)) == (0, 0)
    assert [(r.number, r.taken, r.runs) for r in shelf.reports] == [
        (n, True, n) for n in (1, 2, 3, 2, 1, 0)
    ]


def test_an_offer_is_followed_once(tmp_path: Path) -> None:
    shelf = Shelf()
    releases = device(tmp_path, shelf)
    for _ in range(3):
        releases.follow(offer(1))
    device(tmp_path, shelf).follow(offer(1))  # after a restart, too
    releases.follow(None)
    assert (len(shelf.fetched), len(shelf.reports)) == (2, 1)


def test_a_device_that_never_had_the_withdrawn_release_tries_the_one_before(tmp_path: Path) -> None:
    shelf = Shelf()
    device(tmp_path, shelf, refuse).follow(offer(1, back=True, issued=200))
    assert (whole_release(tmp_path), shelf.reports[-1].taken) == (0, False)


def test_a_way_back_does_not_lead_to_a_release_that_was_refused(tmp_path: Path) -> None:
    shelf = Shelf()
    device(tmp_path, shelf).follow(offer(1))
    device(tmp_path, shelf, refuse).follow(offer(2))
    releases = device(tmp_path, shelf)
    releases.follow(offer(3))
    for _ in range(2):
        releases.follow(offer(2, back=True, issued=200))
        assert whole_release(tmp_path) == 1
    assert [(r.number, r.taken, r.runs) for r in shelf.reports[2:]] == [(3, True, 3), (2, False, 1)]
    releases.follow(offer(0, back=True, issued=201))
    assert whole_release(tmp_path) == 0


def test_an_earlier_release_needs_the_order_to_go_back(tmp_path: Path) -> None:
    shelf = Shelf()
    releases = device(tmp_path, shelf)
    releases.follow(offer(2))
    for _ in range(2):
        releases.follow(offer(1, issued=300))
    assert whole_release(tmp_path) == 2
    _, report = shelf.reports
    assert (report.number, report.taken, report.runs) == (1, False, 2)
    assert "already has the later release 2" in report.reason


def changed_file(given: ReleaseOffer) -> ReleaseOffer:
    return replace(given, files=[replace(given.files[0], sha256="0" * 64), *given.files[1:]])


@pytest.mark.parametrize(
    "alter",
    [
        changed_file,
        lambda given: replace(given, number=7),
        lambda given: replace(given, round=7),
        lambda given: replace(given, back=not given.back),
        lambda given: replace(given, issued=given.issued + 1),
        lambda given: replace(given, evaluation=EvaluationRequest(share=0.1)),
        lambda given: replace(given, files=given.files[:1]),
        lambda given: replace(given, signature=""),
        lambda given: CoordinatorKey().releases(given),
    ],
)
def test_an_altered_offer_changes_nothing(
    tmp_path: Path, alter: Callable[[ReleaseOffer], ReleaseOffer]
) -> None:
    shelf = Shelf()
    releases = device(tmp_path, shelf)
    releases.follow(offer(1))
    with logged() as said:
        releases.follow(alter(offer(2)))
        releases.follow(alter(offer(3)))
    assert (whole_release(tmp_path), len(shelf.fetched)) == (1, 2)
    assert said
    assert all("is not signed by the coordinator" in line for line in said)


def test_an_old_offer_cannot_take_a_device_back(tmp_path: Path) -> None:
    back = offer(1, back=True, issued=150)
    releases = device(tmp_path)
    for given in (offer(1), offer(2), back, offer(3, issued=160)):
        releases.follow(given)
    releases.follow(back)  # somebody repeats it
    assert whole_release(tmp_path) == 3


def test_what_is_worse_is_not_taken_and_not_tried_again(tmp_path: Path) -> None:
    shelf = Shelf()
    device(tmp_path, shelf).follow(offer(1))
    device(tmp_path, shelf, refuse).follow(offer(2))
    device(tmp_path, shelf, take).follow(offer(2))
    assert (whole_release(tmp_path), bundles(tmp_path)) == (1, 1)
    report = shelf.reports[-1]
    assert (report.number, report.taken, report.runs) == (2, False, 1)
    assert report.code == "release.worse"
    assert "10.0%" in report.reason
    assert report.after is None  # the federation has not asked for counts
    device(tmp_path, shelf).follow(offer(3))
    assert whole_release(tmp_path) == 3


def test_with_secure_sums_a_report_has_no_figure_of_the_device(tmp_path: Path) -> None:
    shelf, counts = Shelf(), EvaluationCounts(samples=40, counted=40, loss_sum=9.0, correct=30)
    trial = partial(TrialResult, before=counts, after=counts)
    asked = KEY.releases(replace(offer(1), evaluation=EvaluationRequest(share=0.2)))
    for secure in (False, True):
        state = tmp_path / str(secure)
        device(state, shelf, lambda *given: trial(), only_sums=secure).follow(asked)
        device(state, shelf, refuse, only_sums=secure).follow(offer(2))
    told = [(own.taken, own.before, own.after, own.reason) for own in shelf.reports]
    said = str(refuse().reason)
    assert told[:2] == [(True, counts, counts, ""), (False, None, None, said)]
    assert told[2:] == [
        (True, None, None, ""),
        (False, None, None, "worse on the samples of this device"),
    ]


def test_the_way_back_needs_no_trial(tmp_path: Path) -> None:
    device(tmp_path).follow(offer(1))
    device(tmp_path).follow(offer(2))
    device(tmp_path, trial=refuse).follow(offer(1, back=True, issued=200))
    assert whole_release(tmp_path) == 1


def test_a_release_that_cannot_run_is_refused(tmp_path: Path) -> None:
    shelf = Shelf()
    device(tmp_path, shelf).follow(offer(1))
    device(tmp_path, shelf, broken).follow(offer(2))
    assert whole_release(tmp_path) == 1
    assert shelf.reports[-1].code == "bundle.unloadable-graph"


def test_a_report_is_sent_until_the_coordinator_has_it(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.answers = False
    device(tmp_path, shelf).follow(offer(1))
    shelf.answers = True
    releases = device(tmp_path, shelf)  # the agent was started again
    for _ in range(2):
        releases.follow(offer(1))
    assert [(report.number, report.taken) for report in shelf.reports] == [(1, True)]
