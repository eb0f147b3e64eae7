"""What one check of the doctor found."""

from typing import Literal, Self

from device_agent.formats.manifest import Struct

Result = Literal["PASS", "FAIL", "SKIP"]


class Finding(Struct, frozen=True, kw_only=True):
    """`check` passed, failed or could not be made: `detail` says how, `remedy` what to do."""

    check: str
    result: Result
    detail: str
    remedy: str | None = None

    @classmethod
    def ok(cls, check: str, detail: str) -> Self:
        """It is as it should be."""
        return cls(check=check, result="PASS", detail=detail)

    @classmethod
    def fail(cls, check: str, detail: str, remedy: str) -> Self:
        """It is not, and keeps this device from its work."""
        return cls(check=check, result="FAIL", detail=detail, remedy=remedy)

    @classmethod
    def skip(cls, check: str, detail: str, remedy: str | None = None) -> Self:
        """It does not apply here, or cannot be seen."""
        return cls(check=check, result="SKIP", detail=detail, remedy=remedy)
