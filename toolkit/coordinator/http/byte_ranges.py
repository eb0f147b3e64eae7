"""The part of a file that a request asks for (RFC 9110, section 14)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self

from toolkit.coordinator.refusals import RefusalError

PIECE = 1 << 18
"""How many bytes are read from a file at a time."""
_ONE_RANGE = re.compile(r"bytes=(\d{1,4000})-(\d{0,4000})")
"""Numbers with over 4,000 digits do not match, because `int` refuses much longer numbers."""


def etag(sha256: str) -> str:
    """The strong ETag of a file."""
    return f'"{sha256}"'


@dataclass(frozen=True)
class ByteRange:
    """A part of a file of `size` bytes: `length` bytes from `start` on.

    `whole` is true if the request named no range.
    """

    start: int
    length: int
    size: int
    whole: bool

    @classmethod
    def of(cls, range_: str | None, if_range: str | None, tag: str, size: int) -> Self:
        """The part of the file with the ETag `tag` that the headers Range and If-Range ask for.

        A header that is not a single range with a start is ignored, as the RFC allows. Raises
        RefusalError (416) for a range after the file's end.
        """
        match = _ONE_RANGE.fullmatch(range_ or "")
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not match or first > last or if_range not in (None, tag):
            return cls(0, size, size, whole=True)
        if first >= size:
            raise RefusalError(
                "The range starts at byte {start}, but the file has only {size_bytes} bytes: fetch "
                "the whole file.",
                status=416,
                code="client.range-after-end",
                size_bytes=size,
                start=first,
            )
        end = min(last + 1, size) if match[2] else size
        return cls(first, end - first, size, whole=False)

    @property
    def status(self) -> int:
        """The HTTP status of the answer."""
        return 200 if self.whole else 206

    @property
    def headers(self) -> dict[str, str]:
        """The headers that describe the body of the answer."""
        headers = {"Content-Length": str(self.length)}
        if not self.whole:
            end = self.start + self.length - 1
            headers["Content-Range"] = f"bytes {self.start}-{end}/{self.size}"
        return headers

    def pieces(self, opened: BinaryIO) -> Iterator[bytes]:
        """Yield the bytes of the range. Closes the file at the end."""
        left = self.length
        with opened:
            opened.seek(self.start)
            while left and (piece := opened.read(min(PIECE, left))):
                left -= len(piece)
                yield piece
