"""Updates that differ much from the others are limited, and everybody can read which."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from commands import edgetailor
from device_agent.formats.protocol.fleet import Limited, RoundResult
from device_agent.formats.update import MOST_SAMPLES
from hostile_fleet import HostileFleet
from operator_pages import built_files, log_in
from toolkit.aggregation.limits.reference import Figures, Reference, RoundLimits
from toolkit.coordinator.rounds.limited_devices import (
    limited_note,
    limits_text,
    limits_warning,
    often_limited,
    times_limited,
)
from toolkit.coordinator.rounds.upload_validation import Update
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import CONFIG, VectorModel, assert_soon, configured, enrol, running, send_trained

BEYOND = Limited(times=12.0, tensor="w", tensors=1)


class Suspecting(VectorModel):
    """Limits the first update of every round, as if it were far beyond its limit."""

    def fold_checked(self, updates: Iterable[Update], limits: object = None) -> None:
        assert isinstance(limits, RoundLimits)
        came = list(updates)
        for number, (record, _) in enumerate(came):
            own = Figures(kind=record.submodel, samples=7, steps=2, changes={"w": 0.5})
            limits.note(own, None if number else BEYOND)
        super().fold_checked(came)


def test_the_operator_reads_who_was_limited_and_how_often(tmp_path: Path) -> None:
    page, told = built_files(tmp_path), list[str]()
    config = configured(tmp_path / "c")
    with running(config, Suspecting(), told.append, page=page) as server:
        links = enrol(server, tmp_path)
        for round_ in (1, 2, 3):
            for name, link in links.items():
                send_trained(link, round_, tmp_path / f"{name}-{round_}")
        assert_soon(lambda: server.coordinator.rounds.done == 3)
        history = server.coordinator.store.history.results()
        (limited,) = {device for result in history[1:] for device in result.limited}
        status = server.coordinator.status()
        (note,) = [d.note for d in status.devices if d.device == limited]
        assert note == (
            "limited in 3 of its 3 rounds; in round 3, its change of 'w' was 12 times the limit"
        )
        (warning,) = status.warnings
        assert f"most rounds of {limited} (3 of 3)" in warning
        with httpx.Client(base_url=server.url, headers={"Accept": "text/html"}) as browser:
            log_in(browser, server.coordinator.operator_token)
            shown = browser.get("/operator/unused").text
            assert "Updates that were limited" in shown
            assert shown.count("was 12 times the limit") == 3
            assert limited in browser.get("/operator/").text
        reference = server.coordinator.store.reference()
        assert 0 < reference.changes["w"] <= 0.5
    assert sum(f"limited 1 of 3 updates ({limited}: its change" in text for text in told) == 3
    written = json.loads((config.state / "history.json").read_text())["history"]
    assert "limited" not in written[0]
    assert [entry["limited"][limited]["times"] for entry in written[1:]] == [12.0] * 3
    listed = edgetailor("rounds", str(config.state), cwd=tmp_path)
    assert listed.stdout.count("1 limited") == 3
    detail = edgetailor("rounds", str(config.state), "--round", "2", cwd=tmp_path).stdout
    assert f"limited {limited}: its change of 'w' was 12 times the limit" in detail


@pytest.mark.parametrize("judge", ["true", "false"])
def test_the_judge_pauses_a_device_that_is_far_beyond_its_limit(tmp_path: Path, judge: str) -> None:
    text = f"{CONFIG.replace('rounds = 3', 'rounds = 6')}\n[aggregation]\njudge = {judge}\n"
    with running(configured(tmp_path / "c", text), Suspecting()) as server:
        links, coordinator = enrol(server, tmp_path), server.coordinator
        for round_ in range(1, 6):
            assert not coordinator.rounds.paused
            for name, link in links.items():
                send_trained(link, round_, tmp_path / f"{name}-{round_}")
            assert_soon(lambda: coordinator.rounds.done == round_)  # noqa: B023
        (limited,) = {d for result in coordinator.store.history.results() for d in result.limited}
        assert_soon(lambda: coordinator.rounds.phase == "training")
        if judge == "false":
            assert not coordinator.rounds.paused
            return
        assert_soon(lambda: coordinator.rounds.paused == {limited})
        assert coordinator.store.operator_log.decisions[limited].reason == (
            "by the judge: of its last 5 updates, it found 5 far beyond a limit, in the "
            "rounds 1, 2, 3, 4, 5"
        )


def test_bounds_can_be_turned_off(tmp_path: Path) -> None:
    config = configured(tmp_path, f"{CONFIG}\n[aggregation]\nbounds = false\n")
    model = VectorModel()
    with running(config, model) as server:
        links = enrol(server, tmp_path)
        for name, link in links.items():
            send_trained(link, 1, tmp_path / name)
        assert_soon(lambda: server.coordinator.rounds.done == 1)
    assert model.limits == [None]


@pytest.fixture(scope="module")
def fleet() -> HostileFleet:
    return HostileFleet()


@pytest.mark.parametrize("kind", ["full", "cp:2.0", "low-rank:0.5,keep=1", "width:0.5"])
def test_a_hostile_device_moves_the_model_at_most_by_its_limit(
    fleet: HostileFleet, tmp_path: Path, kind: str
) -> None:
    """One of four devices reverses its change, ten times as large, and claims all samples."""
    honest = fleet.first_round([kind] * 4)
    plain = fleet.fold(tmp_path / "plain", honest)
    expected = fleet.federation.model
    first = fleet.federation.saved(fleet.first)
    record, arrays = honest[0]
    received = fleet.federation.submodel(kind).cut(first)
    reversed_ = {n: received[n].numpy() - 10 * (a - received[n].numpy()) for n, a in arrays.items()}
    kept = {n: a if "running" in n else reversed_[n] for n, a in arrays.items()}
    attack = [(replace(record, samples=MOST_SAMPLES), kept), *honest[1:]]
    moved: dict[bool, float] = {}
    for bounded in (False, True):
        done = fleet.fold(tmp_path / str(bounded), attack, bounded)
        assert not done.left_out
        assert ("device-0" in done.limited) == bounded
        moved[bounded] = _distance(fleet.federation.model.tensors, expected.tensors)
    told = done.limited["device-0"]
    assert (told.samples, told.counted) == (MOST_SAMPLES, 32)
    assert told.times > 3
    assert moved[True] < moved[False] / 4
    assert not plain.limited


def test_an_honest_round_of_equal_devices_is_the_plain_mean(
    fleet: HostileFleet, tmp_path: Path
) -> None:
    updates = fleet.first_round(["full"]) * 3
    fleet.fold(tmp_path / "plain", updates)
    expected = fleet.federation.save()
    done = fleet.fold(tmp_path / "bounded", updates, bounded=True)
    assert fleet.federation.save() == expected
    assert done.reference is not None
    assert done.reference.kinds == {"full": 16}


def test_a_round_that_is_repeated_after_a_kill_has_the_same_limits(tmp_path: Path) -> None:
    """The reference changes in the transaction that keeps the round's model."""
    store = Store(tmp_path)
    first = RoundResult(round=0, accuracy=0, loss=1, updates=0)
    store.add_result(first, b"model")
    assert store.reference() == Reference()
    reference = Reference(steps=3, kinds={"full": 5}, changes={"w": 1e38})
    limited = {"device-0": BEYOND, "device-1": Limited(samples=10, counted=3)}
    result = RoundResult(round=1, accuracy=0, loss=1, updates=2, limited=limited)
    store.add_result(result, b"newer", reference=reference)
    store.close()
    again = Store(tmp_path)
    assert again.reference() == reference
    assert again.history.results()[1].limited == limited
    again.close()


def _result(round_: int, *limited: str) -> RoundResult:
    own = dict.fromkeys(limited, BEYOND)
    return RoundResult(round=round_, accuracy=None, loss=None, updates=9, limited=own)


def test_only_devices_that_were_limited_in_most_rounds_are_named() -> None:
    history = [_result(n, "a", *(["b"] if n == 4 else [])) for n in range(1, 5)]
    history.append(_result(5))
    times, trained = times_limited(history), {"a": 5, "b": 5}
    assert times == {"a": 4, "b": 1}
    assert limits_warning(times, trained) == (
        "Updates were limited in most rounds of a (4 of 5). Their data differ much from those of "
        "the others, or they harm the model: pause devices that you do not trust."
    )
    assert limits_warning({"b": 1}, trained) is None
    assert limited_note("b", history, times, 5) is None  # its last update was not limited
    assert limited_note("b", history[:-1], times, 4) is not None
    assert limited_note("a", history, times, 5) is not None
    assert limited_note("c", history, times, 5) is None
    assert (often_limited(2, 2), often_limited(3, 6), often_limited(3, 5)) == (False, False, True)
    assert limits_text(_result(1)) is None
    seven = limits_text(_result(1, *"abcdefg"))
    assert seven is not None
    assert seven.startswith("limited 7 of 9 updates (the most a: ")


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The distance of all trained tensors of two models."""
    trained = [n for n in one if one[n].is_floating_point() and "running" not in n]
    parts = [(one[name].double() - other[name].double()).flatten() for name in trained]
    return float(torch.cat(parts).norm())
