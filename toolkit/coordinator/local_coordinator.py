"""How commands on the coordinator's machine reach `edgetailor serve`."""

from pathlib import Path

from device_agent.cli.token_file import read_token
from profiles.errors import InputError
from toolkit.coordinator.federation_source import load_federation, state_folder
from toolkit.coordinator.http.certificates import certificate_of
from toolkit.coordinator.join_links import ADDRESS
from toolkit.coordinator.operation.saved_login import Login
from toolkit.coordinator.startup_message import OPERATOR


def local_login(federation: Path) -> Login:
    """The login of a federation that runs on this machine, from its file or state folder.

    Raises InputError if it has never run, or if its files cannot be read.
    """
    state = state_folder(federation)
    address = state / ADDRESS
    try:
        url = address.read_text().strip()
    except OSError:
        raise InputError(
            "{path} cannot be read: `edgetailor serve` writes it when it starts. Start it first.",
            code="state.not-served",
            path=str(address),
        ) from None
    certificate = None
    if url.startswith("https:"):
        certificate = certificate_of(load_federation(federation))
    return Login(
        url=url,
        token=read_token(state / OPERATOR),
        certificate=None if certificate is None else certificate.fingerprint,
    )
