"""Refusals of the coordinator: their form and the codes that agents act on."""

from dataclasses import dataclass

API = "/v1"
KEY_CHANGES = "/key-changes"
"""The route below API where devices ask for changes of the coordinator's key."""
JOIN_TOKEN = "client.join-token"
"""Code of the Problem (401) for a valid join token in a request that needs a device's secret."""
NOT_AUTHORISED = "client.not-authorised"
"""Code of the Problem (401) for an unknown token or secret."""
UNKNOWN_TOKEN = (
    "This join token is unknown here: give the content of one of the .token files that "
    "`edgetailor serve` names when it starts."
)
SKEWED_CLOCK = "join.skewed-clock"
"""Code of the Problem (403) for a join from a device whose clock differs from the coordinator's."""
USED_JOIN = "join.used-request"
"""Code of the Problem (403) for a join whose signature was already used."""
NEEDS_PROFILE = "join.needs-profile"
"""Code of the Problem for a join without `profile` if the coordinator plans for the device."""
NOTHING_FITS = "plan.nothing-fits"
"""Code of the Problem for a join if no submodel is within the device's budgets."""
PREPARING = "federation.preparing"
"""Code of the Problem (503, with Retry-After) while the coordinator is not ready for a request."""
ROUND_CLOSED = "round.closed"
"""Code of the Problem for an update that the round does not take from this device now."""
OTHER_BUNDLE = "round.other-bundle"
"""Code of the Problem for an update that was not trained from the offered bundle."""
UNSIGNED_KEYS = "round.unsigned-keys"
"""Code of the Problem (422) for keys of a secure sum that are not signed for this sum."""
ALREADY_SENT = "round.already-sent"
"""Code of the Problem for a second, different update for one round."""
NO_SUCH_FILE = "round.no-such-file"
"""Code of the Problem (404) for a file that is not offered to this device now."""
UPLOAD_OFFSET = "upload.other-offset"
"""Code of the Problem (409) for a part of an upload that does not follow the received bytes."""
UPLOAD_SUPERSEDED = "upload.superseded"
"""Code of the Problem (409) for an upload that a later request of the same device has ended."""
UPLOAD_ALTERED = "upload.altered"
"""Code of the Problem (409) for an upload whose content has another hash. It was discarded."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A refusal: a code for programs (see the reference of errors) and a sentence for people."""

    code: str
    message: str
