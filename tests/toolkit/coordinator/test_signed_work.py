"""What a device trains is what its coordinator has signed, whoever answers on the way."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from altering_proxy import Alter, in_between
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import round_loop
from device_agent.federation.device_state import DeviceState
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.federation.work_age import VALID_S, check_age
from device_agent.formats.protocol.joining import Invitation
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.formats.signed_work import check_signature, split_token, work_text
from device_agent.system.clock import Clock
from log_messages import logged
from profiles.errors import InputError
from refusals import refused
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from vector_fleet import (
    CONFIG,
    SIZE,
    configured,
    full_token,
    joined,
    running,
    task,
    token,
    train_vector,
)

ONE = CONFIG[: CONFIG.index("[[devices]]")] + '[[devices]]\nname = "board"\nsubmodel = "full"\n'
NOW = 1_800_000_000
KEY = CoordinatorKey()

offers = st.builds(
    FileOffer,
    name=st.sampled_from(["manifest.json", "weights.safetensors", "train.onnx"]),
    size=st.integers(0, 2**40),
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
)
works = st.builds(
    Work,
    state=st.just("train"),
    round=st.integers(0, 10**6),
    submodel=st.sampled_from(["full", "low-rank:0.5"]),
    files=st.lists(offers, max_size=4),
)


@given(works, works)
def test_only_the_signed_work_is_accepted(work: Work, other: Work) -> None:
    signed = KEY.signed(work, NOW)
    check_signature(signed, KEY.public)
    swapped = replace(other, issued=signed.issued, signature=signed.signature)
    if work_text(swapped) != work_text(signed):
        with refused("trust.forged-work", round=other.round):
            check_signature(swapped, KEY.public)
    with refused("trust.forged-work", round=work.round):
        check_signature(signed, CoordinatorKey().public)
    for bad in ("", "no base64", signed.signature[:-4]):
        with refused("trust.forged-work", round=work.round):
            check_signature(replace(signed, signature=bad), KEY.public)


DAY = VALID_S
YEAR = 365 * DAY


@pytest.mark.parametrize("synchronised", [True, False])
@pytest.mark.parametrize(
    ("newest", "now", "code"),
    [
        (NOW, NOW, None),
        (NOW, NOW + DAY, None),
        (0, NOW - DAY, None),
        (NOW + 1, NOW, "trust.old-work"),  # somebody repeats it
        (0, NOW + DAY + 1, "trust.old-work"),
        (0, NOW + 10 * YEAR, "trust.old-work"),  # or the clock is years ahead
        (0, 60, "trust.wrong-clock"),  # a board without a battery
        (NOW - 2 * DAY, NOW - 3 * DAY, "trust.wrong-clock"),
        # It was off for long, and its clock went on where it had stopped.
        (NOW - 9 * DAY, NOW - 8 * DAY, "trust.wrong-clock if synchronised"),
        # Its newest work was noted while the clocks of both sides were wrong.
        (NOW + 10 * YEAR, NOW, "trust.old-work if not synchronised"),
        (NOW + DAY, NOW, "trust.old-work"),
    ],
)
def test_the_time_of_work(newest: int, now: float, code: str | None, synchronised: bool) -> None:
    work = KEY.signed(Work(state="train", round=3), NOW)
    clock = Clock(lambda: now, lambda: synchronised)
    code, _, condition = (code or "").partition(" if ")
    if not code or (condition and condition.startswith("not") is synchronised):
        assert check_age(work, newest, clock) == (NOW if now > NOW - 2 * DAY else newest)
        return
    with refused(code, round=3, issued=NOW):
        check_age(work, newest, clock)


def run(state: Path, data: Path) -> int:
    options = RunOptions(data=str(data), state=state)
    return round_loop.run(options, train=train_vector, patience_s=20, sleep=lambda seconds: None)


def other_weights(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("state") == "train":
        answer["files"][0]["sha256"] = "0" * 64
    return answer


def without_signature(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"signature": ""} if answer.get("state") == "train" else answer


@pytest.mark.parametrize("alter", [other_weights, without_signature])
def test_altered_work_is_not_trained(tmp_path: Path, alter: Alter) -> None:
    with running(configured(tmp_path / "c", ONE)) as server:
        with in_between(server.url, alter) as url:
            join(url, full_token(server.config, "board"), "one", tmp_path / "one")
            with refused("trust.forged-work", round=1):
                run(tmp_path / "one", server.config.held_out)
        assert not DeviceState(tmp_path / "one").update.exists()


WORDS = """title = "Ripe or not"
purpose = "Tells ripe tomatoes from unripe ones"
contact = "Ada, ada@example.org"
"""


def test_join_says_what_the_federation_is(tmp_path: Path) -> None:
    lines = [
        "Federation: Ripe or not",
        "Purpose: Tells ripe tomatoes from unripe ones",
        "Contact: Ada, ada@example.org",
    ]
    with running(configured(tmp_path / "c", WORDS + ONE)) as server:
        given = full_token(server.config, "board")
        client = CoordinatorClient(server.url, split_token(given)[0])
        with logged() as said:
            join(server.url, given, "one", tmp_path / "one")
        assert said[: len(lines)] == lines
        work = task(joined(server, tmp_path / "one"))
        size = {offer.name: offer.size for offer in work.files}
        told = client.invitation()
        assert told is not None
        sent = 4 * SIZE
        again = size["manifest.json"] + size["weights.safetensors"] + sent
        assert (told.first_bytes, told.round_bytes) == (again + size["train.onnx"], again)
        assert (told.rounds, told.round_s) == (3, 600)
        with refused("join.unknown-token"):
            CoordinatorClient(server.url, "guess")._ask("GET", "/invitation", Invitation)


@pytest.mark.parametrize(
    ("change", "code"),
    [({"contact": "eve@example.org"}, "trust.forged-invitation"), ({"key": ""}, "trust.other-key")],
)
def test_altered_words_of_a_federation_are_refused(
    tmp_path: Path, change: dict[str, str], code: str
) -> None:
    def alter(answer: dict[str, Any]) -> dict[str, Any]:
        return answer | change if "title" in answer else answer

    with (
        running(configured(tmp_path / "c", WORDS + ONE)) as server,
        in_between(server.url, alter) as url,
        refused(code),
    ):
        join(url, full_token(server.config, "board"), "one", tmp_path / "one")


@pytest.mark.parametrize("title", ["two\nlines", "x" * 501])
def test_a_federation_describes_itself_in_short_lines(tmp_path: Path, title: str) -> None:
    with pytest.raises(InputError, match="title"):
        configured(tmp_path, f"title = {json.dumps(title)}\n{ONE}")


def test_old_work_is_not_trained_again(tmp_path: Path) -> None:
    first: list[dict[str, Any]] = []

    def repeat_first(answer: dict[str, Any]) -> dict[str, Any]:
        if answer.get("state") == "train":
            first.append(answer)
            return first[0]
        return answer

    config = configured(tmp_path / "c", ONE)
    with running(config) as server, in_between(server.url, repeat_first) as url:
        join(url, full_token(server.config, "board"), "one", tmp_path / "one")
        begun = time.time()
        # A minute passes between two polls, so that the repeated work is older than the real one.
        server.coordinator.wall_clock = lambda: begun + 60 * len(first)
        state = DeviceState(tmp_path / "one")
        key = state.member().key
        assert key is not None
        client = CoordinatorClient(server.url, state.member().secret)
        while client.work().state != "train":
            time.sleep(0.05)
        first.append({})
        state.check_work(client.work(), key)
        first.clear()
        with refused("trust.old-work", round=1):
            run(tmp_path / "one", config.held_out)


def test_the_token_names_the_coordinator(tmp_path: Path) -> None:
    with (
        running(configured(tmp_path / "c", ONE)) as server,
        running(configured(tmp_path / "other", ONE)) as stranger,
    ):
        known = server.coordinator.key.fingerprint
        given = f"{token(stranger.config, 'board')}.{known}"
        with refused("trust.other-key", url=stranger.url):
            join(stranger.url, given, "one", tmp_path / "one")
        assert DeviceState(tmp_path / "one").identity() is None


def test_a_key_stays_over_restarts_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        before, given = server.coordinator.key.public, full_token(server.config, "board")
    with running(config) as server:
        assert server.coordinator.key.public == before
        assert full_token(server.config, "board") == given
    path = config.state / "coordinator.key"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("no key")
    with refused("state.damaged-coordinator-key", path=str(path)), running(config):
        pass
