"""The protocol between agent and coordinator, version 1, as plain dataclasses.

The coordinator generates its OpenAPI page from these classes and the agent decodes into them, so
both sides always agree. All messages are JSON over HTTP, usable from a browser's `fetch`.

    GET  /v1/invitation              join token   -> Invitation
    POST /v1/devices                 join token   JoinRequest -> JoinReply
    GET  /v1/work                    secret       -> Work
    GET  /v1/files/{sha256}          secret       -> bytes of one file of the offered bundle
    POST /v1/progress                secret       Progress ->
    GET  /v1/rounds/{round}/tensors/{sha256}  secret  -> Upload
    PUT  /v1/rounds/{round}/tensors/{sha256}  secret  bytes of update.safetensors ->
    POST /v1/rounds/{round}/update   secret       update.json -> Receipt
    POST /v1/rounds/{round}/evaluation  secret    Judgement -> Receipt
    POST /v1/problems                secret       SubmodelFailure -> Fallback
    POST /v1/stopped                 secret       Stopped ->
    POST /v1/releases/{number}       secret       ReleaseReport ->
    POST /v1/leave                   secret       ->
    GET  /v1/status                  secret or operator token -> Status

An interrupted transfer can continue. A GET of a file takes `Range: bytes=N-` with the file's hash
as `If-Range`. Before a PUT of tensors a device asks for their Upload, and sends the bytes after
`received` with the header `Upload-Offset`. Each device has at most one open upload: a new request
ends the old one.

Tokens and secrets are sent as `Authorization: Bearer ...`. Every refusal is a Problem. A
coordinator that is starting answers every request with 503 and the code PREPARING. A coordinator
that is planning submodels gives the same answer to the join of a device whose submodel is not
planned yet. A request with this answer had no effect: send it again.

A device is identified by the Ed25519 key pair that it generates, and it signs its join. It does not
sign later requests: a signature would require reading the body of a streamed upload twice. Instead
they contain the secret that the coordinator gave to the device.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

API = "/v1"
Whole = Annotated[int, Meta(ge=0, lt=2**53)]
"""Integers that every JSON reader can hold: JavaScript's numbers are exact up to 2^53."""
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
"""Code of the Problem for an update if the round does not take one from this device now."""
OTHER_BUNDLE = "round.other-bundle"
"""Code of the Problem for an update that was not trained from the offered bundle."""
UPLOAD_OFFSET = "upload.other-offset"
"""Code of the Problem (409) for a part of an upload that does not follow the received bytes."""
UPLOAD_SUPERSEDED = "upload.superseded"
"""Code of the Problem (409) for an upload that a later request of the same device has ended."""
UPLOAD_ALTERED = "upload.altered"
"""Code of the Problem (409) for an upload whose content has another hash. It was discarded."""
LEFT = "left"
"""State of a device that has ended its membership."""
ABSENT = "absent"
"""State of a device that lost its place because it was away for too long. It may come back."""
STOPPED = "stopped"
"""State of a device after it has reported that it stops, until it asks for work again."""
LEFT_OUT = "left out"
"""State of a device whose updates are not used, because one may have damaged the model."""
ALREADY_SENT = "round.already-sent"
"""Code of the Problem for a second, different update for one round."""
NO_SUCH_FILE = "round.no-such-file"
"""Code of the Problem (404) for a file that is not offered to this device now."""


MOST_CHANNELS = 64
Finite = Annotated[float, Meta(ge=-3.5e38, le=3.5e38)]
"""A number that float32 can represent."""
DIVERGED = frozenset({"training.diverged", "update.diverged", "update.not-finite"})
"""Codes of a SubmodelFailure whose training diverged. If most devices of a round report such a
code, the model is the cause."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The federation is judged by its devices (federated evaluation).

    Each device keeps the `share` of its samples apart and never trains on them. It evaluates models
    on these samples and sends counts only, see `update.EvaluationCounts`. With `by_class` it also
    sends the counts of each class, if its owner agrees.
    """

    share: Annotated[float, Meta(gt=0, le=0.5)]
    by_class: bool = False


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """The description of a federation for the holder of a join token.

    `title`, `purpose` and `contact` are lines that the operator wrote. A round takes at most
    `round_s` seconds. A device receives and sends `first_bytes` in its first round and
    `round_bytes` in each later round; both are 0 while they are not known. `evaluation` is None
    unless the devices judge the models. `signature` is the coordinator's signature of
    `signed_work.invitation_text`; the public key `key` verifies it.
    """

    title: str = ""
    purpose: str = ""
    contact: str = ""
    rounds: int = 0
    round_s: float = 0
    first_bytes: int = 0
    round_bytes: int = 0
    evaluation: EvaluationRequest | None = None
    key: str = ""
    signature: str = ""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A device asks to join, under a name that its owner recognises.

    `public_key` (32 bytes) and `signature` (64 bytes, over `join_text`) are raw Ed25519 values in
    base64. `timestamp` is the device's clock in seconds since 1970; the coordinator refuses a join
    whose timestamp is far from its own clock. `machine` has the fields of
    `bundle_profile.Machine`. `profile` has those of `device_profile.DeviceProfile`; a coordinator
    that plans submodels requires it. A second join with the same key returns the same device with a
    new secret. Each signature is accepted once, so a second join needs another `timestamp`.
    """

    name: str
    public_key: str
    machine: dict[str, str | int | None]
    timestamp: Whole
    signature: str
    profile: dict[str, Any] | None = None


def join_text(token: str, public_key: str, timestamp: int) -> bytes:
    """The text that is signed in a JoinRequest with the join token `token`."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    # Because of the first line, a signature of another message cannot be used for a join.
    return f"edgetailor-join-1\n{digest}\n{public_key}\n{timestamp}\n".encode()


@dataclass(frozen=True, kw_only=True)
class JoinReply:
    """The device's id, its secret for all later requests, and its submodel.

    `key` is the coordinator's public key: 32 raw bytes of Ed25519 in base64. The device keeps it
    and trains only work that this key verifies. `preprocessing`, `sample_shape` and `label_type`
    are those of the later manifests, so that an owner can choose data before the first round.
    """

    device: str
    secret: str
    submodel: str
    key: str = ""
    preprocessing: dict[str, Any] | None = None
    sample_shape: list[int] = field(default_factory=list)
    label_type: Literal["int64", "float32"] = "int64"


@dataclass(frozen=True, kw_only=True)
class FileOffer:
    """A file of the bundle, available at /v1/files/{sha256}. `size` is in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class InputSummary:
    """The 5%, 50% and 95% quantiles of each channel, with two digits.

    Channels are the first axis of a sample. If there are more than 64, the quantiles are those of
    all channels together.
    """

    channels: Annotated[tuple[tuple[Finite, Finite, Finite], ...], Meta(max_length=MOST_CHANNELS)]


@dataclass(frozen=True, kw_only=True)
class ReleaseOffer:
    """The release with which a device should predict: an inference bundle with the released model.

    Releases are numbered from 1; `round` is the round whose model the release has. `files` are
    those of the bundle. If `back`, the operator has withdrawn a later release, and the device
    returns to this release without a trial. The number 0, without files, stands for no release.
    With `evaluation` the device tries the release on these samples and reports counts. `issued` is
    the time of the operator's last change, in seconds since 1970. `signature` is the coordinator's
    signature of `signed_work.release_text`.
    """

    number: Whole
    round: Whole = 0
    files: list[FileOffer] = field(default_factory=list)
    back: bool = False
    evaluation: EvaluationRequest | None = None
    issued: Whole = 0
    signature: str = ""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The next task of a device: `train` the offered files for `round`, `wait`, or stop.

    After the last round, devices that have sent counts are asked once to `judge` the last model:
    they evaluate the offered files and send a Judgement.

    The first round opens when `expected` devices have joined; `joined` is their number so far.
    Later both are 0. `issued` is the coordinator's time when it signed the work, in seconds since
    1970. `signature` is the coordinator's signature of `signed_work.work_text`: raw Ed25519 in
    base64. A device that waits asks again after `ask_again_s` seconds; with 0 the device chooses
    the time. `inputs` summarises the coordinator's own samples. A device that gets it sends a
    summary of its own samples, and warns its owner if they differ much. The signature does not
    cover `inputs`, because nothing else depends on it. With `evaluation` the update's record also
    holds counts, see EvaluationRequest. A device that has nothing to train is offered a `release`,
    which has a signature of its own. If `ask_again_s` is positive after the last round, the device
    stays for releases.
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


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The device's present activity, for the fleet's status. `note` is the reason for a pause."""

    state: Literal["downloading", "training", "evaluating", "uploading", "waiting", "paused"]
    loss: float | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Upload:
    """How many bytes of a device's tensors the coordinator has, and whether these are all."""

    received: int
    complete: bool = False


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The coordinator accepted the update for `round`."""

    round: int


@dataclass(frozen=True, kw_only=True)
class SubmodelFailure:
    """Training `submodel` failed `failures` times in a row. `reason` describes the last failure.

    `code` is the error code of the last failure, and `round` its round; older agents omit both.
    """

    submodel: str
    failures: Whole
    reason: str
    round: Whole = 0
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The device stops now. Until it asks for work again, no round waits for it.

    `code` and `reason` describe the error that ends the agent, without folder names. `round` is the
    round that it worked on, or 0.
    """

    code: str
    reason: str
    round: Whole = 0


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """The device gets the smaller `submodel` from `round` on; None if there is no smaller one."""

    submodel: str | None
    round: int


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """A device as the coordinator sees it. Bytes count message bodies over all rounds so far.

    `round` is the round that the device works on now. `note` is the reason for a pause or a stop,
    the round that closed before the device's update arrived, a reported failure of its submodel, or
    why the device did not take a release. `release` is the release with which the device predicts,
    by its last report; 0 is none.
    """

    device: str
    name: str
    submodel: str
    state: str
    loss: float | None
    rounds_trained: int
    bytes_down: int
    bytes_up: int
    idle_s: float
    note: str | None = None
    round: int | None = None
    release: int | None = None


@dataclass(frozen=True, kw_only=True)
class KindEvaluation:
    """How the devices of a kind judge the model that they received, and their own after training.

    The figures are pooled: sums over the devices, divided once. `counted` is the number of labels
    that count, `loss` the mean over them. `accuracy` and `correct` are None for a regression. The
    figures of trained models are None if the devices did not train.
    """

    devices: int
    samples: int
    counted: int
    correct: int | None
    accuracy: float | None
    loss: float
    trained_accuracy: float | None
    trained_loss: float | None


@dataclass(frozen=True, kw_only=True)
class FederatedEvaluation(KindEvaluation):
    """How all devices judge a global model, which they received in `round`.

    In `mean_accuracy` and `mean_loss` each device counts once, whatever its number of samples.
    `worst_accuracy` and `worst_loss` are means over the tenth of the devices with the worst figure.
    `kinds` has the pooled figures of each kind of devices. A kind with a reduced submodel judges
    the reduced model. `classes` has the number of labels and of correct predictions of each class,
    over the `reporting_classes` devices that report them.
    """

    round: int
    mean_accuracy: float | None
    mean_loss: float | None
    worst_accuracy: float | None
    worst_loss: float | None
    kinds: dict[str, KindEvaluation]
    classes: list[tuple[int, int]] | None = None
    reporting_classes: int = 0

    def text(self) -> str:
        """The main figures in one line."""
        received = _figures(self.accuracy, self.loss)
        worst = _figures(self.worst_accuracy, self.worst_loss or 0.0)
        trained = ""
        if self.trained_loss is not None:
            trained = f"; after local training {_figures(self.trained_accuracy, self.trained_loss)}"
        on = "1 device" if self.devices == 1 else f"{self.devices:,} devices"
        return f"{received} on {on} (worst tenth: {worst}){trained}"


def _figures(accuracy: float | None, loss: float) -> str:
    return f"loss {loss:.4f}" if accuracy is None else f"accuracy {accuracy:.4f}"


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The quality of the global model after `round` (0: before training).

    `accuracy` and `loss` are those on held-out data of the coordinator; `accuracy` is None for a
    regression, and both are None without such data. `devices` is the judgement of the devices that
    received this model; None before they have answered, and if they are not asked. `left_out`
    states why the updates of some devices were not used, by device.
    """

    round: int
    accuracy: float | None
    loss: float | None
    updates: int
    left_out: dict[str, str] = field(default_factory=dict)
    devices: FederatedEvaluation | None = None

    def judgement(self) -> tuple[float | None, float] | None:
        """Accuracy and loss that rounds are compared by; None if there are none yet.

        They are those on held-out data, or else those on the devices.
        """
        if self.loss is not None:
            return self.accuracy, self.loss
        return None if self.devices is None else (self.devices.accuracy, self.devices.loss)

    def quality(self) -> str:
        """Accuracy and loss as text, and whether devices have judged."""
        judged = self.judgement()
        if judged is None:
            return "not judged yet"
        accuracy = "" if judged[0] is None else f"accuracy {judged[0]:.4f}, "
        where = " on the devices" if self.loss is None else ""
        return f"{accuracy}loss {judged[1]:.4f}{where}"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The coordinator now prepares `submodel`, which is number `number` (from 1) of `total`.

    `task` tells what it prepares: bundles of the next round, or the workloads for its plan.
    """

    task: Literal["bundles", "plan"]
    submodel: str
    number: int
    total: int

    def __str__(self) -> str:
        verb = "preparing" if self.task == "bundles" else "planning"
        return f"{verb} {self.number} of {self.total}: {self.submodel}"


@dataclass(frozen=True, kw_only=True)
class Status:
    """The whole fleet. `round` counts from 1; it is 0 while devices enrol.

    `kinds` is the number of kinds of devices. For `kinds_ready` of them the bundle of the next or
    present round is ready. In the state `judging` the rounds are over, and devices judge the last
    model. `preparing` lists the coordinator's present preparations. `warnings` are
    sentences for the operator, for example that the model gets worse. `model_round` is the round
    that produced the global model: after a rollback it is not the last of `history`.
    `closed_connections` counts connections that the coordinator has closed since its start because
    there were too many. `key` is the public key of the coordinator's signatures; earlier versions
    do not send it. `release` is the number of the newest release, if there is one.
    """

    version: int = 1
    state: Literal["enrolling", "training", "aggregating", "judging", "finished"]
    round: int
    rounds: int
    expected_devices: int
    devices: list[DeviceStatus]
    history: list[RoundResult]
    model_round: int | None = None
    kinds: int = 0
    kinds_ready: int = 0
    preparing: list[Preparation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    closed_connections: int = 0
    key: str = ""
    release: int | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A refusal: a code for programs (see the reference of errors) and a sentence for people."""

    code: str
    message: str
