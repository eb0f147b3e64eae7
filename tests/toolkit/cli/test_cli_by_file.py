"""The whole way without a server: rounds through files alone."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from bundles import samples, write_data
from command_models import NETS, TINY
from commands import Done, edgetailor, refused, run

EXPORTED = r"""cp:2\.0: 510 trained parameters, capacity 1\.33, 712 B of weights
fit of the factors 0\.\d\d, least 0\.\d\d for '\w+\.weight'
signature +operators +MACs +graph +peak memory
personal_init +\d+ +[\d.]+ k +[\d.]+ kB +[\d.]+ MB
personal_step +\d+ +[\d.]+ k +[\d.]+ kB +[\d.]+ MB
factor_step +\d+ +[\d.]+ k +[\d.]+ kB +[\d.]+ MB
predict +\d+ +[\d.]+ k +[\d.]+ kB +[\d.]+ MB
evaluate +\d+ +[\d.]+ k +[\d.]+ kB +[\d.]+ MB
predict_local +\d+ +[\d.]+ k +[\d.]+ kB +[\d.]+ MB
for a batch of 4; peak memory: predicted, above the idle agent
training: peak memory [\d.]+ MB, running factor_step and personal_step
verified: relative error \d\.\de-\d\d \(tolerance \de-\d\d, seed \d+\)
  worst (?:tensor|operator): .*(?:\n  (?!from).*)?
bundle: cp-1
"""


def test_two_rounds_through_files_alone(folder: Path) -> None:
    """Export here, train there, aggregate here, and again; every step in a process of its own."""

    cache = {"EDGETAILOR_CACHE": str(folder / "cache")}  # empty at first

    def here(*arguments: str) -> Done:
        return edgetailor(*arguments, cwd=folder, **cache).succeeded()

    def there(bundle: str, seed: int) -> Done:
        data = write_data(folder / f"{bundle}.npz", seed=seed)
        out = bundle.replace("-", "-update-")
        done = run("edgetailor-agent", "train", bundle, "--data", data, "--out", out, cwd=folder)
        assert done.code == 0, done.stderr
        return done

    first = here(
        "export",
        *TINY,
        "--submodel",
        "cp:2.0",
        "--out",
        "cp-1",
        "--save-weights",
        "global-0",
    )
    assert re.fullmatch(EXPORTED, first.stdout), first.stdout
    assert max(map(len, first.stdout.splitlines())) <= 80
    assert [line[11:] for line in first.stderr.splitlines()] == [
        "loading PyTorch", "loading the model", "splitting cp:2.0", "factorizing the weights",
        "lowering personal_init",
        "lowering personal_step", "lowering factor_step", "lowering predict",
        "lowering evaluate", "lowering predict_local",
        "verifying against PyTorch",
    ]  # fmt: skip
    here(
        "export",
        *TINY,
        "--submodel",
        "slice:classifier",
        "--out",
        "slice-1",
        "--weights",
        "global-0",
    )
    there("cp-1", seed=1)
    there("slice-1", seed=2)
    here("aggregate", "global-0", "cp-update-1", "slice-update-1", "--out", "global-1")
    before, after = load_file(folder / "global-0"), load_file(folder / "global-1")
    kept = {name: array for name, array in after.items() if name.startswith("kept|")}
    assert set(kept) == {
        f"kept|cp:2.0|{name}#{mode}"
        for name, modes in {"conv.weight": 4, "classifier.weight": 2}.items()
        for mode in range(modes)
    }
    assert after.keys() - kept.keys() == before.keys()
    unchanged = {name for name in before if np.array_equal(before[name], after[name])}
    assert not unchanged
    assert after["bn.num_batches_tracked"] > before["bn.num_batches_tracked"]

    here("inspect", *TINY, "--weights", "global-1")  # the model takes it
    here("export", *TINY, "--submodel", "cp:2.0", "--out", "cp-2", "--weights", "global-1")
    sent = load_file(folder / "cp-2" / "weights.safetensors")
    for name, factor in kept.items():
        np.testing.assert_array_equal(sent[name.removeprefix("kept|cp:2.0|")], factor)
    there("cp-2", seed=1)
    late = ("aggregate", "global-1", "cp-update-2", "cp-update-1", "--out", "global-2")
    assert "cp-update-1 was not trained from the global model" in refused(folder, *late)
    here("aggregate", "global-1", "cp-update-2", "--out", "global-2")
    assert load_file(folder / "global-2").keys() == after.keys()
    x, _ = samples(2, seed=3)
    assert len({outputs(folder, name, x) for name in ("global-0", "global-1", "global-2")}) == 3


def outputs(folder: Path, weights: str, x: np.ndarray) -> bytes:
    """What the model of `weights` makes of `x`."""
    namespace: dict[str, Callable[[], torch.nn.Module]] = {}
    exec(NETS, namespace)
    model = namespace["tiny"]().eval()
    state = load_file(folder / weights)
    model.load_state_dict({n: torch.from_numpy(state[n]) for n in model.state_dict()})
    with torch.no_grad():
        return bytes(model(torch.from_numpy(x)).numpy().tobytes())
