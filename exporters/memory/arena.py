"""What ONNX Runtime's memory arena takes from the system for the buffers of a run.

The arena asks for regions, each twice the last, cuts blocks out of them and keeps them until the
session ends. It is followed block by block because what it takes depends on the order of all
requests: a block goes into the smallest gap that holds it, and leaves what is behind it as a gap
only where that is at least as large. All sizes are bytes.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from exporters.memory.liveness import Buffer

GRAIN = 256
"""Blocks are multiples of this."""
FIRST_REGION = 2**20
PAGE = 4096
TABLE = 32
"""The arena notes for each GRAIN of a region, used or not, which block it is in, in 8 bytes: a
32nd of the region."""


@dataclass
class Block:
    """A part of a region, free or not; its neighbours are the ones before and behind it."""

    region: int
    start: int
    size: int
    free: bool = True
    before: "Block | None" = None
    behind: "Block | None" = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Free blocks are tried in this order: by size, then by place."""
        return (self.size, self.region, self.start)


@dataclass
class Arena:
    """Regions and how far each was ever used: memory that was never written costs nothing.

    `tables`: bytes of the regions' tables, all of which are written.
    """

    next_region: int = FIRST_REGION
    used: list[int] = field(default_factory=list)
    tables: int = 0
    gaps: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        """Bytes that the system had to provide, in whole pages, tables of the regions included."""
        return sum(-(-used // PAGE) * PAGE for used in self.used) + self.tables

    def take(self, size: int) -> Block:
        """A block for `size` bytes."""
        wanted = max(GRAIN, -(-size // GRAIN) * GRAIN)
        if not any(gap[0] >= wanted for gap in self.gaps):
            self.extend(wanted)
        block = self.remove(next(gap for gap in self.gaps if gap[0] >= wanted))
        if block.size >= 2 * wanted:
            self.split(block, wanted)
        block.free = False
        self.used[block.region] = max(self.used[block.region], block.start + size)
        return block

    def release(self, block: Block) -> None:
        """Give `block` back; free neighbours become one."""
        block.free = True
        for left, right in ((block, block.behind), (block.before, block)):
            if left is not None and right is not None and left.free and right.free:
                self.merge(left, right)
                block = left
        self.insert(block)

    def extend(self, wanted: int) -> None:
        """Get another region, of at least `wanted` bytes."""
        enough = self.next_region >= wanted
        while self.next_region < wanted:
            self.next_region *= 2
        self.insert(Block(len(self.used), 0, self.next_region))
        self.used.append(0)
        self.tables += self.next_region // TABLE
        if enough:
            self.next_region *= 2

    def split(self, block: Block, wanted: int) -> None:
        """Leave all of `block` but `wanted` bytes as a gap."""
        rest = Block(
            block.region, block.start + wanted, block.size - wanted, True, block, block.behind
        )
        if block.behind is not None:
            block.behind.before = rest
        block.size, block.behind = wanted, rest
        self.insert(rest)

    def merge(self, left: Block, right: Block) -> None:
        """Make two neighbours one; whichever is among the gaps leaves them."""
        for block in (left, right):
            if block.key in self.gaps:
                self.remove(block.key)
        left.size += right.size
        left.behind = right.behind
        if right.behind is not None:
            right.behind.before = left

    def insert(self, block: Block) -> None:
        """Put `block` among the gaps."""
        self.blocks[block.region, block.start] = block
        insort(self.gaps, block.key)

    def remove(self, key: tuple[int, int, int]) -> Block:
        """Take a gap out from among them."""
        self.gaps.remove(key)
        return self.blocks[key[1:]]


def arena_bytes(buffers: Iterable[Buffer], runs: int = 3) -> int:
    """Bytes that an arena has taken after `runs` runs that need `buffers`."""
    needed = [buffer for buffer in buffers if buffer.size]
    births: dict[int, list[int]] = defaultdict(list)
    deaths: dict[int, list[int]] = defaultdict(list)
    for number, buffer in enumerate(needed):
        births[buffer.birth].append(number)
        deaths[buffer.death].append(number)
    arena = Arena()
    for _ in range(runs):
        held: dict[int, Block] = {}
        for place in sorted({*births, *deaths}):
            for number in births[place]:
                held[number] = arena.take(needed[number].size)
            for number in deaths[place]:
                arena.release(held[number])
    return arena.taken
