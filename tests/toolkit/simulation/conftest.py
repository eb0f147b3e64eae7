"""Each submodel is traced once for all simulations of a process: traces take most of them."""

from collections.abc import Iterator

import pytest

from exporters.programs.program import Program
from toolkit.simulation import chunks
from toolkit.simulation.torch_executor import TorchExecutor, TorchSession
from toolkit.submodels.submodel import Submodel

TRACED: dict[tuple[int, str], tuple[Program, dict[str, TorchSession]]] = {}


def executor(submodel: Submodel, device: str) -> TorchExecutor:
    """An executor with the sessions of all earlier executors of the same program."""
    fresh, program = TorchExecutor(submodel, device), submodel.program
    _, fresh.sessions = TRACED.setdefault((id(program), device), (program, {}))
    return fresh


@pytest.fixture(autouse=True, scope="module")
def shared_traces() -> Iterator[None]:
    """Submodels are shared too, see the folder above."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunks, "TorchExecutor", executor)
        yield
