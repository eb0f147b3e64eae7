import itertools
import secrets

import pytest

from device_agent.privacy.shamir import joined_secret, split_secret


def test_published_vectors() -> None:
    """The test vectors of draft-mcgrew-tss-03, section 9.

    A share there begins with its point.
    """
    shares = {1: bytes.fromhex("b9fa07e185"), 2: bytes.fromhex("f5409b4511")}
    assert joined_secret(shares) == bytes.fromhex("7465737400")


def test_any_threshold_of_shares_gives_the_secret() -> None:
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(split_secret(secret, 3, 5), 1))
    for points in itertools.chain(
        itertools.combinations(shares, 3), itertools.combinations(shares, 5)
    ):
        assert joined_secret({point: shares[point] for point in points}) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """With all shares but one of a byte, each value of the last gives another secret."""
    shares = dict(enumerate(split_secret(b"x", 3, 255), 1))
    found = {joined_secret({1: shares[1], 200: shares[200], 7: bytes([v])}) for v in range(256)}
    assert len(found) == 256


def test_a_group_of_the_largest_size() -> None:
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(split_secret(secret, 61, 101), 1))
    assert joined_secret({point: shares[point] for point in range(41, 102)}) == secret
    with pytest.raises(ValueError, match="256 shares"):
        split_secret(secret, 3, 256)
