"""The agent on an emulated ARM board beside this machine: `make test-arm64`.

`write FOLDER` exports a bundle of every family in both formats and trains it here. `check FOLDER PYTHON`,
which runs under qemu-user, trains them there with every runtime and compares, continues an interrupted
training, and profiles and calibrates. PYTHON starts a process of the same emulated processor.
"""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from device_agent.formats.update import TENSORS
from device_agent.profiling.calibration import calibrate
from device_agent.profiling.profiler import profile_bundle
from device_agent.training.schedule_interpreter import OnEpoch, ignore_epoch
from device_agent.training.standalone_training import train

SPECS = {
    "full": "full",
    "low-rank": "low-rank:0.5",
    "slice": "slice:residual.conv",
    "width": "width:0.5",
    "cp": "cp:2.0",
    "pfedme": "pfedme",
}
TOLERANCE = 1e-5
"""Of a tensor's largest number: float32 sums in another order, through two epochs."""
ADAM_TOLERANCE = 1e-2
"""Of the loss of `cp`: Adam divides a gradient by its own size, so one that is zero but for rounding
becomes a step of full length."""


def write(folder: Path) -> None:
    import torch

    from bundles import TRAINING
    from edgetailor import split
    from exporters.export import export
    from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
    from toolkit.submodels.global_model import from_model

    torch.manual_seed(0)
    model = smooth_cnn()
    source = from_model(model)
    order = np.random.default_rng(0)
    x = order.standard_normal((18, *INPUT_SHAPE), dtype=np.float32)
    np.savez(folder / "local.npz", x=x, y=order.integers(CLASSES, size=18))
    for name, spec in SPECS.items():
        submodel = split(model, spec, INPUT_SHAPE, TRAINING)
        values, base = submodel.cut(source), source.fingerprint()
        for format in ("onnx", "tflite"):
            bundle = folder / f"{name}.{format}"
            export(submodel.program, values, bundle, base=base, format=format, check=False)
            trained(bundle, folder / f"{name}.{format}.expected")


def trained(
    bundle: Path, out: Path, runtime: str | None = None, on_epoch: OnEpoch = ignore_epoch
) -> tuple[float, dict[str, np.ndarray]]:
    """Train `bundle`; return the last loss and the update's tensors."""
    data = bundle.parent / "local.npz"
    options = {"runtime": runtime, "threads": 1, "on_epoch": on_epoch, "force": True}
    record = train(bundle, str(data), out, **options)
    return record.loss_last, load_file(out / TENSORS)


def difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    assert ours.keys() == theirs.keys()
    return max(
        float(np.abs(ours[name] - value).max()) / max(1e-3, float(np.abs(value).max()))
        for name, value in theirs.items()
    )


def check(folder: Path) -> None:
    import msgspec

    from device_agent.formats.update import UpdateRecord

    for name in SPECS:
        for format, runtime in (("onnx", None), ("onnx", "openvino"), ("tflite", None)):
            bundle, expected = folder / f"{name}.{format}", folder / f"{name}.{format}.expected"
            loss, tensors = trained(bundle, folder / f"{name}.{format}.{runtime}", runtime)
            record = msgspec.json.decode((expected / "update.json").read_bytes(), type=UpdateRecord)
            off = abs(loss - record.loss_last) / record.loss_last
            if name != "cp":
                off = max(off, difference(tensors, load_file(expected / TENSORS)))
            print(f"{name}, {runtime or format}: {off:.1e}", flush=True)
            assert off <= (ADAM_TOLERANCE if name == "cp" else TOLERANCE)
    for runtime in ("onnxruntime", "openvino"):
        resume(folder, runtime)
        found = profile_bundle(folder / "full.onnx", 1, runs=5, runtime=runtime)
        print(f"profile, {found.machine.runtime}: {1e3 * found.train.median_s:.0f} ms", flush=True)
    print(f"calibrate: {len(calibrate(1, length_s=5.0).timings)} timings")


class Stopped(KeyboardInterrupt):
    """Stands for the end of the process."""


def stop(epoch: int, of: int, loss: float) -> None:
    if epoch == 1:
        raise Stopped


def resume(folder: Path, runtime: str) -> None:
    """Interrupt and continue a training with recordings: its update is the same, bit for bit."""
    bundle, out = folder / "slice.onnx", folder / f"stopped.{runtime}"
    try:
        trained(bundle, out, runtime, stop)
    except Stopped:
        _, found = trained(bundle, out, runtime)
    _, whole = trained(bundle, folder / f"whole.{runtime}", runtime)
    assert all(np.array_equal(found[name], value) for name, value in whole.items())
    print(f"resumed, {runtime}: the same", flush=True)


if __name__ == "__main__":
    job, folder = sys.argv[1], Path(sys.argv[2])
    if job == "write":
        write(folder)
    else:
        assert platform.machine() == "aarch64"
        # Measurements start processes of this Python, which the host cannot run by itself.
        sys.executable = sys.argv[3]
        check(folder)
