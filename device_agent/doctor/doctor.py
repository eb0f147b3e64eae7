"""All checks of `edgetailor-agent doctor`, and the text of their findings.

A failed check must not stop the other checks. Each library is imported inside the check that needs
it, so that a library that does not load is reported.
"""

from collections.abc import Iterator
from pathlib import Path

from device_agent.doctor.finding import Finding, isolated
from device_agent.doctor.machine_checks import check_machine
from profiles.errors import InputError
from profiles.text_formatting import wrapped

INDENT = " " * 19


def run_checks(url: str | None, state: Path, token: str | None = None) -> Iterator[Finding]:
    """Check the connection to the coordinator, and this machine.

    Args:
        url: The coordinator's URL (default: the coordinator that this device has joined).
        state: State folder.
        token: A join token to check, if any.

    Returns:
        The findings. Each finding is yielded when its check has ended.
    """
    yield from isolated("coordinator", lambda: _connection(url, state, token))
    yield from check_machine(state)


def _connection(url: str | None, state: Path, token: str | None) -> Iterator[Finding]:
    from device_agent.doctor.coordinator_checks import check_connection
    from device_agent.federation.identity.state_folder import StateFolder

    identity = None
    try:
        identity = StateFolder(state).identity()
    except InputError as error:
        if state.is_dir():  # check_machine reports a state that is not a folder
            remedy = "the key is kept, so the device stays the same"
            yield Finding.fail("state", str(error), remedy)
    if url is None and identity is None:
        yield Finding.skip("coordinator", "not known", "give its URL, or join first")
    else:
        yield from check_connection(url, identity, token)


def lines(finding: Finding) -> list[str]:
    """Format a finding as text of 80 columns."""
    shown = wrapped(f"{finding.result}  {finding.check:<11}  ", finding.detail)
    return shown + (wrapped(f"{INDENT}-> ", finding.remedy) if finding.remedy else [])
