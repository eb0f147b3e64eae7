"""The engine that trains chunks one after another in this process."""

from collections.abc import Iterable, Iterator

from toolkit.simulation.chunks import Chunk, ChunkTrainer, TrainedChunk


class InProcess:
    """The engine without workers.

    Args:
        trainer: Trains the chunks. It uses the simulation's own `Federation`, not a copy.
    """

    def __init__(self, trainer: ChunkTrainer) -> None:
        self._trainer = trainer

    def map(self, round_: int, model: bytes, chunks: Iterable[Chunk]) -> Iterator[TrainedChunk]:
        """See Engine."""
        return (self._trainer.train(round_, chunk) for chunk in chunks)

    def close(self) -> None:
        """See Engine."""
