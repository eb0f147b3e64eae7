"""The sum of a group against numpy's, with losses at each step, and a coordinator that lies."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.formats.protocol.secure_sums import SecureMember, Step, keys_text, present_text
from device_agent.privacy import secure_group
from device_agent.privacy.secret_sharer import SecretSharer
from profiles.errors import UpdateError
from refusals import refused
from secure_groups import BUNDLE, ROUND, Group, a_fifth, drawn, plain_sum

STEPS: tuple[Step, ...] = ("shares", "input", "confirm", "unmask")


@pytest.fixture
def draw() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("devices", [3, 4, 30])
def test_the_sum_is_that_of_numpy(devices: int, draw: np.random.Generator) -> None:
    vectors = drawn(devices, draw)
    assert np.array_equal(Group(vectors).run(), plain_sum(vectors, vectors))


@pytest.mark.parametrize("step", STEPS)
def test_a_fifth_is_lost_at_a_step(step: Step, draw: np.random.Generator) -> None:
    vectors = drawn(10, draw)
    lost, group = a_fifth(vectors, draw), Group(vectors)
    total = group.run({step: lost})
    # A device that is lost after its update has come is in the sum.
    inside = vectors.keys() - set(lost) if step in ("shares", "input") else vectors.keys()
    assert group.sum.present == sorted(inside)
    assert np.array_equal(total, plain_sum(vectors, inside))
    assert group.sum.lost == dict.fromkeys(lost, step)


def test_two_fifths_may_be_lost_in_total(draw: np.random.Generator) -> None:
    vectors = drawn(30, draw)
    order = list(draw.permutation(sorted(vectors)))
    lost: dict[Step, Collection[str]] = {
        "shares": order[:6], "input": order[6:10], "confirm": order[10:11], "unmask": order[11:12],
    }  # fmt: skip
    inside = vectors.keys() - set(order[:10])
    assert np.array_equal(Group(vectors).run(lost), plain_sum(vectors, inside))


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_nothing_is_revealed(step: Step, draw: np.random.Generator) -> None:
    """The attempt ends. What the coordinator holds then is masked: no sum of inputs is plain."""
    vectors = drawn(10, draw)
    group = Group(vectors)
    gone = sorted(vectors)[:5]
    for earlier in STEPS[: STEPS.index(step)]:
        group.answer(earlier)
    with refused("update.too-few-in-sum"):
        group.answer(step, gone)
    if group.inputs:
        found = np.sum(list(group.inputs.values()), axis=0, dtype=np.uint32)
        assert not np.array_equal(found, plain_sum(vectors, group.inputs))
        group.sum.present = sorted(group.inputs)
        with pytest.raises(UpdateError):  # too few shares of each secret have come
            group.total()
    # The devices repeat the sum with new keys.
    assert np.array_equal(Group(vectors).run(), plain_sum(vectors, vectors))


def test_a_sparse_graph_gives_the_same_sum(
    draw: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_group, "MOST_NEIGHBOURS", 12)
    vectors = drawn(30, draw)
    group = Group(vectors)
    for device in vectors:
        near = group.sum.group.neighbours(device)
        assert len(near) == 12
        assert all(device in group.sum.group.neighbours(other) for other in near)
    lost = sorted(vectors)[:3]
    total = group.run({"input": lost})
    assert np.array_equal(total, plain_sum(vectors, vectors.keys() - set(lost)))


def test_masked_inputs_look_random(draw: np.random.Generator) -> None:
    """Zeros are sent as numbers whose bytes are uniform: chi-square over 256 values."""
    vectors = {f"d{number}": np.zeros(50_000, np.uint32) for number in range(3)}
    group = Group(vectors)
    group.answer("shares")
    group.answer("input")
    for sent in group.inputs.values():
        found = np.bincount(sent.view(np.uint8), minlength=256)
        expected = sent.nbytes / 256
        # 255 degrees of freedom: mean 255, standard deviation 23.
        assert ((found - expected) ** 2 / expected).sum() < 255 + 6 * 23


def test_a_wrong_share_of_a_key_ends_the_attempt(draw: np.random.Generator) -> None:
    vectors = drawn(5, draw)
    group = Group(vectors)
    group.answer("shares")
    group.answer("input", ["device-0"])
    group.answer("confirm", ["device-0"])
    group.answer("unmask")
    given = group.sum._unmaskings["device-1"]
    bad = replace(given, keys={"device-0": secure_group.text_of(bytes(32))})
    group.sum._unmaskings["device-1"] = bad
    with refused("update.wrong-shares"):
        group.total()


def lying(ask: Callable[[Group], object], draw: np.random.Generator, reason: str) -> None:
    with refused("trust.unsafe-sum", why=reason):
        ask(Group(drawn(5, draw), fewest=4))


def test_a_group_that_is_not_what_the_devices_signed(draw: np.random.Generator) -> None:
    def first(group: Group, members: list[SecureMember]) -> object:
        return group.sharers["device-0"].shares(members)

    def with_member(group: Group, number: int, member: SecureMember) -> object:
        members = group.members.copy()
        members[number] = member
        return first(group, members)

    lying(lambda g: first(g, g.members[:3]), draw, "the group has 3 devices, but it needs 4")
    missing = "the keys of this device are missing from the group, or were changed"
    lying(lambda g: first(g, g.members[1:]), draw, missing)
    other = DeviceKey.new()
    lying(lambda g: with_member(g, 0, replace(g.members[0], key=other.public)), draw, missing)
    twice = "the group has a device or a key twice"
    lying(lambda g: first(g, [*g.members, g.members[1]]), draw, twice)

    def with_keys_of_the_coordinator(group: Group) -> object:
        """It puts own keys in the place of a device's, under the device's signature."""
        mine = Group(drawn(3, draw)).members[0].keys
        theirs = group.members[1]
        keys = replace(mine, signature=theirs.keys.signature)
        return with_member(group, 1, replace(theirs, keys=keys))

    unsigned = (
        "device-1 has not signed its keys for this round, bundle and terms, "
        "or these keys cannot be used"
    )
    lying(with_keys_of_the_coordinator, draw, unsigned)

    def with_a_key_of_small_order(group: Group) -> object:
        bad = secure_group.text_of(bytes(32))
        share_key = group.members[1].keys.share_key
        signature = other.signature(keys_text(ROUND, BUNDLE, group.terms, 0.0, bad, share_key))
        keys = replace(group.members[1].keys, mask_key=bad, signature=signature)
        member = SecureMember(device="device-1", key=other.public, keys=keys)
        return with_member(group, 1, member)

    lying(with_a_key_of_small_order, draw, unsigned)


@pytest.mark.parametrize(
    ("change", "apart"),
    [({"most_change": 1e6}, 0.0), ({"most_samples": 10**6}, 0.0), ({"fewest": 3}, 0.0), ({}, 0.9)],
)
def test_devices_that_were_told_other_terms_are_in_no_sum(
    change: dict[str, Any], apart: float, draw: np.random.Generator
) -> None:
    """With a huge `most_change` of all others, the sum would be the update of one device."""
    group, key = Group(drawn(5, draw), fewest=4), DeviceKey.new()
    terms = replace(group.terms, **change)
    told = SecretSharer("device-1", key.signature, key.public, ROUND, BUNDLE, terms, apart)
    members = group.members.copy()
    members[1] = SecureMember(device="device-1", key=key.public, keys=told.keys)
    with refused("trust.unsafe-sum"):
        group.sharers["device-0"].shares(members)
    with refused("trust.unsafe-sum"):
        told.shares(members)


def test_devices_that_were_told_different_groups_share_nothing(draw: np.random.Generator) -> None:
    group = Group(drawn(5, draw))
    sent = group.sharers["device-1"].shares(group.members[:4])["device-0"]
    group.sharers["device-0"].shares(group.members)
    with refused("trust.unsafe-sum"):
        group.sharers["device-0"].masked({"device-1": sent}, np.zeros(4, np.uint32))


def test_both_shares_of_a_device_are_never_given(draw: np.random.Generator) -> None:
    """The coordinator says to some that a device has dropped out, and to others that it has not."""
    vectors = drawn(5, draw)
    group = Group(vectors)
    group.answer("shares")
    group.answer("input")
    truth = group.sum.present
    lie = truth[:-1]
    confirmed = {d: group.sharers[d].confirmed(truth if d < "device-2" else lie) for d in truth[:4]}
    for device in truth[:4]:
        told = truth if device < "device-2" else lie
        with refused(
            "trust.unsafe-sum",
            why="only 2 devices of the group have confirmed the same sum, but 3 are needed",
        ):
            group.sharers[device].unmasking(told, confirmed)
        with refused(
            "trust.unsafe-sum",
            why="it asked for shares for another sum than the one that the devices have confirmed",
        ):
            group.sharers[device].unmasking(lie if told == truth else truth, confirmed)
        with refused("trust.unsafe-sum", why="it named other devices in the sum than before"):
            group.sharers[device].confirmed(lie if told == truth else truth)
    with refused("trust.unsafe-sum", why="the sum leaves out the update that this device has sent"):
        group.sharers[truth[4]].confirmed(lie)


def test_what_a_device_gives_has_one_secret_of_each_device(draw: np.random.Generator) -> None:
    group = Group(drawn(6, draw))
    group.run({"input": ["device-5"]})
    for given in group.sum._unmaskings.values():
        assert given.seeds.keys() == {f"device-{number}" for number in range(5)}
        assert given.keys.keys() == {"device-5"}


def test_a_sum_of_too_few_and_requests_out_of_order(draw: np.random.Generator) -> None:
    group = Group(drawn(5, draw), fewest=4)
    first = group.sharers["device-0"]
    with refused("trust.unsafe-sum"):
        first.masked({}, np.zeros(4, np.uint32))
    group.answer("shares")
    with refused("trust.unsafe-sum"):
        first.shares(group.members)
    with refused("trust.unsafe-sum"):
        first.confirmed(["device-0", "device-1", "device-2", "device-3"])
    with refused("trust.unsafe-sum"):  # only two others hold its shares
        few = dict(list(group.sum.step_of("device-0").shares.items())[:1])
        first.masked(few, np.zeros(4, np.uint32))
    group.answer("input")
    with refused("trust.unsafe-sum"):
        first.masked(group.sum._shares["device-0"], np.zeros(4, np.uint32))
    with refused("trust.unsafe-sum"):
        first.confirmed(["device-0", "device-1", "device-2"])
    with refused("trust.unsafe-sum"):
        first.confirmed(["device-0", "device-1", "device-2", "stranger"])


def test_a_signature_of_another_group_confirms_nothing(draw: np.random.Generator) -> None:
    one, other = Group(drawn(4, draw)), Group(drawn(4, draw))
    for group in (one, other):
        group.answer("shares")
        group.answer("input")
    present = one.sum.present
    signed = other.sharers["device-0"].confirmed(present)
    assert not one.sum.take_confirmation("device-0", signed)
    text = present_text(one.sum.group.context, present)
    assert not one.sum.take_confirmation("device-0", DeviceKey.new().signature(text))
