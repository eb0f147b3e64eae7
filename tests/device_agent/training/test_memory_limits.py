"""Training under a memory limit: a small slice trains where the whole model does not fit."""

import json
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from bundles import BundleOf, everything, once, rewrite, write_data
from commands import Done, command, environment, run_code
from device_agent.formats.bundle import open_bundle
from device_agent.formats.update import read_update
from device_agent.runtime.onnx_runtime import OnnxSession
from device_agent.system.process_memory import status_field
from device_agent.training import memory_limits
from device_agent.training.memory_estimate import open_at_once
from device_agent.training.memory_limits import (
    AGENT_BYTES,
    STACK_BYTES,
    Usage,
    ceilings,
    cgroup_limit,
    enforce_memory_limit,
)
from device_agent.training.memory_refusal import needed_bytes
from device_agent.training.training_folder import CHECKPOINT, training_folder
from edgetailor import TrainingConfig, load_model, split
from exporters.export import export
from parameters import half_quick, some_long
from profiles.cost_model.memory_rule import RUNTIME_CODE_BYTES, START_VARIATION_BYTES
from profiles.errors import LimitError
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

SHAPE = (3, 32, 32)
MB = r"\d+\.\dMB"
PROGRAM = """
import json, resource, sys
given = json.loads(sys.argv.pop())
from device_agent.system import process_memory as memory
from device_agent.cli.console import run
import click, device_agent.training.standalone_training, device_agent.runtime.onnx_runtime
idle = {name: memory.status_field(name) for name in ("VmRSS", "VmSize")}
if given["space"]:
    limit = idle["VmSize"] + given["space"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
allowed = idle["VmRSS"] + given["allowed"] if given["allowed"] else None
memory.reset_peak()

@click.command()
def work():
    from pathlib import Path
    from device_agent.training.standalone_training import train
    train(Path(given["bundle"]), given["data"], Path("update"), threads=1, max_memory=allowed)
    click.echo(json.dumps({"idle": idle["VmRSS"], "peak": memory.peak_bytes()}))

run(work, "edgetailor-agent")
"""


ROUNDS = """
import sys
import device_agent.runtime.onnx_runtime
from pathlib import Path
from device_agent.formats.bundle import open_bundle
from device_agent.training.memory_refusal import needed_bytes
from device_agent.training.memory_limits import Usage
from profiles.cost_model.memory_rule import START_VARIATION_BYTES
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
bundle, data, threads = sys.argv[1:]
idle, kept = Usage.now(), {}
need, _ = needed_bytes(open_bundle(Path(bundle)).manifest, False)
allowed = idle.resident + need + START_VARIATION_BYTES
options = TrainingOptions(threads=int(threads), max_memory=allowed)
for number in range(3):
    train_bundle(Path(bundle), data, Path("update"), options,
                 personal=kept, keep=kept.update, idle=idle, force=True)
print("done")
"""


LARGE = """
import numpy as np
from device_agent.system import process_memory as memory
memory.map_large_blocks()
first = np.ones(6_000_000, np.float32)  # glibc's threshold would rise to its size, freed
del first
large, small = np.ones(5_000_000, np.float32), np.ones(20_000, np.float32)
before = memory.resident_bytes()
del large
print(before - memory.resident_bytes())
"""


@dataclass(frozen=True)
class Ended:
    """How a training process ended.

    `growth` is the growth of its memory in bytes from `idle`; None if the training failed.
    """

    code: int
    stderr: str
    growth: int | None
    idle: int = 0


def train(bundle: Path, data: Path, folder: Path, space: int = 0, allowed: int = 0) -> Ended:
    """Train in a process that may grow by `space` bytes of address space or `allowed` of memory."""
    given = {"bundle": str(bundle), "data": str(data), "space": space, "allowed": allowed}
    folder.mkdir(exist_ok=True)
    done = run_code(PROGRAM, json.dumps(given), cwd=folder)
    memory = json.loads(done.stdout) if done.code == 0 else None
    if memory is None:
        return Ended(done.code, done.stderr, None)
    return Ended(0, done.stderr, memory["peak"] - memory["idle"], memory["idle"])


def make(folder: Path) -> None:
    """Export the whole model and the weak slice, and write 128 samples."""
    model = load_model("models_for_tests:wide_then_small", seed=0)
    for name, spec in (("full", "full"), ("weak", "slice:small")):
        exported(model, spec, folder / name)
    write_samples(folder)


def exported(model: nn.Module, spec: str, folder: Path) -> Path:
    source = from_model(model)
    submodel = split(model, spec, SHAPE, TrainingConfig(batch_size=32))
    program, values = submodel.program, submodel.cut(source)
    export(program, values, folder, base=source.fingerprint(), check=False)
    return folder


def write_samples(folder: Path) -> None:
    order = np.random.default_rng(0)
    x = order.standard_normal((128, *SHAPE), dtype=np.float32)
    np.savez(folder / "local.npz", x=x, y=order.integers(10, size=128))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "wide-limits", make)


def between(wide: Path) -> int:
    """A limit in bytes that is enough for the weak slice but too low for the whole model."""
    needs = [needed_bytes(open_bundle(wide / name).manifest, False) for name in ("weak", "full")]
    weak, full = (need[0] for need in needs if need is not None)
    assert full > 1.5 * weak
    return (weak + full) // 2


def unpredicted(bundle: Path, to: Path) -> Path:
    """A copy of `bundle` whose manifest does not predict its memory."""

    def change(manifest: dict) -> None:  # type: ignore[type-arg]
        for signature in manifest["signatures"].values():
            signature["peak_bytes"] = None

    shutil.copytree(bundle, to)
    rewrite(to, change)
    return to


@pytest.mark.parametrize("kind", half_quick(["space", "allowed"]))
def test_the_weak_slice_trains_where_the_whole_model_cannot(
    wide: Path, tmp_path: Path, kind: str
) -> None:
    data, limit = wide / "local.npz", between(wide)
    weak = train(wide / "weak", data, tmp_path / "weak", **{kind: limit})
    assert weak.code == 0, weak.stderr
    record, _ = read_update(tmp_path / "weak" / "update")
    assert (record.samples, record.steps) == (128, 4)
    assert weak.growth is not None
    assert weak.growth <= limit

    full = train(wide / "full", data, tmp_path / "full", **{kind: limit})
    assert full.code == 5
    name = "--max-memory" if kind == "allowed" else r"the limit of the address space \(ulimit -v\)"
    assert_sentence(
        full.stderr,
        rf"full does not fit: running train needs {MB} in addition to the {MB} of the idle agent, "
        rf"but {name} allows only {MB}\. Allow at least {MB}, or take a submodel with a peak "
        rf"memory of at most {MB}\.",
    )
    assert everything(tmp_path / "full") == {}

    # Without the check, the training runs out of memory or is killed.
    blind = unpredicted(wide / "full", tmp_path / "blind")
    killed = train(blind, data, tmp_path / "killed", **{kind: limit})
    assert killed.code in (5, -6, -9, -11), killed.stderr
    if killed.code == 5:
        assert_sentence(
            killed.stderr,
            r"Memory ran out while training update: .*\. Allow more memory: the same command then "
            r"continues the training\. Or take a smaller submodel\.",
        )
    assert not (tmp_path / "killed" / "update").exists()


@pytest.mark.parametrize(
    ("allowed", "sentence"),
    [
        (
            1,
            rf"full does not fit: (running any graph needs {MB} in addition to the {MB} of the "
            rf"idle agent|the idle agent alone uses {MB}), but --max-memory allows only {MB}\. "
            rf"Allow at least {MB}\.",
        ),
        (
            16 << 20,
            r"Memory ran out while training update: [^:].*\. Allow more memory: the same command "
            r"then continues the training\. Or take a smaller submodel\.",
        ),
    ],
)
def test_running_out_of_memory_early_prints_one_sentence(
    wide: Path, tmp_path: Path, allowed: int, sentence: str
) -> None:
    """Also without a prediction there must be room for the runtime, which may abort otherwise."""
    blind = unpredicted(wide / "full", tmp_path / "blind")
    done = train(blind, wide / "local.npz", tmp_path / "out", allowed=allowed)
    assert done.code == 5, done.stderr
    assert_sentence(done.stderr, sentence)
    assert everything(tmp_path / "out") == {}


def train_limited(kind: int, limit: int, bundle: Path, data: Path, cwd: Path) -> Done:
    """Train in a process with a system limit of `limit` bytes on the resource `kind`."""
    words = command("edgetailor-agent", "train", bundle, "--data", data, "--out", "u")
    done = subprocess.run(
        [*words, "--threads", "1"], cwd=cwd, env=environment(OMP_NUM_THREADS="4"), text=True,
        capture_output=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("kind", "option", "limits"),
    [
        (resource.RLIMIT_AS, r"address space \(ulimit -v\)", (40, 62, 123, 150, 169)),
        (resource.RLIMIT_DATA, r"data \(ulimit -d\)", (20, 41, 61, 79)),
    ],
    ids=["-v", "-d"],
)
def test_a_limit_below_the_agents_own_need_is_refused_before_loading_anything(
    kind: int, option: str, limits: tuple[int, ...], tmp_path: Path
) -> None:
    least = f"{AGENT_BYTES[kind] // 10**6}.0MB"
    for limit in limits:
        done = train_limited(kind, limit * 10**6, Path("b"), Path("d"), tmp_path)
        assert done.code == 5, (limit, done.stderr)
        assert_sentence(
            done.stderr,
            rf"The agent with its runtime needs {least} before any training, but the limit of "
            rf"(the )?{option} allows only {limit}\.0MB\. Raise this limit\.",
        )


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA], ids=["-v", "-d"])
def test_the_agent_reports_errors_under_the_lowest_accepted_limit(
    bundle_of: BundleOf, kind: int, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "local.npz")
    done = train_limited(kind, AGENT_BYTES[kind], bundle_of("full"), data, tmp_path)
    assert done.code == 5
    assert_sentence(done.stderr, r"full does not fit: .*\. Allow at least [\d.]+MB\.")


def assert_sentence(stderr: str, pattern: str) -> None:
    assert re.fullmatch(rf"Error: {pattern}\n", stderr), stderr


@pytest.mark.parametrize("family", some_long(["full", "low-rank", "slice", "cp"], "cp"))
def test_training_stays_within_the_prediction(
    bundle_of: BundleOf, tmp_path: Path, family: str
) -> None:
    data = write_data(tmp_path / "local.npz", count=200)
    bundle = bundle_of(family)
    need = needed_bytes(open_bundle(bundle).manifest, False)
    assert need is not None
    ended = train(bundle, data, tmp_path / "run")
    assert ended.growth is not None, ended.stderr
    assert ended.growth <= need[0]
    # A limit of a ninth above the peak of the whole process is accepted.
    assert ended.idle + need[0] <= (ended.idle + ended.growth) / 0.9


def test_a_limit_that_is_enough_leaves_the_arena_its_regions(tmp_path: Path) -> None:
    """The last region of this net's arena is almost empty. A limit of data counts it as a whole."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )
    bundle = exported(model, "full", tmp_path / "bundle")
    write_samples(tmp_path)
    need = needed_bytes(open_bundle(bundle).manifest, False)
    assert need is not None
    data, enough = tmp_path / "local.npz", need[0] + START_VARIATION_BYTES
    free = train(bundle, data, tmp_path / "free")
    limited = train(bundle, data, tmp_path / "limited", allowed=enough)
    assert free.growth is not None
    assert limited.growth is not None, limited.stderr
    assert limited.growth <= free.growth + START_VARIATION_BYTES


def test_the_memory_of_large_arrays_is_returned_at_once() -> None:
    done = run_code(LARGE)
    assert int(done.stdout) > 19_000_000, done.stderr


def test_progress_is_kept_when_memory_runs_out(
    bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = shutil.copytree(bundle_of("slice"), tmp_path / "bundle")
    rewrite(longer, lambda manifest: manifest["schedule"][-1].update(epochs=3))
    data, out = str(write_data(tmp_path / "local.npz")), tmp_path / "out"
    original, heard = OnnxSession.run, []

    def run(session: OnnxSession, *given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        if len(heard) == 2:
            raise MemoryError("ONNX Runtime failed to allocate memory for 5 bytes")
        return original(session, *given)

    monkeypatch.setattr(OnnxSession, "run", run)
    with refused("memory.ran-out", update=str(out)) as error:
        train_bundle(longer, data, out, threads=1, on_epoch=lambda *epoch: heard.append(epoch))
    assert isinstance(error.value, LimitError)
    assert "the same command then continues the training." in str(error.value)
    assert (training_folder(out) / CHECKPOINT).is_file()
    monkeypatch.undo()
    later: list[int] = []
    train_bundle(longer, data, out, threads=1, on_epoch=lambda epoch, *_: later.append(epoch))
    assert later == [3]
    train_bundle(longer, data, tmp_path / "whole", threads=1)
    assert everything(out) == everything(tmp_path / "whole")


def test_limits_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "cgroup_limit", lambda: 7 * 10**9)
    limits = {ceiling.name: ceiling for ceiling in ceilings(5 * 10**9)}
    assert limits["--max-memory"].limit == 5 * 10**9
    assert 0 < limits["--max-memory"].used < 5 * 10**9
    assert limits["the control group (memory.max)"].limit == 7 * 10**9
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert not any("address space" in name for name in limits)


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "300", "a/b/memory.max": "500"}, 300),
        ("0::/a/b\n", {"a/memory.max": "max", "a/b/memory.max": "500"}, 500),
        ("0::/a\n", {"a/memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "900\n"}, 900),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("5:devices:/a\n", {"memory/a/memory.limit_in_bytes": "900"}, None),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert cgroup_limit(tmp_path / "own", tmp_path / "cgroup") == limit
    assert cgroup_limit(tmp_path / "none", tmp_path / "cgroup") is None


@pytest.mark.skipif(status_field("VmRSS") is None, reason="the system does not count memory")
def test_the_kernel_leaves_room_for_the_stacks_of_all_open_sessions(bundle_of: BundleOf) -> None:
    sessions = {n: open_at_once(open_bundle(bundle_of(n)).manifest) for n in ("full", "cp")}
    assert sessions == {"full": 1, "cp": 2}
    idle = Usage.now()
    allowed = idle.resident + 2 * 10**9
    for threads, stacks in ((1, 0), (4, 2 * 3)):
        with enforce_memory_limit(allowed, threads, 2, idle, 5000):
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        assert limit == idle.data + 2 * 10**9 - RUNTIME_CODE_BYTES + stacks * STACK_BYTES + 5000


@pytest.mark.skipif(status_field("VmRSS") is None, reason="the system does not count memory")
@pytest.mark.parametrize("spec", some_long(["full", "slice", "cp"], "cp"))
@pytest.mark.parametrize("threads", [1, 4])
def test_what_fits_once_fits_round_after_round(
    bundle_of: BundleOf, tmp_path: Path, spec: str, threads: int
) -> None:
    """Memory that the runtime keeps after a training is not counted twice for the next one."""
    write_data(tmp_path / "local.npz")
    done = run_code(ROUNDS, bundle_of(spec), tmp_path / "local.npz", threads, cwd=tmp_path)
    assert (done.code, done.stdout) == (0, "done\n"), done.stderr
