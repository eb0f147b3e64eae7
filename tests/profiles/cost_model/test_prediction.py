"""Predictions of time and memory, computed by hand for a device whose rates are round numbers."""

import math

import msgspec
import pytest

from made_calibration import CALIBRATION, NODE_S, PORT_S, RUN_S, STEP_S
from profiles.cost_model.memory_rule import IN_BROWSER, RELATIVE_ERROR, UNCALIBRATED
from profiles.cost_model.operation_rates import Rates
from profiles.cost_model.prediction import TIME_ERROR, TimeModel, predict
from profiles.cost_model.workload import FormWork, Operation, SignatureWork, Workload
from profiles.documents.calibration_record import MemoryOverhead, Timing
from refusals import refused

KB = 1000


def signature(*operations: Operation, **changes: object) -> SignatureWork:
    values: dict[str, object] = {
        "name": "train",
        "operations": operations,
        "nodes": 2,
        "ports": 5,
        "state": 40 * KB,
        "inputs": 50 * KB,
        "outputs": 41 * KB,
        "arena": 300 * KB,
        **changes,
    }
    return SignatureWork(**values)  # type: ignore[arg-type]


def workload(*training: SignatureWork, recording: tuple[SignatureWork, ...] = ()) -> Workload:
    return Workload(recording=recording, training=training, state=60 * KB, down=0, up=0)


def test_time_of_two_operators() -> None:
    # A product of 32 x 64 x 64 at 1 GMAC/s, an addition of 2048 numbers at 0.5 G/s.
    step = signature(Operation("product", (1, 32, 64, 64)), Operation("arithmetic", (2048,)))
    time = TimeModel(CALIBRATION).batch([step])
    by_hand = RUN_S + 5 * PORT_S + 32 * 64 * 64 * 1e-9 + 2048 * 2e-9
    assert time.value == pytest.approx(by_hand, rel=1e-6)
    # Rates that are the same everywhere leave no doubt but the model's own.
    assert time.upper == pytest.approx((1 + TIME_ERROR) * by_hand, rel=1e-3)


def test_fewer_timed_cases_widen_the_bound() -> None:
    step = signature(Operation("product", (1, 32, 64, 64)))
    few = msgspec.structs.replace(CALIBRATION, timed_share=0.25)
    whole, wide = (TimeModel(calibration).batch([step]) for calibration in (CALIBRATION, few))
    assert wide.value == whole.value
    assert wide.upper == pytest.approx((1 + 4 * TIME_ERROR) * wide.value, rel=1e-3)


def test_a_device_with_blocked_convolutions_runs_the_blocked_form() -> None:
    plain = (Operation("convolution", (32, 16, 64, 16, 9)),)
    blocked = (Operation("blocked", (32, 16, 64, 16, 9)), Operation("scaled", (1000,), 2))
    step = signature(*plain, blocked=blocked)
    own = [timing for timing in CALIBRATION.timings if timing.kind == "convolution"]
    extra = [Timing("blocked", timing.sizes, timing.seconds / 2) for timing in own]
    extra += [Timing("scaled", (n,), n * 3e-9) for n in (1, 1000, 1_000_000)]
    with_blocks = msgspec.structs.replace(CALIBRATION, timings=(*CALIBRATION.timings, *extra))
    around = RUN_S + 5 * PORT_S
    macs = 32 * 16 * 64 * 16 * 9
    assert TimeModel(CALIBRATION).batch([step]).value == pytest.approx(
        around + macs * 1e-9, rel=1e-3
    )
    time = TimeModel(with_blocks).batch([step]).value
    assert time == pytest.approx(around + macs * 0.5e-9 + 2 * 1000 * 3e-9, rel=1e-3)
    # A submodel without a blocked form runs as it is.
    same = TimeModel(with_blocks).batch([signature(*plain)]).value
    assert same == pytest.approx(around + macs * 1e-9, rel=1e-3)


def test_a_device_that_gains_runs_winograds_form() -> None:
    """Also its memory is that of this form, unless it may exceed the budget."""
    product = Operation("product", (16, 32, 64, 64))
    faster = FormWork(operations=(product,), nodes=7, arena=500 * KB)
    slower = msgspec.structs.replace(faster, operations=(Operation("product", (160, 32, 64, 64)),))
    convolution = Operation("convolution", (32, 16, 64, 16, 9))
    plain = workload(signature(convolution))
    work = workload(signature(convolution, winograd=faster))
    own, found = (predict(one, CALIBRATION) for one in (plain, work))
    assert own.step is not None
    assert found.step is not None
    assert found.step.value == pytest.approx(RUN_S + 5 * PORT_S + 16 * 32 * 64 * 64e-9, rel=1e-3)
    more = (500 - 300) * KB + 5 * UNCALIBRATED.node_bytes
    assert found.memory.value - own.memory.value == more
    assert predict(work, CALIBRATION, found.memory.upper) == found
    assert predict(work, CALIBRATION, found.memory.upper - 1) == own
    assert predict(workload(signature(convolution, winograd=slower)), CALIBRATION) == own
    # A page has no limit to its memory, and devices with blocked convolutions run those.
    web = msgspec.structs.replace(CALIBRATION, memory=None, runtime="onnxruntime-web 1.30.0")
    assert predict(work, web, 1.0) == predict(work, web)
    timed = [one for one in CALIBRATION.timings if one.kind == "convolution"]
    extra = [Timing("blocked", one.sizes, one.seconds) for one in timed]
    extra += [Timing("scaled", (n,), n * 1e-9) for n in (1, 1000)]
    blocked = msgspec.structs.replace(CALIBRATION, timings=(*CALIBRATION.timings, *extra))
    assert predict(work, blocked) == predict(plain, blocked)


def test_repetitions_views_and_loops() -> None:
    inside = (Operation("loop", (256,)), Operation("arithmetic", (1000,), 256))
    step = signature(*inside, Operation("view", (1,), 3), times=5)
    time = TimeModel(CALIBRATION).batch([step])
    once = RUN_S + 5 * PORT_S + 256 * STEP_S + 256 * 1000 * 2e-9 + 3 * NODE_S
    assert time.value == pytest.approx(5 * once, rel=1e-6)


def test_a_calibration_that_lacks_a_kind_is_refused() -> None:
    some = tuple(t for t in CALIBRATION.timings if t.kind not in ("sigmoid", "padding"))
    with refused("calibration.missing-kinds", "padding, sigmoid", kinds=["padding", "sigmoid"]):
        TimeModel(msgspec.structs.replace(CALIBRATION, timings=some))


def test_memory_of_training() -> None:
    overhead = MemoryOverhead(idle_bytes=1000 * KB, session_bytes=200 * KB, node_bytes=1 * KB)
    calibration = msgspec.structs.replace(CALIBRATION, memory=overhead)
    steps = (
        signature(),
        signature(name="factor_step", inputs=45 * KB, outputs=44 * KB, arena=100 * KB, nodes=7),
    )
    memory = predict(workload(*steps), calibration).memory
    # Shared state, the larger batch with its results, both arenas, nine nodes, one session.
    growth = (60 + max(10 + 41, 5 + 44) + 300 + 100 + 9 + 200) * KB
    assert memory.value == 1000 * KB + growth
    assert memory.upper == pytest.approx(1000 * KB + growth * (1 + RELATIVE_ERROR))


def test_a_page_copies_what_enters_and_leaves() -> None:
    web = msgspec.structs.replace(
        CALIBRATION, memory=None, runtime="onnxruntime-web 1.30.0", byte_s=2e-9
    )
    need = predict(workload(signature()), web)
    copies = (IN_BROWSER.array_copies - 1) * (50 + 41) * KB
    growth = (60 + 10 + 41 + 300) * KB + copies
    growth += 2 * IN_BROWSER.node_bytes + IN_BROWSER.session_bytes
    assert need.memory.value == IN_BROWSER.idle_bytes + growth
    assert need.step is not None
    assert need.step.value == pytest.approx(RUN_S + 5 * PORT_S + (50 + 41) * KB * 2e-9, rel=1e-6)


def test_memory_of_a_stage_that_needs_more_than_training() -> None:
    stage = signature(name="forward_0", inputs=70 * KB, outputs=80 * KB, arena=900 * KB, nodes=3)
    predicted = predict(workload(signature(), recording=(stage,)), None)
    growth = (70 + 80 + 900) * KB + 3 * UNCALIBRATED.node_bytes + UNCALIBRATED.session_bytes
    assert predicted.memory.value == UNCALIBRATED.idle_bytes + growth
    assert predicted.step is None


def test_the_upper_bound_of_memory_is_above_the_idle_agent() -> None:
    predicted = predict(workload(signature()), CALIBRATION).memory
    growth = predicted.value - UNCALIBRATED.idle_bytes
    assert predicted.upper == pytest.approx(UNCALIBRATED.idle_bytes + growth * (1 + RELATIVE_ERROR))


def test_rates_between_timings_of_one_size() -> None:
    rates = Rates([Timing("unary", (100,), 1e-6), Timing("unary", (10_000,), 1e-4)])
    assert rates.seconds((1000,)) == pytest.approx(1e-5)
    assert rates.seconds((10,)) == pytest.approx(1e-6)
    assert rates.seconds((40_000,)) == pytest.approx(4e-4)


def test_rates_at_a_timing_are_what_was_timed() -> None:
    sizes = [(1, 2**a, 2**b, 64) for a in range(3, 9) for b in range(3, 9)]
    timings = [Timing("product", s, math.prod(s) * (1e-9 + 1e-7 / s[1])) for s in sizes]
    rates = Rates(timings)
    for timing in timings:
        assert rates.seconds(timing.sizes) == pytest.approx(timing.seconds, rel=0.15)
    between = (1, 90, 90, 64)
    true = math.prod(between) * (1e-9 + 1e-7 / 90)
    assert rates.seconds(between) == pytest.approx(true, rel=0.15)
    assert 0 < rates.doubt < 0.3
