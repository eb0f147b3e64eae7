"""A mixed fleet's file, what two simulations have in common, and an engine elsewhere."""

import logging
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from models_for_tests import CLASSES, INPUT_SHAPE
from toolkit.simulation.chunks import Chunk, TrainedChunk
from toolkit.simulation.engines.engine import Worker, WorkerSetup
from toolkit.simulation.results import RoundResult


def fleet_file(
    folder: Path, seed: int, specs: Sequence[str], each: int, top: str, simulation: str
) -> Path:
    """The file of a fleet with `each` clients of each spec, which share 100 samples.

    `top` has keys of the file and tables before `[simulation]`; `simulation` has keys of this one.
    """
    draw = np.random.default_rng(seed)
    y = draw.integers(CLASSES, size=100)
    x = draw.normal(size=(100, *INPUT_SHAPE)) + 2 * y[:, None, None, None]
    np.savez(folder / "data.npz", x=x.astype(np.float32), y=y)
    kinds = "".join(
        f'[[devices]]\nname = "kind-{n}"\nsubmodel = "{spec}"\ncount = {each}\n'
        for n, spec in enumerate(specs)
    )
    (folder / "fleet.toml").write_text(
        f"""
        model = "models_for_tests:smooth_cnn"
        input_shape = {list(INPUT_SHAPE)}
        {top}
        [simulation]
        data = "data.npz"
        seed = {seed % 1000}
        {simulation}
        {kinds}"""
    )
    return folder / "fleet.toml"


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
