"""Parts of a model under torch.utils.checkpoint, which PyTorch computes twice, and we once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from between_layers import Between
from edgetailor import GlobalModel, TrainingConfig, export, read_update, split
from exporters.recording.capture import capture
from trainings import train_bundle


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=0.1)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda v: torch.tanh(self.norm(v)), x, use_reentrant=False)
        return self.classifier(inner)  # type: ignore[arg-type]


def test_statistics_are_updated_once(tmp_path: Path, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((16, 4), dtype=np.float32) + 3
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(16) % 3)
    model = Checkpointed()
    state = GlobalModel({name: value.clone() for name, value in model.state_dict().items()})
    submodel = split(model, "full", (4,), TrainingConfig(batch_size=16))
    export(submodel, state, tmp_path / "bundle", verify=False)
    train_bundle(tmp_path / "bundle", str(tmp_path / "data.npz"), tmp_path / "update", threads=1)
    _, tensors = read_update(tmp_path / "update")
    once = 0.1 * x.mean(0)
    np.testing.assert_allclose(tensors["norm.running_mean"], once, rtol=1e-5)

    model.train()(torch.from_numpy(x)).sum().backward()  # what the guide says of PyTorch
    np.testing.assert_allclose(model.norm.running_mean, once + 0.9 * once, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_has_one_mask_inside_a_checkpoint(reentrant: bool) -> None:
    """Capture compares the gradients with those of the model, for the same masks."""

    def twice(h: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            h = checkpoint(  # type: ignore[assignment]
                lambda v: torch.dropout(v.tanh(), 0.5, train=True), h, use_reentrant=reentrant
            )
        return h

    capture(Between(twice), (6,))
