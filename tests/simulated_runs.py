"""What two simulations must have in common, and an engine whose worker is elsewhere."""

import logging
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.simulation.chunks import Chunk, TrainedChunk
from toolkit.simulation.engines.engine import Worker, WorkerSetup
from toolkit.simulation.results import RoundResult


def outcome(history: list[RoundResult], folder: Path) -> dict[str, object]:
    """All that must not depend on who trains: the history without times, and every other file."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "history.jsonl"
    }
    rounds = [{name: getattr(entry, name) for name in entry.__struct_fields__} for entry in history]
    return files | {str(entry.pop("round")): entry for entry in rounds if entry.pop("seconds")}


class Elsewhere:
    """An engine whose one worker sees and returns nothing but bytes, without its own process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.worker: Worker = Worker(pickle.loads(pickle.dumps(setup)))

    def map(self, round_: int, model: bytes, chunks: Iterable[Chunk]) -> Iterator[TrainedChunk]:
        for chunk in chunks:
            done = self.worker.train(round_, model, pickle.loads(pickle.dumps(chunk)))
            yield pickle.loads(pickle.dumps(done))

    def close(self) -> None:
        logging.disable(logging.NOTSET)
