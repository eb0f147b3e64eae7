import numpy as np

from device_agent.privacy import masks


def test_the_mask_is_the_published_key_stream() -> None:
    """RFC 8439, appendix A.1, test vectors 1 and 2: zero key and nonce, blocks 0 and 1."""
    stream = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    vector = np.zeros(32, np.uint32)
    masks.add_mask(vector, bytes(32))
    assert vector.astype("<u4").tobytes().hex() == stream


def test_two_devices_agree_on_a_mask_for_their_group_only() -> None:
    alice, bob = masks.new_private_key(), masks.new_private_key()
    one = masks.pair_mask_key(alice, masks.public_key(bob), b"context")
    assert one == masks.pair_mask_key(bob, masks.public_key(alice), b"context")
    assert one != masks.pair_mask_key(bob, masks.public_key(alice), b"another")


def test_a_mask_in_pieces_is_the_same_and_can_be_removed(monkeypatch) -> None:
    key, draw = bytes(range(32)), np.random.default_rng(0)
    values = draw.integers(2**32, size=1000, dtype=np.uint32)
    whole, pieces = values.copy(), values.copy()
    masks.add_mask(whole, key)
    monkeypatch.setattr(masks, "PIECE", 64)
    masks.add_mask(pieces, key)
    assert np.array_equal(whole, pieces)
    masks.add_mask(pieces, key, subtract=True)
    assert np.array_equal(pieces, values)


def test_a_sealed_share_opens_only_for_its_receiver_and_group() -> None:
    sender, receiver, other = (masks.new_private_key() for _ in range(3))
    content = masks.sealed(sender, masks.public_key(receiver), b"group", "a\nb", b"share")
    public = masks.public_key(sender)
    assert masks.opened(receiver, public, b"group", "a\nb", content) == b"share"
    assert masks.opened(other, public, b"group", "a\nb", content) is None
    assert masks.opened(receiver, public, b"another", "a\nb", content) is None
    assert masks.opened(receiver, public, b"group", "b\na", content) is None
    assert masks.opened(receiver, public, b"group", "a\nb", content[:-1] + b"?") is None


def test_keys_of_small_order_are_not_usable() -> None:
    assert masks.is_usable(masks.public_key(masks.new_private_key()))
    assert not masks.is_usable(bytes(32))
    assert not masks.is_usable(b"\1" + bytes(31))
    assert not masks.is_usable(b"short")
