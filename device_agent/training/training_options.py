"""Options of one training."""

from dataclasses import dataclass

AUTO = "auto"
"""As the runtime: the one that trains the bundle fastest on this device, see `fastest_runtime`."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train a bundle. One object is handed on from the command to the schedule interpreter.

    Attributes:
        runtime: Library that runs ONNX bundles: "onnxruntime", "openvino", or AUTO for the one
            that is faster here. None means onnxruntime.
        threads: Threads of the runtime. 0 means one for each core.
        seed: Seed for the order of the samples and for dropout. With one thread, the same seed
            gives the same update, bit for bit.
        validation: Share of the samples, in [0, 1), that is held out and evaluated
            after each epoch.
        max_memory: Bytes of memory that this process may use. None means no limit of the owner's.
    """

    runtime: str | None = None
    threads: int = 0
    seed: int = 0
    validation: float = 0.0
    max_memory: int | None = None


ROUND_SEEDS = 100003
"""Seeds of a device lie this far apart, so that no two of its rounds share one with another's."""


def round_seed(seed: int, round_: int) -> int:
    """The seed of the round `round_` (from 1) of a device that has `seed`.

    Each round needs another order of the samples, and each device's rounds other seeds.
    """
    return seed * ROUND_SEEDS + round_


DEFAULT_OPTIONS = TrainingOptions()
