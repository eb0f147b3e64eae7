"""The result of one check, and a wrapper that turns exceptions of a check into results."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from device_agent.system.system_libraries import DEBIAN_PACKAGES, missing_library
from profiles.errors import EdgeTailorError
from profiles.project_urls import issues_url
from profiles.text_formatting import one_line

Result = Literal["PASS", "FAIL", "SKIP"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check.
        result: Whether it passed, failed or does not apply.
        detail: What the check observed.
        remedy: What the user should do.
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
    def fail(cls, check: str, detail: str, remedy: str | None) -> Self:
        """A failed check: this device cannot work. If `remedy` is None, `detail` has the remedy."""
        return cls(check=check, result="FAIL", detail=detail, remedy=remedy)

    @classmethod
    def skip(cls, check: str, detail: str, remedy: str | None = None) -> Self:
        """A check that does not apply, or that is not possible."""
        return cls(check=check, result="SKIP", detail=detail, remedy=remedy)


def isolated(check: str, make: Callable[[], Finding | Iterable[Finding]]) -> Iterator[Finding]:
    """Call `make` and yield its findings. An exception is reported as a failure of `check`."""
    try:
        result = make()
        yield from [result] if isinstance(result, Finding) else result
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except EdgeTailorError as error:
        yield Finding.fail(check, str(error), None)
    except BaseException as error:  # a library that is broken may raise anything
        said = one_line(f"{type(error).__name__}: {error}")
        remedy = f"please report this line at {issues_url()}"
        if isinstance(error, ImportError):
            remedy = loading_remedy(str(error), (error.name or "edgetailor").partition(".")[0])
        yield Finding.fail(check, f"cannot be checked: {said}", remedy)


def loading_remedy(said: str, package: str) -> str:
    """The remedy for a `package` that does not load. `said` is the message of the ImportError."""
    missing = missing_library(said)
    if missing is None:
        return f"reinstall it: pip install --force-reinstall {package}"
    known = DEBIAN_PACKAGES.get(missing)
    how = f"; on Debian: sudo apt install {known}" if known else ""
    return f"install the system library {missing}{how}"
