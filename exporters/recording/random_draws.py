"""Detects random numbers that a model draws outside of its dropouts while it is recorded.

A recording would repeat the results of such draws in every step.
"""

import pickle
import random
from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode

from exporters.programs import source_lines
from profiles.errors import ModelError

FUNCTIONS = ("rand", "randn", "randint", "randperm", "normal")


class RandomDraws(TorchFunctionMode):
    """Context that detects draws by torch's functions, and by numpy's and Python's generators.

    Attributes:
        line: The user's line with the last call of a function such as `torch.rand`; or empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line = ""
        self._before = generator_states()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note functions that draw; run all functions unchanged."""
        if getattr(func, "__name__", "") in FUNCTIONS:
            self.line = source_lines.running_line()
        return func(*args, **(kwargs or {}))

    def outside_torch(self) -> bool:
        """Whether numpy's or Python's generator has drawn since this object was created."""
        return generator_states() != self._before


def generator_states() -> tuple[object, ...]:
    """The states of the global generators of numpy and of Python."""
    numpys = np.random.get_state(legacy=False)
    assert isinstance(numpys, dict)
    return pickle.dumps(numpys), random.getstate()


def decides_at_random(line: str) -> ModelError:
    """The error for a model that chooses its operators by the random number drawn at `line`."""
    return ModelError(
        "The model uses a random number to choose which operators it runs ({line}), as layerdrop "
        "does. A training step must run the same operators for every batch. Set the probability to "
        "0 in the model's configuration (layerdrop, encoder_layerdrop and decoder_layerdrop in "
        "transformers), or use stochastic depth, which multiplies with a random mask.",
        code="model.random-numbers",
        line=line,
    )


def draws_outside_torch() -> ModelError:
    """The error for a model that draws with numpy or Python when it trains."""
    return ModelError(
        "The model draws random numbers with numpy or Python's `random` when it trains, and a "
        "recording would repeat them in every step. Switch this off in the model's configuration "
        "(apply_spec_augment=False for the SpecAugment of transformers), or use nn.Dropout.",
        code="model.random-numbers",
    )
