"""Detects whether a model draws random numbers without torch while it is recorded.

A recording would repeat the results of such draws in every step. But draws of single numbers are
recorded correctly, see `replacements/python_draws.py`.
"""

import pickle
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import nn
from torch.overrides import TorchFunctionMode

from exporters.programs import source_lines
from exporters.programs.interrupts import raise_if_interrupted
from exporters.recording.replacements.python_code.python_functions import modules_of
from profiles.errors import ModelError

PYTHONS: Any = vars(random)["_inst"]
"""Python's global generator."""
NUMPYS: Any = np.random.rand.__self__  # type: ignore[attr-defined]
"""Numpy's global generator."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
FUNCTIONS = ("rand", "randn", "randint", "randperm", "normal")


class RandomDraws(TorchFunctionMode):
    """Context that detects draws by torch's functions, and by numpy's and Python's generators.

    Attributes:
        line: The user's line with the last call of a function such as `torch.rand`. Empty if there
            is none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.line = ""
        self._module = module
        self._before = generator_states(module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note functions that draw; run all functions unchanged."""
        if getattr(func, "__name__", "") in FUNCTIONS:
            self.line = source_lines.running_line()
        return func(*args, **(kwargs or {}))

    def outside_torch(self) -> bool:
        """Whether a generator of numpy or Python has drawn since this object was created."""
        return generator_states(self._module) != self._before


def generator_states(module: nn.Module) -> list[object]:
    """The states of all generators of numpy and Python, both global and in `module`."""
    numpys = np.random.get_state(legacy=False)
    assert isinstance(numpys, dict)
    spaces = [*map(vars, module.modules()), *map(vars, modules_of(module))]
    own = [value for space in spaces for value in space.values()]
    generators = [value for value in own if isinstance(value, GENERATORS)]
    return [pickle.dumps(numpys), random.getstate(), *map(pickle.dumps, generators)]


def decides_at_random(line: str) -> ModelError:
    """The error for a model that chooses its operators by the random number drawn at `line`."""
    return ModelError(
        "The model uses random numbers to choose which operators it runs ({line}), as layerdrop "
        "does, and there are too many paths through the code. Set the probability to "
        "0 in the model's configuration (layerdrop, encoder_layerdrop and decoder_layerdrop in "
        "transformers), or use stochastic depth, which multiplies with a random mask.",
        code="model.random-numbers",
        line=line,
    )


def draws_outside_torch(line: str) -> ModelError:
    """The error for a model that draws with numpy or Python, at `line`, when it trains."""
    return ModelError(
        "The model draws random numbers with numpy or Python's `random` when it trains{place}, but "
        "a recording would use the same numbers in every step. Only functions that draw one number "
        "are recorded, such as random.random() and np.random.randint(4). Draw arrays with torch, "
        "as in torch.rand(4) < p `if self.training`. For the SpecAugment of transformers, set "
        "apply_spec_augment=False in the model's configuration.",
        code="model.random-numbers",
        place=source_lines.parenthesized(line),
    )


def line_of_draw(run: Callable[[], object]) -> str:
    """The first user's line that draws with numpy's or Python's generator while `run` runs.

    The search is slow, because Python reports each call. Errors of `run` are ignored.
    """
    lines: list[str] = []

    def called(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is PYTHONS:
            lines.append(source_lines.running_line())

    def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            lines.append(source_lines.running_line())
            return draw(*args, **kwargs)

        return noted

    space = vars(np.random)
    numpys = [name for name in space if getattr(space[name], "__self__", None) is NUMPYS]
    before = sys.getprofile()
    try:
        # Python does not report calls of numpy's functions.
        with patch.dict(space, {name: noting(space[name]) for name in numpys}):
            sys.setprofile(called)
            run()
    except Exception as error:  # the user's code may raise any error
        raise_if_interrupted(error)
    finally:
        sys.setprofile(before)
    return lines[0] if lines else ""
