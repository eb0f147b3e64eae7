"""The keys of one attempt at a sum, and the masks that are computed from these keys.

Two devices agree on a secret by X25519 (RFC 7748). From the secret, HKDF with SHA-256 (RFC 5869)
makes two keys. The first key is for ChaCha20 (RFC 8439), whose key stream is the mask. The second
key is for ChaCha20-Poly1305, which encrypts a share. Each key is used only one time, so the nonces
are zero.
"""

from collections.abc import Iterator

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
PIECE = 1 << 18
"""Elements of a mask that are in memory at a time."""
_MASK, _OWN_MASK, _SHARE = b"edgetailor-mask-1", b"edgetailor-own-mask-1", b"edgetailor-share-1\n"
_NONCE = bytes(12)


def new_private_key() -> bytes:
    """A new private key of X25519: 32 raw bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of `private`: 32 raw bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_usable(public: bytes) -> bool:
    """Whether `public` is a public key with which two devices can agree on a secret.

    A key of small order gives the same result with every private key, so it is not usable.
    """
    try:
        _agreed(b"\1" * KEY_BYTES, public)
    except ValueError:
        return False
    return True


def pair_mask_key(private: bytes, public: bytes, context: bytes) -> bytes:
    """The key of the mask that two devices share."""
    return _derived(_agreed(private, public), context, _MASK)


def own_mask_key(seed: bytes, context: bytes) -> bytes:
    """The key of the mask that only one device adds."""
    return _derived(seed, context, _OWN_MASK)


def sealed(private: bytes, public: bytes, context: bytes, way: str, content: bytes) -> bytes:
    """Encrypt `content` for the holder of `public`. `way` names the sender and the receiver."""
    return _share_cipher(private, public, context, way).encrypt(_NONCE, content, context)


def opened(private: bytes, public: bytes, context: bytes, way: str, content: bytes) -> bytes | None:
    """Decrypt a result of `sealed`. Returns None if the content or another argument differs."""
    try:
        return _share_cipher(private, public, context, way).decrypt(_NONCE, content, context)
    except (InvalidTag, ValueError):
        return None


def add_mask(vector: np.ndarray, key: bytes, *, subtract: bool = False) -> None:
    """Add the mask of `key` to `vector`, in place and modulo 2^32.

    Args:
        vector: Shape (elements,), uint32.
        key: 32 bytes.
        subtract: Subtract the mask instead of adding it.
    """
    for start, mask in _stream(key, len(vector)):
        part = vector[start : start + len(mask)]
        (np.subtract if subtract else np.add)(part, mask, out=part)


def _stream(key: bytes, elements: int) -> Iterator[tuple[int, np.ndarray]]:
    """The first `elements` numbers of the key stream, in pieces, each with its first position."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros = bytes(4 * min(PIECE, elements))
    for start in range(0, elements, PIECE):
        size = min(PIECE, elements - start)
        yield start, np.frombuffer(cipher.update(zeros[: 4 * size]), dtype="<u4")


def _share_cipher(private: bytes, public: bytes, context: bytes, way: str) -> ChaCha20Poly1305:
    key = _derived(_agreed(private, public), context, _SHARE + way.encode())
    return ChaCha20Poly1305(key)


def _agreed(private: bytes, public: bytes) -> bytes:
    own = X25519PrivateKey.from_private_bytes(private)
    return own.exchange(X25519PublicKey.from_public_bytes(public))


def _derived(secret: bytes, context: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=context, info=info).derive(secret)
