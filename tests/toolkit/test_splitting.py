"""A defect in one family's code is an error of that family alone."""

import pytest
from torch import nn

from models_for_tests import INPUT_SHAPE, smooth_cnn
from refusals import refused
from toolkit.families import width
from toolkit.inspection import Inspection, NotPossible, inspect_each
from toolkit.splitting import split


def test_a_family_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *arguments: object) -> None:
        [][1]

    monkeypatch.setattr(type(width.FAMILY), "split", broken)
    model: nn.Module = smooth_cnn()
    with refused("model.family-failed", family="width", error="IndexError") as caught:
        split(model, "width:0.5", INPUT_SHAPE)
    assert (
        "width:0.5: the family width failed on this model (IndexError: list index out of "
        in str(caught.value)
    )
    assert f"{__file__.rpartition('/')[2]}, line " in str(caught.value)
    found = inspect_each(model, INPUT_SHAPE, ["width:0.5", "low-rank:0.5,keep=0"], 16)
    assert [type(one) for one in found] == [NotPossible, Inspection]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_interruptions_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def interrupted(self: object, *arguments: object) -> None:
        raise interruption

    monkeypatch.setattr(type(width.FAMILY), "split", interrupted)
    with pytest.raises(interruption):
        split(smooth_cnn(), "width:0.5", INPUT_SHAPE)
