"""The calibration of a device that does not exist: its rates are round and the same everywhere."""

from profiles.calibration import Calibration, Timing
from profiles.device import DeviceProfile

RUN_S, PORT_S, NODE_S, STEP_S = 1e-4, 1e-5, 1e-6, 1e-5
PRODUCTS = [(1, 2**a, 2**b, 2**c) for a in (2, 5, 8) for b in (2, 5, 8) for c in (2, 5, 8)]

CALIBRATION = Calibration(
    runtime="onnxruntime 1.31.1",
    threads=1,
    timings=(
        *(Timing("product", s, s[1] * s[2] * s[3] * 1e-9) for s in PRODUCTS),
        *(Timing("arithmetic", (n,), n * 2e-9) for n in (1, 1000, 1_000_000)),
        *(
            Timing("convolution", (1, *s[1:], 9), s[1] * s[2] * s[3] * 9 * 1e-9)
            for s in PRODUCTS
        ),
    ),
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
