"""The files of a bundle that the coordinator offers to a device."""

import re
from collections.abc import Iterable
from pathlib import Path

from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.manifest import MANIFEST, FileEntry
from device_agent.formats.protocol.transfers import FileOffer
from profiles.errors import ClientError


def manifest_of(offers: Iterable[FileOffer]) -> str:
    """The hash of the manifest among the offered files; empty if there is none."""
    return next((offer.sha256 for offer in offers if offer.name == MANIFEST), "")


def check_offers(offers: list[FileOffer]) -> None:
    """Raise ClientError if a name or hash is invalid, or if the manifest is missing."""
    for offer in offers:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", offer.name) or not re.fullmatch(
            r"[0-9a-f]{64}", offer.sha256
        ):
            raise ClientError(
                "The coordinator offers a file that cannot be part of a bundle: {file!r} with "
                "SHA-256 {sha256!r}. Check the URL.",
                code="client.invalid-offer",
                file=offer.name,
                sha256=offer.sha256,
            )
    if MANIFEST not in [offer.name for offer in offers]:
        raise ClientError(
            "The coordinator offers a bundle without {manifest}. See the coordinator's log.",
            code="client.offer-without-manifest",
            manifest=MANIFEST,
        )


def is_whole(path: Path, offer: FileOffer) -> bool:
    """Whether the file at `path` is the offered file, complete and undamaged."""
    expected = FileEntry(size=offer.size, sha256=offer.sha256)
    return path.exists() and fingerprint_file(path) == expected
