"""Masks for SecAgg+ from long seeds, so that nobody can try all seeds.

Flower 1.41 reduces the seed of a mask to 32 bits (28 bits for a key that two sites share). Flower
draws the mask from a Mersenne Twister (https://github.com/flwrlabs/flower/issues/7522). An attacker
who tries all seeds can remove the masks. Here the whole seed gives the key of a stream cipher.
"""

from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from math import prod

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

USERS = (
    "flwr.client.mod.secure_aggregation.secaggplus_mod",
    "flwr.server.workflow.secure_aggregation.secaggplus_workflow",
)
"""Flower's modules that draw masks: at a site, and on the server."""


def draw_masks(
    seed: bytes, num_range: int, dimensions_list: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """Draw arrays of whole numbers from 0 to below `num_range`.

    The numbers come from the key stream of ChaCha20 (RFC 8439), 32 bits each. The key is the
    SHA-256 of the seed. No nonce is needed: SecAgg+ makes new seeds for every round.

    Args:
        seed: The secret.
        num_range: A power of two up to 2^32.
        dimensions_list: The shapes of the arrays.

    Examples:
        >>> [array.shape for array in draw_masks(b"secret", 2**32, [(2, 3), ()])]
        [(2, 3), ()]
    """
    sizes = [prod(shape) for shape in dimensions_list]
    stream = Cipher(ChaCha20(sha256(seed).digest(), bytes(16)), mode=None).encryptor()
    numbers = np.frombuffer(stream.update(bytes(4 * sum(sizes))), dtype="<u4") & (num_range - 1)
    parts = np.split(numbers.astype(np.int64), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, dimensions_list, strict=True)]


def use_own_masks() -> None:
    """Make Flower's SecAgg+ draw its masks with `draw_masks` in this process.

    Raises AttributeError if this version of Flower draws masks with another function.
    """
    for name in USERS:
        module = import_module(name)
        _ = module.pseudo_rand_gen
        module.pseudo_rand_gen = draw_masks  # type: ignore[attr-defined]
