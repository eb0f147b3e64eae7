"""The federation's own secrets: the coordinator's key, the operator's token, the join tokens.

Each secret is in a file of the state folder. If a file is truncated, empty or from another
federation, `serve` does not start, and the error names the file. A secret is never replaced
silently, because devices know the key and people have copies of the tokens.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_urlsafe

from device_agent.client.addresses import check_secret
from device_agent.formats.atomic_files import write_file
from profiles.errors import InputError
from toolkit.coordinator.database.device_registry import hashed
from toolkit.coordinator.database.key_log import KEY, KEY_CHANGES, KNOWN_KEY, NEXT_KEY
from toolkit.coordinator.devices import key_files
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.join_links import token_file
from toolkit.coordinator.startup_message import OPERATOR
from toolkit.coordinator.storage.coordinator_store import Store

logger = logging.getLogger(__name__)

KNOWN_OPERATOR = "operator"
"""The key in the store for the hash of the operator's token."""
EARLIER_LENGTH = 43
"""The length of an operator's token from versions that did not keep its hash."""


@dataclass(frozen=True)
class FederationSecrets:
    """The key, the operator's token, and the join token of each kind of devices.

    `new_key` is true if the key was just made and is not in its file yet.
    """

    key: CoordinatorKey
    new_key: bool
    operator: str
    tokens: Mapping[str, str]


def read_secrets(config: CoordinatorConfig, store: Store, new_key: bool) -> FederationSecrets:
    """Read the secrets of the federation, and make those that are missing. Writes nothing.

    With `new_key`, a new key replaces the lost key.

    Raises:
        InputError: A file is damaged or cannot be read; the key is missing although devices have
            joined; the key has changed; or `new_key` is given and the key is intact.
    """
    key, is_new = _key(config.state / KEY, store, new_key)
    known = store.registry.token_hashes()
    operator = _operator(config.state / OPERATOR, store.value(KNOWN_OPERATOR), bool(known))
    tokens: dict[str, str] = {}
    for kind in config.devices:
        path = token_file(config.state, kind.name)
        # The key's fingerprint follows the first dot. It is not secret, and is written again.
        given = _read(path)
        token = token_urlsafe(32) if given is None else given.partition(".")[0]
        # If the federation does not know the kind yet, the operator has chosen the token.
        fits = token and hashed(token) == known.get(kind.name, hashed(token))
        if given is not None and not fits:
            raise _damaged(path)
        tokens[kind.name] = token
    return FederationSecrets(key, is_new, operator, tokens)


def keep_secrets(config: CoordinatorConfig, store: Store, secrets: FederationSecrets) -> None:
    """Write the secrets: first their fingerprints and hashes to the store, then their files."""
    key, known = secrets.key, store.registry.token_hashes()
    store.set_value(KNOWN_KEY, key.fingerprint)
    store.set_value(KNOWN_OPERATOR, hashed(secrets.operator))
    for kind in config.devices:
        token = secrets.tokens[kind.name]
        store.registry.set_token(kind.name, token, kind.places, config.token_days)
    if secrets.new_key:
        store.set_value(KEY_CHANGES, "[]")  # the lost key cannot sign the new one
        write_file(config.state / KEY, key.pem(), mode=0o600)
    key_files.install(config.state, key)
    _write(config.state / OPERATOR, secrets.operator, bool(known))
    for name, token in secrets.tokens.items():
        path = token_file(config.state, name)
        _write(path, f"{token}.{key.fingerprint}", name in known)


def _operator(path: Path, known: str | None, began: bool) -> str:
    """The operator's token. `began`: this is not the federation's first start."""
    token = _read(path)
    if token is None:
        return token_urlsafe(32)
    fits = hashed(token) == known if known else not began or len(token) == EARLIER_LENGTH
    if not fits:
        raise _damaged(path)
    return token


def _key(path: Path, store: Store, new_key: bool) -> tuple[CoordinatorKey, bool]:
    """The key, and whether it was made now."""
    known, joined = store.value(KNOWN_KEY), bool(store.registry.devices())
    why = (
        "Every device that has joined trusts that key only. Put the file back from a backup. To go "
        "on without it, start `edgetailor serve` with --new-key: then every device has to join "
        "again."
    )
    following = key_files.prepared(path.parent)
    if following is not None and following.fingerprint == known:
        if new_key:
            raise _whole(path.parent / NEXT_KEY)
        return following, False  # `serve` was killed while this key replaced the earlier one
    content = _content(path)
    key = None if content is None else CoordinatorKey.from_pem(content)
    if content is None and joined and not new_key:
        raise InputError(
            "{path} is missing: the coordinator's key is lost. {why}",
            code="state.missing-coordinator-key",
            path=path,
            why=why,
        )
    if content is not None and key is None and not new_key:
        raise InputError(
            "{path} is damaged: it has no Ed25519 key. {why}",
            code="state.damaged-coordinator-key",
            path=path,
            why=why,
        )
    same = key is not None and known in (None, key.fingerprint)
    if key is not None and not same and not new_key:
        raise InputError(
            "{path} contains a key that is not the key of this federation. {why}",
            code="state.other-coordinator-key",
            path=path,
            why=why,
        )
    if same and new_key:
        raise _whole(path)
    if key is not None and same:
        return key, False
    if joined:
        logger.warning("The coordinator has a new key: every device has to join again.")
    return CoordinatorKey(), True


def _whole(path: Path) -> InputError:
    return InputError(
        "--new-key replaces a lost key, but {path} is intact. Start without --new-key. If "
        "somebody else has the key, remove the file and start with --new-key.",
        code="state.whole-coordinator-key",
        path=path,
    )


def _read(path: Path) -> str | None:
    """The word in the file at `path`; None if it is missing."""
    content = _content(path)
    try:
        return None if content is None else check_secret(content.decode().strip())
    except (UnicodeDecodeError, InputError):
        raise _damaged(path) from None


def _content(path: Path) -> bytes | None:
    """The content of the file at `path`; None if it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            "{path} cannot be read: {reason}. It must be a file that this user may read: put it "
            "back from a backup, or correct its permissions.",
            code="state.unreadable",
            path=path,
            reason=error.strerror,
        ) from None


def _damaged(path: Path) -> InputError:
    return InputError(
        "{path} is damaged: it does not contain the token of this federation. Put the file back "
        "from a backup, or remove it and start again: then there is a new token, and copies of the "
        "old token no longer work.",
        code="state.damaged-token",
        path=path,
    )


def _write(path: Path, content: str, was_known: bool) -> None:
    """Write a token, readable by its owner only, unless the file holds it already."""
    before = path.read_text().strip() if path.exists() else None
    if before == content:
        return
    write_file(path, f"{content}\n".encode(), mode=0o600)
    if before is not None:
        logger.warning("%s did not end in the fingerprint of the coordinator's key: fixed.", path)
    elif was_known:
        logger.warning("%s was missing and has a new token: the old one is not valid.", path)
