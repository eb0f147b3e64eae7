"""What a device with secure sums sends to a coordinator that lies, and what it never sends."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.identity.state_folder import Identity
from device_agent.federation.identity.trusted_key import TrustedKey
from device_agent.federation.polling import LONGEST_ASKED_S, SHORTEST_S
from device_agent.federation.run_options import RunOptions
from device_agent.federation.secure_sending import NEW_TERMS_S, SecureSending
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.manifest import TensorEntry
from device_agent.formats.protocol.problems import UNSIGNED_KEYS, Problem
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.secure_sums import (
    SecureKeys,
    SecureMember,
    SecureShares,
    SecureStep,
    SecureTerms,
    SumPrivacy,
)
from device_agent.formats.update import UpdateRecord, write_update
from device_agent.privacy.secret_sharer import SecretSharer
from device_agent.training.batching import round_seed
from device_agent.training.training_options import TrainingOptions
from refusals import refused
from release_offers import KEY

ROUND, BUNDLE, DEVICE = 3, "ab" * 32, "board-1"
TERMS = SecureTerms(fewest=3, most_change=1.0, most_samples=100)
WORK = Work(state="train", round=ROUND, secure=TERMS)


class Lying:
    """A coordinator with two devices of its own, which asks for `steps` one after another."""

    def __init__(self, *steps: str | float) -> None:
        self.steps, self.sent, self.tensors = list(steps), [], list[bytes]()
        self._shares: dict[str, str] = {}
        self._members: list[SecureMember] = []

    def send_to_sum(self, round_: int, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, SecureKeys):
            self._new_group(message)

    def _new_group(self, keys: SecureKeys) -> None:
        own = {name: DeviceKey.new() for name in ("invented-1", "invented-2")}
        sharers = {
            name: SecretSharer(name, key.signature, key.public, ROUND, BUNDLE, TERMS)
            for name, key in own.items()
        }
        self._members = [SecureMember(device=DEVICE, key=self.key, keys=keys)] + [
            SecureMember(device=name, key=own[name].public, keys=sharer.keys)
            for name, sharer in sharers.items()
        ]
        self._shares = {n: s.shares(self._members)[DEVICE] for n, s in sharers.items()}

    def secure_step(self, round_: int) -> SecureStep:
        step: Any = self.steps.pop(0)
        if isinstance(step, float):
            return SecureStep(step="wait", round=round_, ask_again_s=step)
        return SecureStep(
            step=step,
            round=round_,
            members=self._members if step == "shares" else [],
            signature=KEY.group_signature(round_, self._members),
            shares=self._shares if step == "input" else {},
            present=[member.device for member in self._members],
        )

    def send_tensors(self, round_: int, path: Path) -> None:
        self.tensors.append(path.read_bytes())

    key = ""


def device(folder: Path) -> DeviceState:
    """A device that has trained BUNDLE."""
    state, key = DeviceState(folder), DeviceKey.new()
    state.key.write_bytes(key.pem())
    state.remember(
        Identity(
            url="http://x", device=DEVICE, secret="s", name="n", submodel="full", key=KEY.public
        )
    )
    state.bundle.mkdir()
    save_file({"w": np.zeros(4, np.float32)}, state.bundle / "weights.safetensors")
    train(state)
    Lying.key = key.public
    return state


def train(state: DeviceState) -> None:
    table = (TensorEntry(name="w", role="parameter", dtype="float32", shape=(4,)),)
    record = UpdateRecord(
        bundle=BUNDLE,
        base="b",
        submodel="full",
        samples=7,
        steps=1,
        loss_first=2.0,
        loss_last=1.0,
        tensors=table,
        file=fingerprint(b""),
    )
    write_update(state.update, record, {"w": np.full(4, 0.5, np.float32)})


def send(
    state: DeviceState, coordinator: Lying, rest: Callable[[float], None] = lambda seconds: None
) -> bool:
    client = cast(CoordinatorClient, coordinator)
    key = TrustedKey(state, client)
    return SecureSending(state, client, key, rest, 1).add(WORK)


def test_an_update_is_behind_masks_once(tmp_path: Path) -> None:
    """A coordinator that repeats a sum with other devices does not get the same update again."""
    state = device(tmp_path)
    coordinator = Lying("shares", "input", "again", "shares", "input")
    assert not send(state, coordinator)
    assert len(coordinator.tensors) == 1
    assert coordinator.steps == ["shares", "input"]  # it has not taken part in another attempt
    assert state.trained(BUNDLE) is None
    assert [state.secure_promise.masked_updates(number) for number in (ROUND, ROUND + 1)] == [1, 0]
    train(state)
    assert not send(state, Lying("shares", "input", "over"))
    assert DeviceState(tmp_path).secure_promise.masked_updates(ROUND) == 2


def test_a_coordinator_cannot_choose_any_wait(tmp_path: Path) -> None:
    waits: list[float] = []
    assert not send(device(tmp_path), Lying(1e-3, -5.0, 0.0, 1e300, "over"), waits.append)
    assert waits == [1e-3, SHORTEST_S, 2 * SHORTEST_S, LONGEST_ASKED_S]


def test_keys_for_other_terms_than_the_coordinator_has_now(tmp_path: Path) -> None:
    """A coordinator was restarted with other terms in an open round. The update is still whole."""
    state, coordinator, waits = device(tmp_path), Lying("shares", "input", "over"), list[float]()
    take = coordinator.send_to_sum

    def refuse(round_: int, message: SecureKeys) -> None:
        coordinator.send_to_sum = take  # type: ignore[method-assign]
        raise RefusedError(Problem(code=UNSIGNED_KEYS, message="These keys cannot be used."))

    coordinator.send_to_sum = refuse  # type: ignore[method-assign]
    assert not send(state, coordinator, waits.append)
    assert waits == [NEW_TERMS_S]
    assert state.trained(BUNDLE) is not None
    send(state, coordinator)
    assert len(coordinator.tensors) == 1


def test_an_update_that_was_not_sent_is_used_in_the_next_attempt(tmp_path: Path) -> None:
    state, coordinator = device(tmp_path), Lying("shares", "again", "shares", "input", "over")
    send(state, coordinator)
    assert len(coordinator.tensors) == 1
    keys = [sent for sent in coordinator.sent if isinstance(sent, SecureKeys)]
    assert len({key.mask_key for key in keys}) == 2
    assert sum(isinstance(sent, SecureShares) for sent in coordinator.sent) == 2


def test_a_device_that_is_killed_while_it_sends_trains_again(tmp_path: Path) -> None:
    state, coordinator = device(tmp_path), Lying("shares", "input")

    def killed(round_: int, path: Path) -> None:
        raise KeyboardInterrupt

    coordinator.send_tensors = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        send(state, coordinator)
    assert DeviceState(tmp_path).trained(BUNDLE) is None
    assert not state.masked.exists()


def test_a_training_depends_on_nothing_that_other_devices_may_have_been_told_otherwise(
    tmp_path: Path,
) -> None:
    state = device(tmp_path)
    asked = EvaluationRequest(share=0.9)
    plain = Work(state="train", round=ROUND, evaluation=asked, budget_s=0.1)
    secure = Work(state="train", round=ROUND, evaluation=asked, budget_s=0.1, secure=TERMS)
    options = RunOptions(data="x.npz", state=tmp_path, training=TrainingOptions(seed=5))
    found = options.for_round(plain, 0)
    assert (found.evaluation, found.budget_s) == (asked, 0.1)
    first = options.for_round(secure, state.secure_promise.masked_updates(ROUND))
    assert (first.evaluation, first.budget_s, first.seed) == (asked, None, found.seed)
    state.use_up_update(ROUND)
    again = options.for_round(secure, state.secure_promise.masked_updates(ROUND))
    assert again.seed not in (first.seed, round_seed(5, ROUND + 1))


def test_a_device_with_secure_sums_judges_no_model(tmp_path: Path) -> None:
    state = device(tmp_path)
    judge = Work(state="judge", round=ROUND)
    state.secure_promise.check_kept(judge)
    state.secure_promise.remember(TERMS)
    with refused("trust.single-figures", round=ROUND):
        state.secure_promise.check_kept(judge)


def test_a_device_takes_part_in_no_sum_with_less_noise(tmp_path: Path) -> None:
    state = device(tmp_path)

    def work(noise: float | None) -> Work:
        privacy = None if noise is None else SumPrivacy(clip=1.0, noise_multiplier=noise)
        return Work(state="train", round=ROUND, secure=replace(TERMS, privacy=privacy))

    state.secure_promise.check_kept(work(None))
    state.secure_promise.check_kept(work(1.5))
    for noise in (1.499, None):
        with refused("trust.less-noise", promised=1.5, noise=noise or 0.0):
            state.secure_promise.check_kept(work(noise))
    state.secure_promise.check_kept(work(2.0))
    state.secure_promise.check_kept(work(1.5))
    for damaged in ("", "nan", "\0"):
        (tmp_path / "noise-of-sums").write_text(damaged)
        with refused("state.unreadable-noise"):
            state.secure_promise.check_kept(work(1.5))
