"""`edgetailor-agent doctor`: what this device needs to take part, each checked, with the remedy."""

from collections.abc import Iterator
from pathlib import Path

from device_agent.doctor.coordinator_checks import check_link
from device_agent.doctor.finding import Finding
from device_agent.doctor.machine_checks import check_machine
from device_agent.federation.device_state import DeviceState, Identity
from profiles.errors import InputError
from profiles.text_formatting import wrapped

INDENT = " " * 19


def examine(url: str | None, state: Path, token: str | None = None) -> Iterator[Finding]:
    """Check the way to the coordinator at `url`, or of the state folder's, and this machine.

    A join token is checked too. Raises InputError where `url` is none.
    """
    identity: Identity | None = None
    try:
        identity = DeviceState(state).identity()
    except InputError as error:
        if state.is_dir():  # what is none is told below
            yield Finding.fail("state", str(error), "the key is kept: the same device comes of it")
    if url is None and identity is None:
        yield Finding.skip("coordinator", "none is known here", "give its URL, or join first")
    else:
        yield from check_link(url, identity, token)
    yield from check_machine(state)


def lines(finding: Finding) -> list[str]:
    """A finding for people, in 80 columns."""
    shown = wrapped(f"{finding.result}  {finding.check:<11}  ", finding.detail)
    return shown + (wrapped(f"{INDENT}-> ", finding.remedy) if finding.remedy else [])
