"""A folder of exported graphs, so that the second export of a program only writes weights.

An entry is one file, `<key>.graphs`: the SHA-256 of the rest, then the graphs as MessagePack. A
verdict, `<key>.verdict`, records that exactly these graphs passed verification. `<key>.figures` has
the other forms and the figures (memory and repeated work) of one ONNX graph, for one batch size. A
key (see `program_identity.py`) covers everything that determines the contents of an entry, so an
entry never expires. The least recently used files are deleted when the folder grows beyond
LIMIT_BYTES.

Several processes can share the folder, because files are replaced in one step. If a file is damaged
or of another version, it is ignored and written again. The hash detects damage, but not
manipulation. So the folder must be as private as the source code.
"""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Runtime
from exporters.cache_folder import cache_folder
from exporters.memory import onnx_footprint, tflite_footprint
from exporters.memory.tflite_footprint import MemoryPlan
from exporters.programs.program_identity import digest, figures_key
from exporters.runtime_graph import Figures, Form, Graph, Graphs
from exporters.verification.verdict import Verdict

LIMIT_BYTES = 1_000_000_000
HASH_BYTES = 32
T = TypeVar("T")
ENTRY, FIGURES, VERDICT = ".graphs", ".figures", ".verdict"


class StoredGraph(msgspec.Struct, frozen=True):
    """A `Graph` without its file's content; `plan` is the memory plan of a TFLite graph."""

    file: str
    operators: int
    size: int
    plan: MemoryPlan | None = None


class Entry(msgspec.Struct, frozen=True):
    """The graphs of one program. Several graphs can use the same file.

    Attributes:
        runtime: The runtime for which the graphs were made.
        files: The content of each file, by its name.
        graphs: The graph of each signature, by the signature's name.
    """

    runtime: Runtime
    files: dict[str, bytes]
    graphs: dict[str, StoredGraph]


class StoredFigures(msgspec.Struct, frozen=True):
    """The other forms and the figures of one ONNX graph."""

    forms: dict[str, Form]
    figures: Figures


class StoredVerdict(msgspec.Struct, frozen=True):
    """A verdict, and the digest of the files that were verified."""

    files: str
    verdict: Verdict


@dataclass(frozen=True)
class GraphCache:
    """Stores graphs in `folder`, which may not exist yet."""

    folder: Path
    limit_bytes: int = LIMIT_BYTES

    def load(self, key: str) -> dict[str, Graph] | None:
        """The graphs that are stored under `key`, by signature name. None if nothing is stored."""
        entry = self.read(key + ENTRY, Entry)
        if entry is None or any(graph.file not in entry.files for graph in entry.graphs.values()):
            return None
        return {name: graph_of(stored, entry) for name, stored in entry.graphs.items()}

    def store(self, key: str, graphs: Graphs) -> None:
        """Store `graphs` under `key`. Disk errors are ignored, because the cache is optional."""
        first = next(iter(graphs.values()))
        entry = Entry(
            runtime=first.runtime,
            files={graph.file: graph.data for graph in graphs.values()},
            graphs={
                name: StoredGraph(graph.file, graph.operators, graph.size, graph.plan)
                for name, graph in graphs.items()
            },
        )
        self.write(key + ENTRY, entry)

    def with_figures(self, graph: Graph, batch: int) -> Graph | None:
        """Return the ONNX `graph` with its stored forms and figures for `batch` samples.

        Returns None if no figures are stored for this graph.
        """
        stored = self.read(figures_key(graph.data, batch) + FIGURES, StoredFigures)
        if stored is None:
            return None
        return replace(graph, forms=stored.forms, figures=stored.figures)

    def keep_figures(self, graph: Graph) -> None:
        """Store the other forms and the figures of an ONNX `graph`."""
        assert graph.figures is not None
        stored = StoredFigures(dict(graph.forms), graph.figures)
        self.write(figures_key(graph.data, graph.figures.batch) + FIGURES, stored)

    def verdict(self, key: str, graphs: Graphs) -> Verdict | None:
        """The verdict of an earlier export on exactly these `graphs`, or None."""
        stored = self.read(key + VERDICT, StoredVerdict)
        if stored is None or stored.files != files_digest(graphs):
            return None
        return stored.verdict

    def keep_verdict(self, key: str, graphs: Graphs, verdict: Verdict) -> None:
        """Store that `graphs` passed verification with `verdict`."""
        self.write(key + VERDICT, StoredVerdict(files_digest(graphs), verdict))

    def read(self, name: str, kind: type[T]) -> T | None:
        """The content of the file `name`, decoded; None if it is missing or damaged."""
        path = self.folder / name
        try:
            data = path.read_bytes()
            expected, content = data[:HASH_BYTES], data[HASH_BYTES:]
            if hashlib.sha256(content).digest() != expected:
                return None
            value = msgspec.msgpack.decode(content, type=kind)
        except (OSError, msgspec.MsgspecError):
            return None
        with suppress(OSError):
            # `shrink` deletes by the time of last use. Many systems do not update access times.
            os.utime(path)
        return value

    def write(self, name: str, value: Entry | StoredFigures | StoredVerdict) -> None:
        """Replace the file `name` in one step, and keep the folder within its limit.

        Errors of the disk are ignored.
        """
        content = msgspec.msgpack.encode(value)
        with suppress(OSError):
            write_file(self.folder / name, hashlib.sha256(content).digest() + content)
        self.shrink()

    def shrink(self) -> None:
        """Delete the least recently used files until the folder is within its limit."""
        with suppress(OSError):  # another process may delete the same files
            stats = [(file, file.stat()) for file in os.scandir(self.folder) if file.is_file()]
            excess = sum(stat.st_size for _, stat in stats) - self.limit_bytes
            for file, stat in sorted(stats, key=lambda item: item[1].st_mtime_ns):
                if excess <= 0:
                    return
                excess -= stat.st_size
                os.unlink(file)


def graph_of(stored: StoredGraph, entry: Entry) -> Graph:
    """The graph of one signature. The graph's footprint is computed when it is first needed."""
    data = entry.files[stored.file]
    return Graph(
        entry.runtime,
        stored.file,
        data,
        stored.operators,
        stored.size,
        partial(onnx_footprint.footprint, data)
        if stored.plan is None
        else partial(tflite_footprint.footprint, stored.plan),
        plan=stored.plan,
    )


def files_digest(graphs: Graphs) -> str:
    """SHA-256 of the files of `graphs`."""
    files = {graph.file: graph.data for graph in graphs.values()}
    return digest(
        text for file in sorted(files) for text in (file, hashlib.sha256(files[file]).hexdigest())
    )


def default_cache() -> GraphCache:
    """The cache of graphs in `cache_folder`."""
    return GraphCache(cache_folder() / "graphs")
