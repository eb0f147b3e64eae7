"""Failures in a row of one submodel: counted across processes, and only for the right reasons."""

import os
import signal
from pathlib import Path

import pytest

from commands import run_code
from device_agent.federation.training_attempts import (
    KILLED,
    Attempts,
    TrainingFailedError,
    wait_after,
)
from profiles.errors import DataError, DoesNotFitError, LimitError, UpdateError

KILLED_WHILE_TRAINING = """
import os, signal, sys
from pathlib import Path
from device_agent.federation.training_attempts import Attempts

with Attempts(Path(sys.argv[1])).attempt("full", 1):
    os.kill(os.getpid(), signal.Signals[sys.argv[2]])
"""


def end_in_training(path: Path, name: str) -> int:
    return run_code(KILLED_WHILE_TRAINING, path, name).code


def failing(attempts: Attempts, error: Exception, submodel: str = "full") -> int:
    with pytest.raises(TrainingFailedError) as failed, attempts.attempt(submodel, 7):
        raise error
    assert (failed.value.round, failed.value.failure.reason) == (7, str(error))
    return failed.value.failure.failures


def test_failures_add_up_until_a_success_or_another_submodel(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "a.json")
    assert [failing(attempts, LimitError("full up")) for _ in range(3)] == [1, 2, 3]
    assert failing(attempts, LimitError("full up"), "slice:0.2") == 1
    with attempts.attempt("slice:0.2", 8):
        pass
    assert not (tmp_path / "a.json").exists()
    assert failing(attempts, LimitError("full up"), "slice:0.2") == 1


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (DoesNotFitError("too large"), True),
        (LimitError("ran out"), False),
        (UpdateError(""), False),
    ],
)
def test_a_failure_that_would_repeat_is_final(
    tmp_path: Path, error: Exception, final: bool
) -> None:
    attempts = Attempts(tmp_path / "a.json")
    with pytest.raises(TrainingFailedError) as failed, attempts.attempt("full", 7):
        raise error
    assert failed.value.final is final


@pytest.mark.parametrize("error", [DataError("no data"), KeyboardInterrupt(), SystemExit(0)])
def test_errors_that_are_not_the_submodels_fault(tmp_path: Path, error: BaseException) -> None:
    attempts = Attempts(tmp_path / "a.json")
    failing(attempts, LimitError("full up"))
    with pytest.raises(type(error)), attempts.attempt("full", 8):
        raise error
    attempts.check_last()
    assert failing(attempts, LimitError("full up")) == 2


def test_kills_are_found_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for count in (1, 2, 3):
        assert end_in_training(path, "SIGKILL") == -signal.SIGKILL
        with pytest.raises(TrainingFailedError) as failed:
            Attempts(path).check_last()
        failure = failed.value.failure
        assert (failure.submodel, failure.failures, failure.reason) == ("full", count, KILLED)
        Attempts(path).check_last()


def test_an_interrupt_and_a_reboot_are_not_failures(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    end_in_training(path, "SIGINT")
    Attempts(path).check_last()
    assert end_in_training(path, "SIGKILL") == -signal.SIGKILL
    Attempts(path, boot=lambda: "the next boot").check_last()
    Attempts(path).check_last()


def test_a_damaged_file_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(os.urandom(20))
    attempts = Attempts(tmp_path / "a.json")
    attempts.check_last()
    assert failing(attempts, LimitError("full up")) == 1


def test_waits_grow_to_ten_minutes() -> None:
    assert [wait_after(n) for n in (1, 2, 3, 7, 1000)] == [10, 20, 40, 600, 600]


def test_a_report_names_no_folder_and_no_number_of_the_data(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path / "a.json")
    error = UpdateError("In {data}, x[3] is {number:g}.", code="x.y", data="/ann/a.csv", number=7e4)
    with pytest.raises(TrainingFailedError) as failed, attempts.attempt("full", 7):
        raise error
    assert str(failed.value) == "In /ann/a.csv, x[3] is 70000."  # in the owner's own log
    assert failed.value.failure.reason == "In a.csv, x[3] is '...'."
