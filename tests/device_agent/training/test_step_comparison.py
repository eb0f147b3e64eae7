"""When the first steps of two forms of a bundle count as the same. All numbers are made up."""

import numpy as np
import pytest

from device_agent.training.step_comparison import FirstStep, objection, projected


def step(losses: tuple[float, ...], **changes: float | list[float]) -> FirstStep:
    return FirstStep(losses, {name: np.broadcast_to(sums, 4) for name, sums in changes.items()})


def never() -> FirstStep:
    raise AssertionError("nudged")


@pytest.mark.parametrize(
    ("formed", "agree"),
    [
        ((2.301, 1.901, 1.501), True),
        ((2.31, 1.9, 1.5), False),
        ((2.3, 1.93, 1.5), False),
        ((2.3, 1.92, 1.51), True),
        ((2.3, float("nan"), 1.5), False),
    ],
    ids=["rounding", "forward", "gradient", "kink", "not-a-number"],
)
def test_losses_have_to_agree(formed: tuple[float, ...], agree: bool) -> None:
    against = objection(step((2.3, 1.9, 1.5)), step(formed), never)
    assert (against is None) == agree
    assert agree or "the loss is" in str(against)


@pytest.mark.parametrize(
    ("nudged", "agree"),
    [
        (step((1.0,), w=[-1.0, 1.0, 1.0, -1.0], v=1.0), True),
        (step((1.0,), w=1.001, v=-1.0), False),
    ],
    ids=["rounding", "steady"],
)
def test_changes_that_roundings_decide_are_not_compared(nudged: FirstStep, agree: bool) -> None:
    """Adam divides a gradient by its own size, also one that is only rounding."""
    against = objection(step((1.0,), w=1.0, v=1.0), step((1.0,), w=-1.0, v=1.0), lambda: nudged)
    assert (against is None) == agree
    assert agree or "the change of 'w' differs by 200%" in str(against)


def test_a_projection_changes_by_about_the_norm_of_the_change(seed: int) -> None:
    """The mean square of a sum with random signs is the sum of squares."""
    draw = np.random.default_rng(seed)
    before = {str(number): draw.standard_normal(1000) for number in range(100)}
    change = {name: draw.standard_normal(1000) for name in before}
    after = projected({name: before[name] + change[name] for name in before})
    apart = np.array([after[name] - sums for name, sums in projected(before).items()])
    norms = np.array([np.linalg.norm(change[name]) for name in before])
    assert np.sqrt(np.mean((apart / norms[:, None]) ** 2)) == pytest.approx(1, rel=0.25)
