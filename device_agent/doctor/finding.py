"""The result of one check."""

from typing import Literal, Self

from device_agent.formats.manifest import Struct

Result = Literal["PASS", "FAIL", "SKIP"]


class Finding(Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes:
        check: Name of the check.
        result: Whether it passed, failed or does not apply.
        detail: What was found.
        remedy: What to do.
    """

    check: str
    result: Result
    detail: str
    remedy: str | None = None

    @classmethod
    def ok(cls, check: str, detail: str) -> Self:
        """A check that passed."""
        return cls(check=check, result="PASS", detail=detail)

    @classmethod
    def fail(cls, check: str, detail: str, remedy: str) -> Self:
        """A check that failed: this device cannot work."""
        return cls(check=check, result="FAIL", detail=detail, remedy=remedy)

    @classmethod
    def skip(cls, check: str, detail: str, remedy: str | None = None) -> Self:
        """A check that does not apply, or that cannot be made."""
        return cls(check=check, result="SKIP", detail=detail, remedy=remedy)
