"""Trials of runtimes keep to the limits of memory."""

from pathlib import Path

import pytest

from device_agent.formats.bundle import Bundle
from device_agent.training.memory_fit import needed_bytes
from device_agent.training.memory_limits import DATA, OPTION, SPACE, Ceiling, Usage
from device_agent.training.runtime_option import with_runtime
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials.fastest_runtime import beside, with_fastest_runtime
from runtime_trials import IDLE, LONG, OTHER, OWN, Made, choose, never

pytest.importorskip("openvino", reason="needs the extra [openvino]")


def test_memory_limits_hold_for_trials_and_for_trainings(
    full: Bundle, file: Path, said: list[str]
) -> None:
    need = needed_bytes(with_runtime(full, "openvino").manifest, False)
    assert need is not None

    def limit(more: int) -> list[Ceiling]:
        return [Ceiling(OPTION, IDLE.resident + need[0] + more, IDLE.resident)]

    options = TrainingOptions(threads=1, max_memory=10**9)
    assert choose(full, file, never, limits=limit(-1), options=options) == OWN
    assert OPTION in said[0]
    # It would fit alone, but a trial is beside the agent.
    assert choose(full, file, never, limits=limit(IDLE.resident - 1), options=options) == OWN
    assert not file.exists()
    tries = Made({OWN: 2.0, OTHER: 1.0})
    assert choose(full, file, tries, limits=limit(IDLE.resident), options=options) == OTHER
    assert {request.max_memory for request in tries.tried} == {10**9 - IDLE.resident}
    assert choose(full, file, never, limits=limit(0), options=options) == OTHER
    assert choose(full, file, never, limits=limit(-1), options=options) == OWN


def test_limits_of_each_process_are_not_shared() -> None:
    limits = [Ceiling(name, 100, 7) for name in (OPTION, SPACE, DATA)]
    idle = Usage(resident=20, space=500, data=300)
    assert [limit.left for limit in beside(limits, idle)] == [73, 93, 93]


def test_without_limits_half_of_the_memory_is_left(
    full: Bundle, file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "device_agent.training.trials.fastest_runtime.available_bytes", lambda: 200_000_000
    )
    options = TrainingOptions(threads=1)
    chosen = with_fastest_runtime(full, LONG, options, [], Usage.now(), file, measure=never)
    assert chosen.manifest.runtime == OWN
    assert "half of the available memory" in said[0]
