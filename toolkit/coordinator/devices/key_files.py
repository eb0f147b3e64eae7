"""The coordinator's key in files of the state folder, also while it is replaced by the next key.

The next key is first written to its own file. Then the database names this key. After that, the
file of the next key replaces the file of the earlier key. So if the process is killed during one of
these writes, the folder still has a key that fits the database.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from device_agent.formats.atomic_files import sync_folder, write_file
from toolkit.coordinator.database.key_log import KEY, NEXT_KEY
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.join_links import token_file


def prepare(state: Path, key: CoordinatorKey) -> None:
    """Write the next key, before the database names it."""
    write_file(state / NEXT_KEY, key.pem(), mode=0o600)


def prepared(state: Path) -> CoordinatorKey | None:
    """The next key that a killed process has left; None if there is none."""
    try:
        return CoordinatorKey.from_pem((state / NEXT_KEY).read_bytes())
    except OSError:
        return None


def install(state: Path, key: CoordinatorKey) -> None:
    """If the file of the next key contains `key`, make it the key file. Otherwise remove it."""
    following = prepared(state)
    if following is not None and following.fingerprint == key.fingerprint:
        os.replace(state / NEXT_KEY, state / KEY)
        sync_folder(state)
    else:
        (state / NEXT_KEY).unlink(missing_ok=True)


def renew_tokens(state: Path, kinds: Iterable[str], fingerprint: str) -> None:
    """Let the token files of these kinds end in the `fingerprint` of the coordinator's key."""
    for path in (token_file(state, kind) for kind in kinds):
        if path.exists():
            token = path.read_text("utf-8").strip().partition(".")[0]
            write_file(path, f"{token}.{fingerprint}\n".encode(), mode=0o600)
