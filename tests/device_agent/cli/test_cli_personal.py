"""`edgetailor-agent train --personal`: the model that stays on the device."""

import re
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from bundles import BundleOf, everything
from commands import NUMBER, Agent, refusal
from trainings import train_bundle

X = np.zeros(2, np.float32)


def test_a_personal_model_goes_from_round_to_round(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    def round_(number: int, *more: object) -> dict[str, np.ndarray]:
        out = f"update-{number}"
        done = agent(
            "train", bundle_of("cp"), "--data", data, "--out", out, "--threads", "1", *more
        ).succeeded()
        assert re.fullmatch(
            rf"epoch 1 of 2: loss {NUMBER}\nepoch 2 of 2: loss {NUMBER}\n", done.stderr
        )
        sent = load_file(tmp_path / out / "update.safetensors")
        statistics = {name: array for name, array in sent.items() if ".running_" in name}
        own = load_file(tmp_path / "own" / "me.safetensors")
        # The file has all statistics that the device predicts with, and nothing else that it sent.
        shared = own.keys() & sent.keys()
        assert statistics.keys() <= shared
        assert same({n: own.pop(n) for n in shared}, {n: sent[n] for n in shared})
        assert not any("weight" in name for name in shared)
        return own

    keep = ("--personal", "own/me.safetensors")
    first, second = round_(1, *keep), round_(2, *keep)
    assert stat.S_IMODE((tmp_path / "own" / "me.safetensors").stat().st_mode) == 0o600
    kept = train_bundle(bundle_of("cp"), data, tmp_path / "a", threads=1).personal
    assert same(first, kept)
    kept = train_bundle(bundle_of("cp"), data, tmp_path / "b", threads=1, personal=kept).personal
    assert same(second, kept)
    assert not same(second, first)


def same(own: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return own.keys() == other.keys() and all(np.array_equal(own[n], other[n]) for n in own)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            save({"p": X}),
            r"^The personal model in me is not of 'cp:2\.0', the submodel of this bundle\. Use",
        ),
        (b"text", r"^me is not a readable personal model: .*\. Give the file that an earlier"),
    ],
)
def test_a_personal_model_of_something_else(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "me").write_bytes(content)
    done = agent("train", bundle_of("cp"), "--data", data, "--out", "u", "--personal", "me")
    assert re.search(message, refusal(done))
    assert everything(tmp_path) == {"me": content}


def test_a_bundle_without_a_personal_model_leaves_the_file_alone(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    done = agent("train", bundle_of("full"), "--data", data, "--out", "u", "--personal", "me")
    assert done.code == 0
    assert not (tmp_path / "me").exists()
