"""The built page: the files that `make web` wrote, with their types, hashes and encodings."""

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from profiles.errors import InputError
from profiles.json_decoding import MalformedError, decode_json

BUILT = Path(__file__).parent / "built"
"""The folder to which `make web` writes the page. A released wheel contains it."""
LISTED = "files.json"
"""The file that lists all other files."""
INDEX = "index.html"
HOW_TO_BUILD = (
    "Run `make web` in a checkout of the source, or install edgetailor from its released wheel"
)
CODINGS = {"br": "br", "gz": "gzip"}
"""The name of a content coding in HTTP, by the suffix of its files."""


class ListedFile(msgspec.Struct, frozen=True):
    """The entry of a file in `files.json`. `sha256` and `size` (bytes) are of the raw file.

    If a file is `immutable`, its name contains its hash.
    """

    type: str
    sha256: str
    size: int
    immutable: bool
    encodings: tuple[Literal["br", "gz"], ...]


@dataclass(frozen=True)
class PageFile:
    """A file of the page.

    `bodies` maps each content coding, such as `gzip`, to the bytes that are sent. If the build has
    a gzip file, `bodies` also has the uncompressed file, with the coding `identity`.
    """

    name: str
    listed: ListedFile
    bodies: Mapping[str, bytes]


Page = Mapping[str, PageFile]
"""The files of the page, by name."""


def is_built(folder: Path = BUILT) -> bool:
    """Whether the page was built."""
    return (folder / LISTED).exists()


def read_page(folder: Path = BUILT) -> Page | None:
    """Read the built page in `folder` into memory, a few MB; None if it was not built.

    Raises InputError if a file is missing or differs from the built file.
    """
    if not is_built(folder):
        return None
    try:
        listed = decode_json((folder / LISTED).read_bytes(), dict[str, ListedFile])
        page = {
            name: PageFile(name, entry, _bodies(folder, name, entry))
            for name, entry in listed.items()
        }
        page[INDEX]
    except (OSError, EOFError, KeyError, ValueError, zlib.error, MalformedError) as error:
        raise InputError(
            "The page in {path} is damaged ({reason}). {how_to_build}.",
            code="web.damaged-page",
            path=str(folder),
            reason=str(error),
            how_to_build=HOW_TO_BUILD,
        ) from None
    return page


def _bodies(folder: Path, name: str, listed: ListedFile) -> dict[str, bytes]:
    """Read the file in all its codings. Raises ValueError if its hash is wrong."""
    bodies = {
        CODINGS[suffix]: (folder / f"{name}.{suffix}").read_bytes() for suffix in listed.encodings
    }
    if "gzip" in bodies:
        raw = bodies["identity"] = gzip.decompress(bodies["gzip"])
        if hashlib.sha256(raw).hexdigest() != listed.sha256:
            raise ValueError(f"the hash of {name} differs from {LISTED}")
    return bodies
