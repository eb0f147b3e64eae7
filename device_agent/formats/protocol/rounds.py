"""The work of a round, and the reports of a device about this work."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.manifest import Count
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.secure_sums import SecureTerms
from device_agent.formats.protocol.transfers import FileOffer

MOST_CHANNELS = 64
Finite = Annotated[float, Meta(ge=-3.5e38, le=3.5e38)]
"""A number that float32 can represent."""
DIVERGED = frozenset({"training.diverged", "update.diverged", "update.not-finite"})
"""Codes of a SubmodelFailure whose training diverged. If most devices of a round report such a
code, the model is the cause."""


@dataclass(frozen=True)
class InputSummary:
    """The 5%, 50% and 95% quantiles of each channel, with two digits.

    Channels are the first axis of a sample. If there are more than 64 channels, the quantiles are
    computed over all channels together.
    """

    channels: Annotated[tuple[tuple[Finite, Finite, Finite], ...], Meta(max_length=MOST_CHANNELS)]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The next task of a device: `train` the offered files for `round`, `wait`, or stop.

    After the last round, the coordinator asks each device that has sent counts to `judge` the last
    model one time: the device evaluates the offered files and sends a Judgement. It asks the
    devices of a committee to judge the new model of their round. This model is a `candidate`:
    nobody should use it before it is published. The signature does not cover the field `candidate`.

    The first round opens when `expected` devices have joined. `joined` devices have joined so far.
    In later rounds, `expected` and `joined` are 0. `issued` is the coordinator's time when it
    signed the work, in seconds since 1970. `signature` is the coordinator's signature of
    `signed_work.work_text`: raw Ed25519 in base64. A device that waits asks again after
    `ask_again_s` seconds. If this is 0, the device chooses the time. `inputs` summarises the
    coordinator's own samples. A device that gets `inputs` sends a summary of its own samples, and
    warns its owner if the two summaries differ much. The signature does not cover `inputs`, because
    nothing else depends on them. If `evaluation` is set, the update's record also has counts, see
    EvaluationRequest. A device that has nothing to train is offered a `release`, which has a
    separate signature.

    If `budget_s` is set, a training ends after the batch in which it has computed for this many
    seconds. Older agents ignore `budget_s`. The signature does not cover it, because an attacker
    who changes it can only shorten a training. If `ask_again_s` is positive after the last round,
    the device continues to ask for releases. `note` tells the owner why the device waits: an
    operator decided it, or the round already has enough updates. If `new_secret` is not empty, the
    operator wants the device to make a new secret: the device answers this challenge with a
    NewSecret. If `secure` is set, the device does not send its update but adds it to a secure sum,
    see `secure_sums.py`.
    """

    state: Literal["train", "wait", "judge", "finished"]
    round: int
    files: list[FileOffer] = field(default_factory=list)
    joined: int = 0
    expected: int = 0
    submodel: str = ""
    issued: int = 0
    signature: str = ""
    ask_again_s: float = 0
    inputs: InputSummary | None = None
    evaluation: EvaluationRequest | None = None
    release: ReleaseOffer | None = None
    budget_s: float | None = None
    note: str | None = None
    new_secret: str = ""
    secure: SecureTerms | None = None
    candidate: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The device's present activity, for the fleet's status. `note` is the reason for a pause."""

    state: Literal["downloading", "training", "evaluating", "uploading", "waiting", "paused"]
    loss: float | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The coordinator accepted the update for `round`."""

    round: int


@dataclass(frozen=True, kw_only=True)
class SubmodelFailure:
    """Training `submodel` failed `failures` times in a row. `reason` describes the last failure.

    `code` is the error code of the last failure, and `round` is its round. Older agents omit both
    fields.
    """

    submodel: str
    failures: Count
    reason: str
    round: Count = 0
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The device stops now. Until it asks for work again, no round waits for it.

    `code` and `reason` describe the error that ends the agent, without folder names. `round` is the
    round that the device worked on, or 0.
    """

    code: str
    reason: str
    round: Count = 0


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """From `round` on, the device gets the smaller `submodel`; None if no submodel is smaller."""

    submodel: str | None
    round: int
