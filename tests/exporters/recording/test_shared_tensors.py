"""A twin shares the numbers of the parameters, but running it leaves the model as it was."""

import torch
from torch import Tensor, nn

from exporters.recording.shared_tensors import twin_of


def test_a_twin_copies_only_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[2].weight.requires_grad_(False)
    model[0].bias.grad = torch.ones(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = twin_of(model)
    for name, value in twin.named_parameters():
        own = model.get_parameter(name)
        assert value is not own
        assert value.data_ptr() == own.data_ptr()
        assert value.requires_grad == own.requires_grad
    twin.train()(torch.randn(8, 3)).sum().backward()
    assert not torch.equal(twin[1].running_mean, before["1.running_mean"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model[0].weight.grad is None
    assert torch.equal(model[0].bias.grad, torch.ones(4))


def test_parameters_with_two_names_stay_one() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    model["second"].weight = model["first"].weight
    twin = twin_of(model)
    assert twin["second"].weight is twin["first"].weight


class Hooked(nn.Module):
    """Keeps a feature of its layer by a hook that is a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 3), dict[str, Tensor]()

        def keep(
            module: nn.Module, x: object, y: Tensor, kept: dict[str, Tensor] = self.kept
        ) -> None:
            kept["y"], self.kept["z"] = y, y + 1

        self.layer.register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.kept["y"] + self.kept["z"]


def test_hooks_of_a_copy_write_into_the_copy() -> None:
    model = Hooked()
    x = torch.randn(5, 4)
    y = nn.functional.linear(x, model.layer.weight, model.layer.bias)
    torch.testing.assert_close(twin_of(model)(x), y * y + y + 1)
    assert not model.kept
