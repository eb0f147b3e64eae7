"""How often training the present submodel has failed on end, a kill of the process included.

What is kept in the state folder outlives the process, so that one that is killed for its memory
again and again is noticed by the next one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Struct, encode
from device_agent.formats.protocol import SubmodelFailure
from profiles.errors import DoesNotFitError, LimitError, UpdateError
from profiles.json_decoding import MalformedError, decode_json

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KILLED = "its process was killed; the system's log tells whether for its memory"
ENOUGH = 3
"""After so many failures on end a smaller submodel is asked for, after a final one at once."""
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 600.0


class Record(Struct, frozen=True, kw_only=True):
    """All of attempts.json; `boot` is the boot of the machine in which a training is under way."""

    submodel: str
    round: int
    failures: int = 0
    reason: str = ""
    boot: str | None = None


class FailedError(Exception):
    """Training failed, and that is written down: `failure` with all before it on end.

    A `final` one would be the same the next time.
    """

    def __init__(self, record: Record, final: bool = False) -> None:
        super().__init__(record.reason)
        self.final = final
        self.round = record.round
        self.failure = SubmodelFailure(
            submodel=record.submodel, failures=record.failures, reason=record.reason
        )


class Attempts:
    """The file `path`; `boot` gives an id that changes when the machine boots."""

    def __init__(self, path: Path, boot: Callable[[], str] | None = None) -> None:
        self._path = path
        self._boot = boot or _boot_id

    @contextmanager
    def attempt(self, submodel: str, round_: int) -> Iterator[None]:
        """A training of `submodel`. Raises FailedError where it fails for what it is.

        An end in order, by a signal or for any other reason, counts neither way.
        """
        found = self._read()
        before = found.failures if found is not None and found.submodel == submodel else 0
        known = Record(submodel=submodel, round=round_, failures=before)
        self._write(replace(known, boot=self._boot()))
        try:
            yield
        except (LimitError, UpdateError) as error:
            failed = replace(known, failures=before + 1, reason=str(error))
            self._write(failed)
            raise FailedError(failed, isinstance(error, DoesNotFitError)) from error
        except BaseException:
            self._write(known)
            raise
        self.forget()

    def check_last(self) -> None:
        """Raise FailedError where the last training was cut off by a kill of its process."""
        found = self._read()
        if found is None or found.boot is None:
            return
        if found.boot != self._boot():  # a machine that lost its power proves nothing
            self._write(replace(found, boot=None))
            return
        failed = replace(found, failures=found.failures + 1, reason=KILLED, boot=None)
        self._write(failed)
        raise FailedError(failed)

    def forget(self) -> None:
        """Begin to count anew."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> Record | None:
        try:
            return decode_json(self._path.read_bytes(), Record)
        except (OSError, MalformedError):
            return None

    def _write(self, record: Record) -> None:
        write_file(self._path, encode(record))


def wait_after(failures: int) -> float:
    """Seconds to wait before the next attempt, after so many failures on end."""
    return min(FIRST_WAIT_S * 2.0 ** (failures - 1), LONGEST_WAIT_S)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
