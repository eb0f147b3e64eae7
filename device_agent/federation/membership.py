"""Becoming a member of a federation, and leaving it; each cleans up on both sides."""

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from device_agent.client.addresses import check_url
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.device_keys import DeviceKey
from device_agent.federation.device_state import DeviceState, Identity
from device_agent.formats.atomic_files import fingerprint, write_file
from device_agent.formats.protocol import NEEDS_PROFILE
from profiles.documents.bundle_profile import this_machine
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import AuthorisationError, ClientError, InputError
from profiles.text_formatting import format_bytes

log = logging.getLogger(__name__)
Measure = Callable[[str, Path], DeviceProfile]
"""(name, a folder on the device's disk) -> what the device can do."""
JOIN_PATIENCE_S = 60.0
LEAVE_PATIENCE_S = 5.0
"""How long a coordinator that does not answer is asked again."""


def calibrated(name: str, folder: Path) -> DeviceProfile:
    """This device's profile, measured now."""
    # Imports the runtime, which joining does not need otherwise.
    from device_agent.profiling.calibration import calibrate, device_profile
    from device_agent.profiling.calibration_summary import summary

    found = device_profile(name, calibrate(0), folder)
    for line in summary(found, None):
        log.info(line)
    return found


def join(
    url: str,
    token: str,
    name: str,
    state: Path,
    *,
    replace: bool = False,
    patience_s: float = JOIN_PATIENCE_S,
    measure: Measure = calibrated,
) -> Identity:
    """Enrol at `url` as `name`, and keep what came back in the folder `state`.

    Joining the same coordinator with the same token again changes nothing. With `replace` a folder
    that belongs elsewhere is given to the new coordinator, once it has taken this device; the old
    one is told if it answers. Where the coordinator plans submodels, `measure` finds out what this
    device can do. Raises AuthorisationError for a refused token, RefusedError where no submodel
    fits this device, ClientError if nobody answers for `patience_s` seconds, and InputError where
    `state` belongs to a device that joined otherwise, cannot be written or is another agent's.
    """
    folder = DeviceState(state)
    url = check_url(url)
    known = folder.identity()
    same = known is not None and _is_same(known, url, token)
    if known is not None and not replace:
        if not same:
            raise _belongs_elsewhere(known, url, state)
        log.info("%s has joined %s already, as %s.", known.name, url, known.device)
        return known
    link = CoordinatorClient(url, token, patience_s=patience_s)
    folder.check_writable()
    moving = known is not None and not same
    key = folder.replacing_key if moving else folder.key
    with folder.locked():
        identity = _enrol(link, token, name, key, lambda: measure(name, state))
        if known is not None and moving:
            _tell_old(known)
            folder.change_hands()
        folder.remember(identity)
    log.info("Joined %s as %s (%s); it trains %s.", url, identity.device, name, identity.submodel)
    log.info("This machine: %s.", machine_line())
    return identity


def leave(state: Path, *, keep_personal: bool = False, offline: bool = False) -> Identity:
    """Give up this device's place, and remove what it kept in the folder `state`.

    `keep_personal` leaves its personal model there; `offline` removes this side although the
    coordinator cannot be told. Returns who it was. Raises InputError where it has not joined or
    the folder is read-only, and ClientError where the coordinator is away; then nothing is removed.
    """
    folder = DeviceState(state)
    known = folder.member()
    folder.check_open()
    try:
        CoordinatorClient(known.url, known.secret, patience_s=LEAVE_PATIENCE_S).leave()
    except AuthorisationError:
        log.info("%s does not know %s any more.", known.url, known.device)
    except ClientError as error:
        if not offline:
            raise ClientError(
                f"{error} Nothing was removed: leave when it is back, or with --offline now; then "
                f"the place of {known.device} stays taken there."
            ) from None
        log.warning("%s was not told: %s keeps its place there.", known.url, known.device)
    folder.forget(keep_personal=keep_personal)
    return known


def machine_line() -> str:
    """This machine in a few words: processor, cores, memory and runtime."""
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
    """The key for a join, in the file `path`; `new` where this join made it."""

    key: DeviceKey
    path: Path
    new: bool

    @classmethod
    def at(cls, path: Path) -> "_Key":
        if path.exists():
            return cls(DeviceKey.from_pem(path.read_bytes(), path), path, new=False)
        made = cls(DeviceKey.new(), path, new=True)
        write_file(path, made.key.pem(), mode=0o600)
        return made


def _enrol(
    link: CoordinatorClient,
    token: str,
    name: str,
    key: Path,
    measure: Callable[[], DeviceProfile],
) -> Identity:
    """Ask to join. The key is on disk before it is sent: a lost answer costs the token nothing."""
    held = _Key.at(key)
    machine = msgspec.to_builtins(this_machine(_runtime()))
    request = partial(held.key.join_request, token, name, machine)
    try:
        try:
            reply = link.join(request)
        except RefusedError as refusal:
            if refusal.code != NEEDS_PROFILE:
                raise
            log.info("The coordinator plans by what a device can do: measuring, about a minute.")
            profile = msgspec.to_builtins(measure())
            reply = link.join(partial(request, profile))
    except BaseException:
        if held.new and not link.join_unanswered:
            held.path.unlink()  # no device has come of it
        raise
    return Identity(
        url=link.url,
        device=reply.device,
        secret=reply.secret,
        name=name,
        submodel=reply.submodel,
        token_sha256=fingerprint(token.encode()).sha256,
    )


def _runtime() -> str:
    # Its metadata, not the library: importing that takes 40 MB which joining does not need.
    return f"onnxruntime {importlib.metadata.version('onnxruntime')}"


def _is_same(known: Identity, url: str, token: str) -> bool:
    return known.url == url and known.token_sha256 in (None, fingerprint(token.encode()).sha256)


def _belongs_elsewhere(known: Identity, url: str, state: Path) -> InputError:
    if known.url != url:
        return InputError(
            f"{state} belongs to the coordinator {known.url}: give another folder with --state, "
            f"or --replace to leave that one."
        )
    return InputError(
        f"{state} belongs to {known.device}, which joined {url} with another token: give one "
        f"more device of this machine a folder of its own with --state, or --replace to "
        f"leave as {known.device}."
    )


def _tell_old(known: Identity) -> None:
    try:
        CoordinatorClient(known.url, known.secret, patience_s=LEAVE_PATIENCE_S).leave()
    except ClientError as error:
        log.warning("The old coordinator was not told that %s has left: %s", known.device, error)
