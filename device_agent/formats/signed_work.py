"""The coordinator's signatures of messages, so that nobody in between can replace a message.

A device gets the coordinator's public key when it joins, and stores the key. The join token may end
in a dot and the key's fingerprint. Then only this coordinator can answer the join.
"""

import base64
import hashlib
import re

from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.protocol.joining import Invitation
from device_agent.formats.protocol.key_changes import KeyChange
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.secure_sums import (
    SecureStep,
    SecureTerms,
    group_text,
    terms_line,
)
from profiles.errors import TrustError

FORGED_WORK, FORGED_RELEASE = "trust.forged-work", "trust.forged-release"
"""Codes of messages that another key has signed."""
_WITH_FINGERPRINT = re.compile(r"(.+)\.([A-Za-z0-9_-]{22})")


def work_text(work: Work) -> bytes:
    """The text of `work` that is signed.

    Examples:
        >>> work_text(Work(state="train", round=3, submodel="full", issued=1800000000))
        b'edgetailor-work-1\\n1800000000\\n3\\nfull\\n'
    """
    # Because of the first line, a signature of another message cannot be used for work.
    lines = ["edgetailor-work-1", str(work.issued), str(work.round), work.submodel]
    lines += [f"{offer.sha256} {offer.size} {offer.name}" for offer in work.files]
    lines += _evaluation_lines(work.evaluation)
    lines += ["judge"] if work.state == "judge" else []
    lines += _secure_lines(work.secure)
    return "".join(f"{line}\n" for line in lines).encode()


def invitation_text(invitation: Invitation) -> bytes:
    """The text of `invitation` that is signed.

    Examples:
        >>> invitation_text(Invitation(title="Leaves", rounds=3, round_s=600))
        b'edgetailor-invitation-1\\nLeaves\\n\\n\\n3\\n600\\n0\\n0\\n'
    """
    said = (invitation.title, invitation.purpose, invitation.contact)
    numbers = (invitation.rounds, int(invitation.round_s))
    lines = ["edgetailor-invitation-1", *said, *map(str, numbers)]
    lines += [str(invitation.first_bytes), str(invitation.round_bytes)]
    lines += _evaluation_lines(invitation.evaluation) + _secure_lines(invitation.secure)
    return "".join(f"{line}\n" for line in lines).encode()


def _evaluation_lines(request: EvaluationRequest | None) -> list[str]:
    """The signed line of `request`.

    If there is no request, there is no line, as in earlier versions.
    """
    if request is None:
        return []
    # In millionths: programs in other languages format a fraction differently.
    by_class = " by class" if request.by_class else ""
    return [f"evaluation {round(request.share * 1e6)}{by_class}"]


def _secure_lines(terms: SecureTerms | None) -> list[str]:
    """The signed line of `terms`; none if there are no secure sums."""
    return [] if terms is None else [terms_line(terms)]


def card_text(card: bytes) -> bytes:
    """The text that is signed for a model card. `card` is the content of `card.json`."""
    return b"edgetailor-card-1\n" + card


def release_text(offer: ReleaseOffer) -> bytes:
    """The text of `offer` that is signed.

    Examples:
        >>> release_text(ReleaseOffer(number=2, round=12, issued=1800000000))
        b'edgetailor-release-1\\n1800000000\\n2\\n12\\nforward\\n'
    """
    lines = ["edgetailor-release-1", str(offer.issued), str(offer.number), str(offer.round)]
    lines.append("back" if offer.back else "forward")
    lines += [f"{file.sha256} {file.size} {file.name}" for file in offer.files]
    lines += _evaluation_lines(offer.evaluation)
    if offer.fine_tune:
        lines.append(f"fine-tune {offer.fine_tune}")
        lines += [f"{file.sha256} {file.size} {file.name}" for file in offer.training]
    return "".join(f"{line}\n" for line in lines).encode()


def key_change_text(change: KeyChange) -> bytes:
    """The text of `change` that is signed with the old key.

    Examples:
        >>> key_change_text(KeyChange(old="A", new="B", made=1800000000, until=1802592000))
        b'edgetailor-key-1\\nA\\nB\\n1800000000\\n1802592000\\n'
    """
    lines = ["edgetailor-key-1", change.old, change.new, str(change.made), str(change.until)]
    return "".join(f"{line}\n" for line in lines).encode()


def key_fingerprint(key: str) -> str:
    """The first 16 bytes of a public key's SHA-256, in URL-safe base64 without padding."""
    digest = hashlib.sha256(from_base64(key)).digest()[:16]
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def split_token(given: str) -> tuple[str, str | None]:
    """Split a token into the part before the dot, which is sent, and the fingerprint after the dot.

    If the token has no fingerprint, the second value is None.

    Examples:
        >>> split_token("abc." + "f" * 22)[0], split_token("abc")
        ('abc', ('abc', None))
    """
    matched = _WITH_FINGERPRINT.fullmatch(given)
    return (matched[1], matched[2]) if matched else (given, None)


def check_key(key: str, fingerprint: str | None, url: str) -> None:
    """Raise TrustError unless `key`, from the answer to a join, has the token's `fingerprint`."""
    if fingerprint is not None and (not key or key_fingerprint(key) != fingerprint):
        raise TrustError(
            "{url} is not the coordinator that wrote this join token: its key differs from the "
            "token's. Ask the operator for a new token. If the operator has not changed the key, "
            "somebody between this device and the coordinator answers in its place.",
            code="trust.other-key",
            url=url,
        )


def check_invitation(invitation: Invitation, fingerprint: str | None, url: str) -> None:
    """Raise TrustError unless the key that the token names has signed `invitation`."""
    check_key(invitation.key, fingerprint, url)
    if not is_signed(invitation.key, invitation.signature, invitation_text(invitation)):
        raise TrustError(
            "The description of the federation at {url} is not signed by its coordinator: somebody "
            "in between has altered it. Use https.",
            code="trust.forged-invitation",
            url=url,
        )


def check_key_change(change: KeyChange, url: str) -> None:
    """Raise TrustError unless the old key of `change` has signed it."""
    if not is_signed(change.old, change.signature, key_change_text(change)):
        raise TrustError(
            "{url} sent a new key that is not signed with the coordinator's earlier key: somebody "
            "in between has altered it. Nothing was changed. Use https.",
            code="trust.forged-key",
            url=url,
        )


def check_signature(work: Work, key: str) -> None:
    """Raise TrustError unless the coordinator with the public `key` (base64) has signed `work`."""
    if not is_signed(key, work.signature, work_text(work)):
        raise TrustError(
            "The received work is not signed by the coordinator that this device has joined: "
            "somebody in between has altered it. Nothing was trained. Use https, or join again if "
            "the operator has a new key.",
            code=FORGED_WORK,
            round=work.round,
        )


def check_group(step: SecureStep, key: str) -> None:
    """Raise TrustError unless the coordinator with the public `key` has signed the group."""
    if not is_signed(key, step.signature, group_text(step.round, step.members)):
        raise TrustError(
            "The list of devices of a secure sum is not signed by the coordinator that this device "
            "has joined: somebody in between has altered it. Nothing was sent. Use https.",
            code=FORGED_WORK,
            round=step.round,
        )


def check_release(offer: ReleaseOffer, key: str) -> None:
    """Raise TrustError unless the coordinator with the public `key` (base64) has signed `offer`."""
    if not is_signed(key, offer.signature, release_text(offer)):
        raise TrustError(
            "The offer of release {number} is not signed by the coordinator that this device has "
            "joined: somebody in between has altered it. Nothing was changed. Use https.",
            code=FORGED_RELEASE,
            number=offer.number,
        )


def is_signed(key: str, signature: str, text: bytes) -> bool:
    """Whether `signature` of `text` was made by the owner of the public `key` (both in base64)."""
    # Imported here: `status` and `doctor` do not need this function.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(from_base64(key)).verify(from_base64(signature), text)
    except (InvalidSignature, ValueError):
        return False
    return True


def from_base64(text: str) -> bytes:
    """The bytes of base64 `text`. Malformed text gives no bytes, so later checks refuse it."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # not base64, or not ASCII
        return b""
