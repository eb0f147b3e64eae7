"""Joining a federation and leaving it."""

import importlib.metadata
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from device_agent.client.addresses import check_url
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.identity.state_folder import Identity
from device_agent.federation.identity.trusted_key import check_introduction, check_named_key
from device_agent.federation.identity.valid_secret import with_valid_secret
from device_agent.formats.atomic_files import fingerprint, write_file
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.preprocessing import Images
from device_agent.formats.protocol.joining import Invitation, JoinReply
from device_agent.formats.protocol.problems import NEEDS_PROFILE
from device_agent.formats.protocol.secure_sums import SecureTerms
from device_agent.formats.signed_work import key_fingerprint, split_token
from device_agent.system.clock import SYSTEM_CLOCK, Clock
from profiles.documents.bundle_profile import this_machine
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import AuthorisationError, ClientError, InputError
from profiles.text_formatting import format_bytes, one_line

log = logging.getLogger(__name__)
Measure = Callable[[str, Path], DeviceProfile]
"""Measures the device's profile, called with its name and a folder on its disk."""
JOIN_PATIENCE_S = 60.0
UNCHECKED = (
    "The token does not end in a dot and the fingerprint of the coordinator's key, so another "
    "program may have answered instead of %s. The key that was received has the fingerprint %s: "
    "compare it with the end of the operator's token file. It is safer to use https or the "
    "complete token."
)
LEAVE_PATIENCE_S = 5.0
"""How long requests are repeated if the coordinator does not answer."""
LONGEST_LINE = 500
"""The most characters in a line of a federation's description of itself."""


def calibrated(name: str, folder: Path) -> DeviceProfile:
    """Measure this device's profile."""
    from device_agent.profiling.calibration import measured_device
    from device_agent.profiling.calibration_summary import summary

    device = measured_device(name, folder)
    for line in summary(device, None):
        log.info(line)
    return device


def join(
    url: str,
    token: str,
    name: str,
    state: Path,
    *,
    replace: bool = False,
    certificate: str | None = None,
    patience_s: float = JOIN_PATIENCE_S,
    measure: Measure = calibrated,
    sleep: Callable[[float], None] = time.sleep,
    clock: Clock = SYSTEM_CLOCK,
) -> Identity:
    """Enrol this device with a coordinator.

    If the device has already joined this coordinator with this token, usually nothing changes. If
    the coordinator no longer knows the device, the device joins again with its present key. It also
    does so if the token names a coordinator key that the device does not trust.

    Args:
        url: The coordinator's URL.
        token: The join token. A token may end in a dot and the fingerprint of a coordinator's key.
            Then only this coordinator can answer the join.
        name: Name of the device.
        state: State folder; the device's identity is stored there.
        replace: If the folder belongs to another coordinator, leave the other coordinator after the
            new coordinator has accepted this device.
        certificate: SHA-256 of the coordinator's certificate. If this hash is given, the
            certificate needs no signature of an authority.
        patience_s: For how many seconds requests are repeated if the coordinator does not answer.
        measure: Measures the device. A coordinator that plans submodels asks for this measurement.
        sleep: Waits for a number of seconds.
        clock: The device's clock. A join waits until the clock's time is believable.

    Returns:
        The device's identity.

    Raises:
        AuthorisationError: The coordinator does not accept the token.
        TrustError: The coordinator's key is not the key that the token names.
        RefusedError: No submodel fits this device, or the request was refused.
        ClientError: The coordinator does not answer.
        InputError: The folder belongs to another coordinator or token, cannot be written, or is in
            use by another agent.
    """
    folder = DeviceState(state)
    url = check_url(url)
    token, coordinator_key = split_token(token)
    known = folder.identity()
    same = known is not None and _is_same(known, url, token)
    # Checked before any request: a second join must not use up a place of the token.
    if known is not None and not replace:
        if not same:
            raise _belongs_elsewhere(known, url, state)
        if _has_other_key(known, coordinator_key):
            log.info("The token names a new key of %s: %s joins again.", url, known.device)
        elif not _is_forgotten(known):
            log.info("%s has joined %s already, as %s.", known.name, url, known.device)
            return known
        else:
            log.info("%s does not know %s any more: the device joins again.", url, known.device)
    client = CoordinatorClient(
        url,
        token,
        patience_s=patience_s,
        certificate=certificate,
        sleep=sleep,
        clock=clock,
    )
    moving = known is not None and not same
    # The old key stays until the new coordinator has accepted this device.
    key = folder.replacing_key if moving else folder.key
    if known is not None and not moving and not key.exists():
        text = (
            "%s is missing: this machine joins as a new device, and the earlier device %s keeps "
            "its place."
        )
        log.warning(text, key, known.device)
    with folder.created(), folder.locked():
        # Ask before a place is taken: this already detects another coordinator.
        invitation = _introduce(client, coordinator_key, clock)
        held = _Key.at(key)
        enrolled = _enrol(client, token, name, held, lambda: measure(name, state), clock)
        identity = msgspec.structs.replace(enrolled, certificate=certificate)
        try:
            check_named_key(client, identity.key or "", coordinator_key, clock)
            invitation = invitation or _introduce(client, coordinator_key, clock)
            if known is not None and moving:
                _tell_old(known)
                folder.take_new_key()
            if invitation is not None and invitation.secure is not None:
                folder.secure_promise.remember(invitation.secure)
            folder.remember(identity)
        except BaseException:
            _give_back(identity, held)
            raise
    if coordinator_key is None and identity.key and url.startswith("http://"):
        log.warning(UNCHECKED, url, key_fingerprint(identity.key))
    log.info("Joined %s as %s (%s); it trains %s.", url, identity.device, name, identity.submodel)
    log.info("This machine: %s.", machine_line())
    return identity


def _give_back(enrolled: Identity, held: "_Key") -> None:
    """Give up the place of a failed join, unless the device was a member before.

    If the coordinator does not answer, the key stays, so that a later join gets the same place.
    """
    if not held.new:
        return
    with suppress(ClientError):
        _client(enrolled, LEAVE_PATIENCE_S).leave()
        held.path.unlink(missing_ok=True)


def _introduce(
    client: CoordinatorClient, coordinator_key: str | None, clock: Clock
) -> Invitation | None:
    """Log the operator's description of the federation, and return it; None if there is none."""
    invitation = client.invitation()
    if invitation is None:
        return None
    check_introduction(client, invitation, coordinator_key, clock)
    lines = {
        "Federation": invitation.title,
        "Purpose": invitation.purpose,
        "Contact": invitation.contact,
    }
    for name, line in lines.items():
        if line:
            # The operator writes this text: control characters in it could move the cursor.
            log.info("%s: %s", name, one_line(line, LONGEST_LINE))
    if invitation.evaluation is not None:
        log.info("Evaluation: %s", consent(invitation.evaluation))
    if invitation.secure is not None:
        log.info("Updates: %s", protection(invitation.secure))
    return invitation


def protection(terms: SecureTerms) -> str:
    """Say what secure sums reveal."""
    text = (
        "the coordinator learns only the sum of the updates of at least "
        f"{terms.fewest} devices, never the update of this device."
    )
    if (privacy := terms.privacy) is None:
        return text
    return (
        f"{text} The change of this device is clipped to the norm {privacy.clip:g}, and the "
        f"devices together add noise whose standard deviation is {privacy.noise_multiplier:g} "
        "times this norm."
    )


def consent(asked: EvaluationRequest) -> str:
    """Tell the owner which samples are kept for evaluation only, and which counts are sent."""
    classes = " Counts of each class are sent only with `run --report-classes`."
    return (
        f"{asked.share:.0%} of this device's samples are kept apart and never used for training. "
        "In each round the device sends how many of them the model predicts correctly, before and "
        "after its training, and the sums of losses and "
        f"errors.{classes if asked.by_class else ''}"
    )


def leave(state: Path, *, keep_personal: bool = False, offline: bool = False) -> Identity:
    """Give up this device's place and remove its state.

    Args:
        state: State folder.
        keep_personal: Keep the personal model in the folder.
        offline: Remove the state even if the coordinator does not answer.

    Returns:
        The identity that the device had.

    Raises:
        InputError: The device has not joined, or the folder is read-only.
        ClientError: The coordinator does not answer. Nothing was removed.
    """
    folder = DeviceState(state)
    known = folder.member()
    folder.check_changeable()
    try:
        _give_up(known)
    # The coordinator has removed the device already: only this side is left to clean up.
    except AuthorisationError:
        log.info("%s does not know %s any more.", known.url, known.device)
    except ClientError as error:
        if not offline:
            raise ClientError(
                "{problem} Nothing was removed. Try again when the coordinator can be reached. Or "
                "leave now with --offline: then the coordinator still counts {device} as a member.",
                code="client.not-left",
                device=known.device,
                url=known.url,
                reason=error.code,
                problem=str(error),
            ) from None
        log.warning("%s was not told: %s keeps its place there.", known.url, known.device)
    folder.forget(keep_personal=keep_personal)
    return known


def machine_line() -> str:
    """Describe this machine in a few words: processor, cores, memory and runtime."""
    machine = this_machine(_runtime())
    memory = machine.memory_bytes
    return ", ".join(
        (
            f"{machine.system} on {machine.architecture}",
            f"{machine.cpu_count} cores",
            "memory not measurable" if memory is None else f"{format_bytes(memory)} of memory",
            machine.runtime,
        )
    )


@dataclass(frozen=True)
class _Key:
    """The device's key for a join, stored at `path`; `new` says if this join generated it."""

    key: DeviceKey
    path: Path
    new: bool

    @classmethod
    def at(cls, path: Path) -> "_Key":
        try:
            return cls(DeviceKey.from_pem(path.read_bytes(), path), path, new=False)
        except FileNotFoundError:
            generated = cls(DeviceKey.new(), path, new=True)
            write_file(path, generated.key.pem(), mode=0o600)
            return generated
        except OSError as error:
            raise InputError(
                "{path} cannot be read: {reason}.",
                code="state.unreadable",
                path=str(path),
                reason=error.strerror,
            ) from None


def _enrol(
    client: CoordinatorClient,
    token: str,
    name: str,
    held: _Key,
    measure: Callable[[], DeviceProfile],
    clock: Clock,
) -> Identity:
    """Send the join request, and the profile if the coordinator asks for it.

    The key is stored on the disk before it is sent. If the answer is lost, the device joins again
    with this key. The coordinator then recognises the device, which takes no second place of the
    token.
    """
    machine = msgspec.to_builtins(this_machine(_runtime()))
    request = partial(held.key.join_request, token, name, machine, clock=clock)
    try:
        try:
            reply = client.join(request)
        except RefusedError as refusal:
            # Measuring takes a minute, so it is done only for a coordinator that needs it.
            if refusal.code != NEEDS_PROFILE:
                raise
            log.info("The coordinator needs a profile of this device: measuring, about a minute.")
            profile = msgspec.to_builtins(measure())
            reply = client.join(partial(request, profile=profile))
    except BaseException:
        if held.new and not client.join_unanswered:
            held.path.unlink()  # the coordinator knows no device with this key
        raise
    if reply.sample_shape:  # coordinators before 0.2 do not send it
        log.info("DATA: %s.", _data(reply))
    return Identity(
        url=client.url,
        device=reply.device,
        secret=reply.secret,
        name=name,
        submodel=reply.submodel,
        token_sha256=fingerprint(token.encode()).sha256,
        key=reply.key or None,
        labels=not reply.arrays or any(name.startswith("y") for name in reply.arrays),
    )


def _data(reply: JoinReply) -> str:
    """Describe the data that the owner has to give with --data."""
    if reply.arrays:
        return f"an .npz file with the arrays {', '.join(reply.arrays)}"
    if reply.preprocessing is None:
        shape = ", ".join(map(str, ("n", *reply.sample_shape)))
        return f"an .npz file with the samples x ({shape}) and the labels y ({reply.label_type})"
    if reply.preprocessing.get("kind") == Images.kind:
        return f"a folder of pictures, in a folder for each class: {_names(reply, 'classes')}"
    label = reply.preprocessing.get("label")
    return f"CSV files with the columns {_names(reply, 'columns')}, and {label} for the label"


def _names(reply: JoinReply, key: str) -> str:
    return ", ".join(map(str, (reply.preprocessing or {}).get(key, ())))


def _runtime() -> str:
    # Read the package's metadata: importing the library takes 40 MB that joining does not need.
    return f"onnxruntime {importlib.metadata.version('onnxruntime')}"


def _client(known: Identity, patience_s: float) -> CoordinatorClient:
    return CoordinatorClient(
        known.url, known.secret, patience_s=patience_s, certificate=known.certificate
    )


def _has_other_key(known: Identity, fingerprint: str | None) -> bool:
    """Whether a token's `fingerprint` differs from that of the coordinator's key in `known`."""
    return None not in (fingerprint, known.key) and key_fingerprint(known.key or "") != fingerprint


def _is_same(known: Identity, url: str, token: str) -> bool:
    return known.url == url and known.token_sha256 in (None, fingerprint(token.encode()).sha256)


def _is_forgotten(known: Identity) -> bool:
    """Whether the coordinator answers that it does not know this device."""
    try:
        with_valid_secret(known, lambda own: _client(own, 0).work())
    except AuthorisationError:
        return True
    except ClientError:
        pass
    return False


def _belongs_elsewhere(known: Identity, url: str, state: Path) -> InputError:
    if known.url != url:
        return InputError(
            "{path} belongs to the coordinator {url}. Give another folder with --state, or leave "
            "that coordinator with --replace.",
            code="state.other-coordinator",
            path=str(state),
            url=known.url,
        )
    return InputError(
        "{path} belongs to {device}, which joined {url} with another token. For a second device "
        "on this machine, give another folder with --state. To give up the membership as {device} "
        "and join with this token, use --replace.",
        code="state.other-token",
        path=str(state),
        device=known.device,
        url=url,
    )


def _give_up(known: Identity) -> None:
    """Tell the coordinator of `known` that this device leaves."""
    with_valid_secret(known, lambda own: _client(own, LEAVE_PATIENCE_S).leave())


def _tell_old(known: Identity) -> None:
    try:
        _give_up(known)
    except ClientError as error:
        log.warning("The old coordinator was not told that %s has left: %s", known.device, error)
