"""The calibration of a device that does not exist: its rates are round and the same everywhere."""

from profiles.cost_model.prediction import TIMED
from profiles.cost_model.workload import PRODUCTS
from profiles.documents.calibration_record import Calibration, Timing
from profiles.documents.device_profile import DeviceProfile

RUN_S, PORT_S, NODE_S, STEP_S = 1e-4, 1e-5, 1e-6, 1e-5
MAC_S, NUMBER_S = 1e-9, 2e-9
"""Of a multiply-accumulate, and of one number of anything else."""
MATRICES = [(1, 2**a, 2**b, 2**c) for a in (2, 5, 8) for b in (2, 5, 8) for c in (2, 5, 8)]
NUMBERS = (1, 1000, 1_000_000)


def timings() -> list[Timing]:
    """A few of every kind."""
    timings = []
    for sizes in MATRICES:
        seconds = sizes[1] * sizes[2] * sizes[3] * MAC_S
        timings += [Timing(kind, sizes, seconds) for kind in ("product", "accumulated")]
        timings += [
            Timing(kind, (*sizes, 9), 9 * seconds) for kind in ("convolution", "transposed")
        ]
    for kind in sorted(TIMED - {*PRODUCTS}):
        two = kind in ("broadcast", "reduction")
        timings += [Timing(kind, (n, n) if two else (n,), n * NUMBER_S) for n in NUMBERS]
    return timings


CALIBRATION = Calibration(
    runtime="onnxruntime 1.31.1",
    threads=1,
    timings=tuple(timings()),
    run_s=RUN_S,
    port_s=PORT_S,
    node_s=NODE_S,
    loop_step_s=STEP_S,
    memory=None,
)
DEVICE = DeviceProfile(
    name="made-up",
    date="2026-11-01",
    memory_bytes=512 * 10**6,
    calibration=CALIBRATION,
    sources={"memory_bytes": "a test"},
)
