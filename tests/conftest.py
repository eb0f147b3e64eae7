"""Fresh random data in every run, and the seed to repeat it with; one cache of graphs for a run."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest

from commands import warm_context
from log_messages import logged
from parameters import ALL
from parameters import SEED as VARIABLE
from refusals import ErrorAudit

AUDIT = ErrorAudit()
CACHE, CACHES = "EDGETAILOR_CACHE", "XDG_CACHE_HOME"
TEMPORARY = "PYTEST_DEBUG_TEMPROOT"  # where pytest makes the folders of `tmp_path`
MEMORY, NEEDED = "/dev/shm", 2 << 30

# No test asserts a time: other processes on the machine decide how long an example takes.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    AUDIT.install()
    gc.disable()  # until all is collected: nearly everything that is loaded stays
    # Fresh for each run, so that no test sees graphs of other code. Workers inherit the variable
    # from the process that starts them, and so share the folder.
    if not hasattr(config, "workerinput"):
        # In memory, where flushing a file to disk costs nothing: coordinators flush thousands. Long
        # tests need much room, and one makes device files.
        if (
            config.option.markexpr != "long"
            and os.path.isdir(MEMORY)
            and shutil.disk_usage(MEMORY).free > NEEDED
        ):
            os.environ.setdefault(TEMPORARY, MEMORY)
        os.environ[CACHE] = tempfile.mkdtemp(
            prefix="edgetailor-tests-", dir=os.environ.get(TEMPORARY)
        )
        os.environ[CACHES] = os.path.join(os.environ[CACHE], "user")
    if config.option.markexpr == "long":
        os.environ[ALL] = "yes"
    # In the environment, so that all workers of one run draw from the same seed.
    os.environ.setdefault(VARIABLE, str(np.random.SeedSequence().generate_state(1)[0]))
    # A shell's background jobs ignore Ctrl-C, and so would the processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        # First: if a simulation of a test starts this process, it has not what commands need.
        warm_context()
    # All that is loaded by now stays: without it, each full collection reads torch's objects too.
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)  # exports make many objects that live until their end


def pytest_report_header() -> str:
    return f"random data: {VARIABLE}={os.environ[VARIABLE]}"


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of this run's random data; set EDGETAILOR_TEST_SEED to repeat a run."""
    value = int(os.environ[VARIABLE])
    print(f"repeat with {VARIABLE}={value}")
    return value


@pytest.fixture(autouse=True)
def complete_errors() -> Iterator[None]:
    """Every error that a test meets is one that people and programs can read."""
    AUDIT.faults.clear()
    yield
    assert not AUDIT.faults


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages that the agent's modules log from here to the end of the test."""
    with logged() as messages:
        yield messages
