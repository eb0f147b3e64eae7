"""How commands on the coordinator's machine reach `edgetailor serve`."""

from pathlib import Path

from device_agent.cli.token_file import read_token
from profiles.errors import InputError
from toolkit.coordinator.federation_source import load_federation, state_folder
from toolkit.coordinator.http.certificates import certificate_of
from toolkit.coordinator.join_links import ADDRESS
from toolkit.coordinator.operation.saved_login import Login
from toolkit.coordinator.startup_message import OPERATOR
from toolkit.coordinator.storage.folder_lock import FolderLock


def local_login(federation: Path) -> Login:
    """The login of a federation that runs on this machine, from its file or state folder.

    Raises InputError if `edgetailor serve` does not run it, or if its files cannot be read.
    """
    if not federation.exists():
        raise InputError(
            "{path} does not exist. Give the federation's file or its state folder.",
            code="state.no-federation",
            path=str(federation),
        )
    state = state_folder(federation)
    if not (state / ADDRESS).is_file() or not _is_served(state):
        raise InputError(
            "`edgetailor serve` does not run on the state folder {path}. Start it first.",
            code="state.not-served",
            path=str(state),
        )
    url = (state / ADDRESS).read_text().strip()
    certificate = None
    if url.startswith("https:"):
        certificate = certificate_of(load_federation(federation))
    return Login(
        url=url,
        token=read_token(state / OPERATOR),
        certificate=None if certificate is None else certificate.fingerprint,
    )


def _is_served(state: Path) -> bool:
    """Whether a process holds the lock of the state folder.

    If not, another program may listen at the address, and would get the operator's token.
    """
    try:
        FolderLock(state).release()
    except InputError:
        return True
    return False
