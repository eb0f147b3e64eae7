"""Files that a device fetches, and the tensors that it sends."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FileOffer:
    """A file of the bundle, available at /v1/files/{sha256}. `size` is in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Upload:
    """How many bytes of a device's tensors the coordinator has, and whether all bytes are there."""

    received: int
    complete: bool = False
