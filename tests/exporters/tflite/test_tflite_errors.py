"""LiteRT where memory runs out or its graph does not fit, and what it says on stderr."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from bundles import SAMPLE_SHAPE, rewrite, tiny_model, write_data
from commands import refusal, run
from edgetailor import TrainingConfig, export, split
from models_for_tests import wide_then_small
from refusals import refused
from toolkit.submodels.global_model import from_model

pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")

from device_agent.runtime.litert_runtime import LitertSession, without_remarks
from profiles.errors import BundleError


def write_tiny(out: Path) -> Path:
    model, source = tiny_model()
    submodel = split(model, "full", SAMPLE_SHAPE, TrainingConfig(batch_size=4, epochs=1))
    export(submodel, source, out, format="tflite", verify=False)
    return out


def test_memory_that_runs_out_is_said_in_one_sentence(tmp_path: Path) -> None:
    model = wide_then_small(12)
    training = TrainingConfig(batch_size=32, epochs=1)
    submodel = split(model, "full", (3, 32, 32), training)
    export(submodel, from_model(model), tmp_path / "b", format="tflite", verify=False)

    def unpredicted(manifest: dict[str, Any]) -> None:
        for signature in manifest["signatures"].values():
            signature["peak_bytes"] = None

    rewrite(tmp_path / "b", unpredicted)
    x = np.zeros((64, 3, 32, 32), np.float32)
    np.savez(tmp_path / "local.npz", x=x, y=np.arange(64) % 10)
    train = ("edgetailor-agent", "train", "b", "--data", "local.npz", "--out", "out")
    done = run(*train, "--threads", 1, "--max-memory", "95MB", cwd=tmp_path)
    said = refusal(done, 5)
    assert said.startswith("Memory ran out while training out: ai-edge-litert "), said
    assert "cannot allocate its tensors. Allow more memory: the same command then continues" in said
    assert {path.name for path in tmp_path.iterdir()} == {"b", "local.npz"}


class Bytes(nn.Linear):
    """Computes with a mask of bytes."""

    def forward(self, input: Tensor) -> Tensor:
        z = super().forward(input)
        return z * (z > 0).byte()


def test_a_type_that_tflite_lacks_is_refused_with_its_line(tmp_path: Path) -> None:
    submodel = split(model := Bytes(6, 3), "full", (6,), TrainingConfig())
    with refused("export.unsupported-type", "test_tflite_errors.py, line", dtype="uint8"):
        export(submodel, from_model(model), tmp_path / "b", format="tflite")


def test_what_litert_remarks_is_left_out(tmp_path: Path) -> None:
    write_tiny(tmp_path / "b")
    write_data(tmp_path / "local.npz")
    train = ("edgetailor-agent", "train", "b", "--data", "local.npz", "--out", "out")
    done = run(*train, "--threads", 1, cwd=tmp_path)
    assert (done.code, len(done.stderr.splitlines())) == (0, 1), done.stderr
    assert done.stderr.startswith("epoch 1 of 1: loss ")


def test_what_else_is_written_to_stderr_meanwhile_is_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with without_remarks():
        os.write(2, b"INFO: Created a delegate.\nERROR: it is on fire\n")
        os.write(2, b"not a whole line")
    os.write(2, b", and later ones\n")
    assert capfd.readouterr().err == "ERROR: it is on fire\nnot a whole line, and later ones\n"


@pytest.mark.parametrize("signature", ["train", "predict"])
def test_inputs_that_the_graph_does_not_know(signature: str, tmp_path: Path) -> None:
    session = LitertSession(write_tiny(tmp_path / "b") / "model.tflite", signature, 1)
    with pytest.raises(BundleError, match=r"model\.tflite failed in ai-edge-litert .*inputs"):
        session.run({"x": np.zeros((4, *SAMPLE_SHAPE), np.float32)})
