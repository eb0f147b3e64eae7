"""The parts of a cut model compute the whole model, with the sizes of EmbracingFL's Table 1."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from edgetailor import split
from exporters.programs.recorded_graph import output_node
from exporters.recording.capture import capture
from models_for_tests import INPUT_SHAPE, relu_cnn, smooth_cnn
from parameters import some_long
from refusals import refused
from toolkit.cutting.cut_points import Cutter
from toolkit.models import resnet20

Cut = tuple[nn.Module, Cutter, tuple[int, ...]]
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet20": (resnet20, (3, 32, 32)),
    "smooth": (smooth_cnn, INPUT_SHAPE),
    "relu": (relu_cnn, INPUT_SHAPE),
}


def unsettle(model: nn.Module, seed: int) -> nn.Module:
    """Statistics and affine parameters other than the initial zeros and ones."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.dim() == 1:
                value.add_(torch.rand(value.shape))
    return model.eval()


@pytest.fixture(scope="module", params=some_long(MODELS, "resnet20"))
def cut(request: pytest.FixtureRequest, seed: int) -> Cut:
    build, shape = MODELS[request.param]
    model = unsettle(build(), seed)
    return model, Cutter(capture(model, shape)), shape


def run(part: GraphModule, x: Tensor) -> Tensor:
    with torch.no_grad():
        result = part(x)
    return result if isinstance(result, Tensor) else result[0]


def test_both_sides_of_every_cut_are_the_model(cut: Cut) -> None:
    model, cutter, shape = cut
    x = torch.randn(5, *shape)
    with torch.no_grad():
        whole = model(x)
    assert cutter.points
    for point in cutter.points:
        activation = run(cutter.frozen(-1, point.position), x)
        composed = run(cutter.predicting(point.position), activation)
        torch.testing.assert_close(composed, whole, rtol=1e-5, atol=1e-5, msg=point.module)


@pytest.mark.parametrize("limit", [3000, 10**9])
def test_stages_are_the_prefix_in_pieces_within_the_limit(cut: Cut, limit: int) -> None:
    model, cutter, shape = cut
    batch, x = 2, torch.randn(2, *shape)
    places = [-1, *(point.position for point in cutter.points)]
    stretches = [cutter.load(cutter.frozen(*pair), batch) for pair in pairwise(places)]
    with torch.no_grad():
        whole = model(x)
    for point in cutter.points[-1 :: -max(1, len(cutter.points) // 4)]:
        stages, activation = cutter.stages(point.position, limit, batch), x
        for stage in stages:
            activation = run(stage, activation)
        composed = run(cutter.predicting(point.position), activation)
        torch.testing.assert_close(composed, whole, rtol=1e-5, atol=1e-5)
        loads = [cutter.load(stage, batch) for stage in stages]
        assert max(loads) <= max(limit, *stretches)
        assert all(one + following > limit for one, following in pairwise(loads))


def test_sides_share_no_parameter_and_lose_none(cut: Cut) -> None:
    model, cutter, _ = cut
    total = sum(value.numel() for value in model.parameters())
    for point in cutter.points:
        sides = (cutter.frozen(-1, point.position), cutter.trained(point.position))
        assert sum(cutter.load(side, 0) for side in sides) == total, point.module


def test_names_of_the_first_trained_modules(cut: Cut) -> None:
    model, cutter, _ = cut
    names = {name for name, _ in model.named_modules()}
    places = [point.position for point in cutter.points]
    assert places == sorted(set(places))
    assert all(point.module in names for point in cutter.points)


@pytest.mark.long
def test_every_block_of_resnet20_is_a_place_to_cut() -> None:
    modules = {point.module for point in Cutter(capture(resnet20(), (3, 32, 32))).points}
    for block in range(9):
        assert any(f"{module}.".startswith(f"blocks.{block}.") for module in modules), block
    # Inside a block the values of the shortcut and of the branch are both recorded.
    assert {f"blocks.{block}.conv2" for block in range(9)} <= modules


def test_a_module_that_the_model_lacks_is_refused_with_the_cut_points() -> None:
    with refused("spec.unknown-cut-point", spec="slice:residual.other") as caught:
        split(smooth_cnn(), "slice:residual.other", INPUT_SHAPE)
    assert any("residual" in name for name in caught.value.values["cut_points"])
    assert all(name in str(caught.value) for name in caught.value.values["cut_points"])


def test_stages_end_where_one_tensor_crosses_if_they_can() -> None:
    cutter = Cutter(capture(resnet20(), (3, 32, 32)))
    last = cutter.points_by_module(32)["classifier"].position
    halves = cutter.load(cutter.captured.training, 32) // 2
    stages = cutter.stages(last, halves, 32)
    assert len(stages) > 1
    assert all(output_node(stage).meta["val"].dim() == 4 for stage in stages[:-1])


def test_recordings_that_tests_share_have_the_numbers_of_each_model(seed: int) -> None:
    """Models of the same structure are recorded once for all tests of a process."""
    x = torch.randn(3, *INPUT_SHAPE)
    for model in (unsettle(smooth_cnn(), seed), unsettle(smooth_cnn(), seed)):
        captured = capture(model, INPUT_SHAPE)
        torch.testing.assert_close(run(captured.inference, x), model(x))
