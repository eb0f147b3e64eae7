"""A small model and its successors, as a federation carries one over into the next."""

from collections import OrderedDict

from torch import nn

SHAPE = (3,)


def two_classes() -> nn.Sequential:
    return _model(5, 2)


def three_classes() -> nn.Sequential:
    """One more class."""
    return _model(5, 3)


def wider() -> nn.Sequential:
    """A wider hidden layer, and one layer more."""
    return _model(7, 3, again=nn.Linear(3, 3))


def unlike() -> nn.Sequential:
    """No tensor of the others fits."""
    return nn.Sequential(nn.Linear(3, 2))


def _model(hidden: int, classes: int, **more: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            hidden=nn.Linear(3, hidden),
            norm=nn.BatchNorm1d(hidden),
            head=nn.Linear(hidden, classes),
            **more,
        )
    )
