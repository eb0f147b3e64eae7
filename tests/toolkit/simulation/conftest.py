"""What tests of simulations share.

Each submodel is traced once for all simulations of a process: traces take most of them.
"""

from collections.abc import Iterator

import pytest

from exporters.programs.program import Program
from simulated_runs import Sent
from toolkit.aggregation.aggregate import Received
from toolkit.simulation import chunks
from toolkit.simulation import simulate as simulate_module
from toolkit.simulation.chunks import ChunkTrainer
from toolkit.simulation.simulated_time import Clock
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


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Every update that is sent from now on."""
    sent: Sent = {}
    train = ChunkTrainer._update

    def training(self: ChunkTrainer, spec: str, client: object, result: object) -> Received:
        update = train(self, spec, client, result)  # type: ignore[arg-type]
        sent[self.round, client.number] = update  # type: ignore[attr-defined]
        return update

    monkeypatch.setattr(ChunkTrainer, "_update", training)
    return sent


@pytest.fixture
def given_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client needs as many seconds as its kind's `slowdown` says: nothing is exported."""

    def seconds(self: Clock, kind: str, spec: str, samples: int) -> float:
        return self.devices[kind].slowdown

    monkeypatch.setattr(simulate_module, "workloads", lambda *_: {"known": None})
    monkeypatch.setattr(Clock, "seconds", seconds)
    monkeypatch.setattr(Clock, "memory", lambda *_: 0.0)
