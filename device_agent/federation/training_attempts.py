"""Counts failed trainings of the current submodel, including trainings whose process was killed.

The count is stored in the state folder. If the system kills the agent because memory ran out, the
next process detects this and counts it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from device_agent.federation.stop_report import reported
from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Struct, encode
from device_agent.formats.protocol.rounds import DIVERGED, SubmodelFailure
from profiles.errors import DoesNotFitError, EdgeTailorError, LimitError, UpdateError
from profiles.json_decoding import MalformedError, decode_json

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KILLED = "its process was killed; the system's log says whether memory ran out"
MAX_FAILURES = 3
"""After this many failures in a row the agent asks for a smaller submodel. A final failure is
reported at once."""
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 600.0


class Record(Struct, frozen=True, kw_only=True):
    """The content of attempts.json.

    Attributes:
        submodel: The submodel whose failures are counted.
        round: The round of the last training.
        failures: Failures in a row.
        reason: Message of the last failure.
        boot: Id of the boot during which a training is running; None if no training is running.
    """

    submodel: str
    round: int
    failures: int = 0
    reason: str = ""
    boot: str | None = None


class TrainingFailedError(Exception):
    """A training failed and the failure was recorded.

    Attributes:
        final: Whether the next attempt would fail in the same way.
        round: The round of the training.
        failure: The report for the coordinator, with the number of failures in a row.
    """

    def __init__(
        self, record: Record, final: bool = False, code: str = "", told: str | None = None
    ) -> None:
        super().__init__(record.reason)
        self.final = final
        self.round = record.round
        self.failure = SubmodelFailure(
            submodel=record.submodel,
            failures=record.failures,
            reason=record.reason if told is None else told,
            round=record.round,
            code=code,
        )


class Attempts:
    """The record of attempts in a file.

    Args:
        path: The file.
        boot: Returns an id that changes when the machine boots (default: the kernel's).
    """

    def __init__(self, path: Path, boot: Callable[[], str] | None = None) -> None:
        self._path = path
        self._boot = boot or _boot_id

    @contextmanager
    def attempt(self, submodel: str, round_: int) -> Iterator[None]:
        """Record a training of `submodel`, which runs inside the block.

        Only LimitError and UpdateError count as failures. If the user, a signal such as SIGTERM or
        another error ends the training, the count does not change.

        Raises:
            TrainingFailedError: The block raised LimitError or UpdateError.
        """
        before = self.failures(submodel)
        known = Record(submodel=submodel, round=round_, failures=before)
        # If the process is killed in the block, the boot id stays in the file: see check_last.
        self._write(replace(known, boot=self._boot()))
        try:
            yield
        except (LimitError, UpdateError) as error:
            failed = replace(known, failures=before + 1, reason=str(error))
            self._write(failed)
            # A repetition has the same weights and the same order, so it would diverge as well.
            final = isinstance(error, DoesNotFitError) or error.code in DIVERGED
            raise TrainingFailedError(failed, final, error.code, reported(error)) from error
        except BaseException:
            self._write(known)
            raise
        self.forget()

    def check_last(self) -> None:
        """Find out whether the process of the last training was killed.

        Raises:
            TrainingFailedError: The process was killed.
        """
        record = self._read()
        if record is None or record.boot is None:
            return
        # The machine has booted since then. A power cut is not a failure of the submodel.
        if record.boot != self._boot():
            self._write(replace(record, boot=None))
            return
        failed = replace(record, failures=record.failures + 1, reason=KILLED, boot=None)
        self._write(failed)
        raise TrainingFailedError(failed)

    def failures(self, submodel: str) -> int:
        """How many trainings of `submodel` failed in a row. Killed trainings count as failed."""
        record = self._read()
        return record.failures if record is not None and record.submodel == submodel else 0

    def forget(self) -> None:
        """Reset the count."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> Record | None:
        try:
            return decode_json(self._path.read_bytes(), Record)
        except (OSError, MalformedError):
            return None  # damaged: start to count again

    def _write(self, record: Record) -> None:
        write_file(self._path, encode(record))


def wait_after(failures: int) -> float:
    """How many seconds to wait before the next attempt if `failures` attempts in a row failed."""
    return min(FIRST_WAIT_S * 2.0 ** (failures - 1), LONGEST_WAIT_S)


def nothing_sent(failed: TrainingFailedError) -> EdgeTailorError:
    """The error if the agent could not send any update, because its trainings failed."""
    kind = UpdateError if isinstance(failed.__cause__, UpdateError) else LimitError
    return kind(
        "The last round is over, and no update was sent since this agent started. Training "
        "{submodel} failed in round {round}: {reason}",
        code="agent.nothing-sent",
        submodel=failed.failure.submodel,
        round=failed.round,
        reason=str(failed),
    )


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
