"""Single updates of a simulated round, in files."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from safetensors.numpy import load_file, save_file

from device_agent.formats.manifest import encode
from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.aggregate import Received


class UpdateFiles:
    """Updates in files of a temporary folder, by client."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.clients: list[int] = []

    def add(self, client: int, update: Received) -> None:
        """Write an update."""
        record, arrays = update
        path = self._path(client)
        path.with_suffix(".json").write_bytes(encode(record))
        save_file(dict(arrays), path)
        self.clients = sorted([*self.clients, client])

    def read(self) -> Iterator[tuple[int, Received]]:
        """Yield the updates by client, one in memory at a time."""
        for client in self.clients:
            path = self._path(client)
            record = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=UpdateRecord)
            yield client, (record, load_file(path))

    def remove(self) -> None:
        """Delete the files."""
        self._folder.cleanup()

    def _path(self, client: int) -> Path:
        return Path(self._folder.name) / f"{client}.safetensors"
