"""The agent on an emulated ARM board beside this machine: `make test-arm64`.

`write FOLDER` exports a bundle of every family in both formats, trains it here in float64 and with
every runtime, and compares. `check FOLDER`, which runs under qemu-user, trains them there with
every runtime and compares with float64, continues a killed training, and profiles and calibrates.
"""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from device_agent.formats.bundle import open_bundle
from device_agent.formats.graph_forms import BLOCKS, WINOGRAD
from device_agent.formats.update import read_update
from device_agent.profiling.calibration import calibrate
from device_agent.profiling.profiler import profile_bundle
from device_agent.runtime.blocked_probe import best_form, block_size
from device_agent.runtime.graph_form import device_form
from device_agent.training import schedule_interpreter
from device_agent.training.form_choice import in_device_form
from device_agent.training.schedule_interpreter import OnEpoch, ignore_epoch
from device_agent.training.standalone_training import train
from profiles.cost_model.prediction import TimeModel

FORMATS = {"onnx": "onnx", "wide": "onnx", "tflite": "tflite"}
"""Formats of the bundles by their suffix. The model of `wide` has so many channels that graphs have
a form by Winograd's method."""
SPECS = {
    "full": "full",
    "low-rank": "low-rank:0.5",
    "slice": "slice:residual.conv",
    "width": "width:0.5",
    "cp": "cp:2.0",
    "pfedme": "pfedme",
}
TOLERANCE = 1e-5
"""Rounding of float32 through two epochs. Of `pfedme` it is 6e-6 to 8e-6, on x86-64 as well."""
ADAM_TOLERANCE = 1e-2
"""Of the loss of `cp`: Adam divides a gradient by its own size, so one that is zero but for
rounding becomes a step of full length."""


def write(folder: Path) -> None:
    """Export bundles, train them in float64, and compare this machine's updates with those."""
    import torch
    from exact_training import exact_sessions

    from bundles import TRAINING
    from edgetailor import split
    from exporters.export import export
    from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn, wide_cnn
    from toolkit.submodels.global_model import from_model

    torch.manual_seed(0)
    cnn = smooth_cnn(16, 16, 16)  # whole blocks of channels
    order = np.random.default_rng(0)
    x = order.standard_normal((18, *INPUT_SHAPE), dtype=np.float32)
    np.savez(folder / "local.npz", x=x, y=order.integers(CLASSES, size=18))
    for suffix, format in FORMATS.items():
        model = wide_cnn() if suffix == "wide" else cnn
        source = from_model(model)
        for name, spec in SPECS.items():
            submodel = split(model, spec, INPUT_SHAPE, TRAINING)
            values, base = submodel.cut(source), source.fingerprint()
            bundle = folder / f"{name}.{suffix}"
            export(submodel.program, values, bundle, base=base, format=format, check=False)
            with exact_sessions(submodel, values):
                trained(bundle, folder / f"{name}.{suffix}.expected")
            compare(bundle)


def trained(
    bundle: Path, out: Path, on_epoch: OnEpoch = ignore_epoch
) -> tuple[float, dict[str, np.ndarray]]:
    """Train `bundle`; return the last loss and the update's tensors."""
    data = bundle.parent / "local.npz"
    record = train(bundle, str(data), out, threads=1, on_epoch=on_epoch, force=True)
    return record.loss_last, read_update(out)[1]


def difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """The largest difference of two numbers, over 1 + the size of the number."""
    assert ours.keys() == theirs.keys()
    return max(
        float((np.abs(ours[name] - value) / (1 + np.abs(value))).max())
        for name, value in theirs.items()
    )


def check(folder: Path) -> None:
    """Train, resume, profile and calibrate on this machine."""
    form = folder / "full.onnx" / "train.onnx"
    assert len(list(form.parent.glob("train.nchwc*.onnx"))) == len(BLOCKS)
    assert (block_size(), best_form(form)) == (None, form)
    wide = in_device_form(open_bundle(folder / "full.wide"))
    assert device_form() == WINOGRAD
    assert wide.graph("train").name == "train.winograd.onnx"
    for suffix in FORMATS:
        for name in SPECS:
            compare(folder / f"{name}.{suffix}")
    resume(folder / "slice.onnx")
    profile = profile_bundle(folder / "full.onnx", 1, runs=5)
    assert profile.train.median_s > 0
    print(f"profiled with {profile.machine.runtime}", flush=True)
    calibration = calibrate(1, length_s=5.0)
    TimeModel(calibration)  # every kind of operation is timed
    assert "blocked" not in {timing.kind for timing in calibration.timings}
    print(f"calibrated: {len(calibration.timings)} timings", flush=True)


def compare(bundle: Path) -> None:
    """Train `bundle` here and compare the update with that in float64."""
    expected = bundle.with_name(f"{bundle.name}.expected")
    loss, tensors = trained(bundle, bundle.with_name(f"{bundle.name}.update"))
    record, theirs = read_update(expected)
    off = abs(loss - record.loss_last) / record.loss_last
    adam = bundle.stem == "cp"
    if not adam:
        off = max(off, difference(tensors, theirs))
    print(f"{bundle.name}: {off:.1e}", flush=True)
    assert off <= (ADAM_TOLERANCE if adam else TOLERANCE)


def resume(bundle: Path) -> None:
    """Kill a training with recordings and continue it: its update is the same, bit for bit."""
    out = bundle.with_name("killed")
    words = [sys.executable, __file__, "killed", str(bundle), str(out)]
    assert subprocess.run(words).returncode == -signal.SIGKILL
    heard: list[int] = []
    _, resumed = trained(bundle, out, lambda epoch, of, loss: heard.append(epoch))
    assert heard == [2]
    _, whole = trained(bundle, bundle.with_name("whole"))
    assert all(np.array_equal(resumed[name], value) for name, value in whole.items())
    print("resumed", flush=True)


def die(epoch: int, of: int, loss: float) -> None:
    """Kill this process after the first epoch."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    job, folder = sys.argv[1], Path(sys.argv[2])
    if job == "write":
        write(folder)
    elif job == "killed":
        schedule_interpreter.CHECKPOINT_S = 0.0
        trained(folder, Path(sys.argv[3]), die)
    else:
        assert platform.machine() == "aarch64"
        check(folder)
