"""The memory that the arena of ONNX Runtime requests from the system for the buffers of a run.

The arena requests memory in regions. Each region is twice as large as the previous region. The
arena divides its regions into blocks, and keeps the regions until the session ends. The total size
depends on the order of all requests for blocks, so this module replays these requests. A block goes
into the smallest gap that is large enough. The rest of the gap becomes a new gap only if it is at
least as large as the block. If several gaps have the same size, the arena uses the gap at the
lowest address. On Linux, small regions have lower addresses than large regions, and each large
region has a lower address than the previous large region. All sizes are in bytes.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from device_agent.system.process_memory import LARGE_BYTES
from exporters.memory.liveness import Buffer

GRAIN = 256
"""Sizes of blocks are multiples of this number of bytes."""
FIRST_REGION = 2**20
MOST_REGIONS = 2**16
"""Large regions are numbered downwards from this number."""
PAGE = 4096
TABLE = 32
"""The size of a region divided by TABLE is the size of its table. For every GRAIN bytes of the
region, the table has 8 bytes, which name the block at this place."""


@dataclass
class Block:
    """A free or used part of a region, with its neighbours before and behind it.

    Regions are numbered in the order of their addresses.
    """

    region: int
    start: int
    size: int
    free: bool = True
    before: "Block | None" = None
    behind: "Block | None" = None

    @property
    def key(self) -> tuple[int, int, int]:
        """The order in which the arena tries free blocks: by size, then by address."""
        return (self.size, self.region, self.start)


@dataclass
class Arena:
    """The regions of an arena.

    `used` maps the number of a region to the end of its used part, in bytes from the start of the
    region. The system provides no memory for the pages after this end, because nothing was written
    to them. `tables` is the total size of all tables, which are written completely. `gaps` has the
    keys of free blocks, sorted.
    """

    next_region: int = FIRST_REGION
    used: dict[int, int] = field(default_factory=dict)
    tables: int = 0
    gaps: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        """Bytes that the system provided, in whole pages, including the tables of the regions."""
        return sum(-(-used // PAGE) * PAGE for used in self.used.values()) + self.tables

    def take(self, size: int) -> Block:
        """Allocate a block for `size` bytes."""
        wanted = max(GRAIN, -(-size // GRAIN) * GRAIN)
        if not any(gap[0] >= wanted for gap in self.gaps):
            self.extend(wanted)
        block = self.remove(next(gap for gap in self.gaps if gap[0] >= wanted))
        # ONNX Runtime (BFCArena) uses the whole gap unless the rest is as large as the block.
        if block.size >= 2 * wanted:
            self.split(block, wanted)
        block.free = False
        self.used[block.region] = max(self.used[block.region], block.start + size)
        return block

    def release(self, block: Block) -> None:
        """Free `block` and merge it with its free neighbours."""
        block.free = True
        for left, right in ((block, block.behind), (block.before, block)):
            if left is not None and right is not None and left.free and right.free:
                self.merge(left, right)
                block = left
        self.insert(block)

    def extend(self, wanted: int) -> None:
        """Request another region of at least `wanted` bytes."""
        # If a region has to grow for this request, the next one is not doubled.
        enough = self.next_region >= wanted
        while self.next_region < wanted:
            self.next_region *= 2
        count = len(self.used)
        region = count if self.next_region < LARGE_BYTES else MOST_REGIONS - count
        self.insert(Block(region, 0, self.next_region))
        self.used[region] = 0
        self.tables += self.next_region // TABLE
        if enough:
            self.next_region *= 2

    def split(self, block: Block, wanted: int) -> None:
        """Shorten `block` to `wanted` bytes. The rest becomes a gap."""
        rest = Block(
            block.region, block.start + wanted, block.size - wanted, True, block, block.behind
        )
        if block.behind is not None:
            block.behind.before = rest
        block.size, block.behind = wanted, rest
        self.insert(rest)

    def merge(self, left: Block, right: Block) -> None:
        """Merge two neighbours, and remove both from the gaps. The caller inserts the new block."""
        for block in (left, right):
            if block.key in self.gaps:
                self.remove(block.key)
        left.size += right.size
        left.behind = right.behind
        if right.behind is not None:
            right.behind.before = left

    def insert(self, block: Block) -> None:
        """Add `block` to the gaps."""
        self.blocks[block.region, block.start] = block
        insort(self.gaps, block.key)

    def remove(self, key: tuple[int, int, int]) -> Block:
        """Remove a gap and return its block."""
        self.gaps.remove(key)
        return self.blocks[key[1:]]


def arena_bytes(buffers: Iterable[Buffer], runs: int = 3) -> int:
    """The size of the runtime arena after `runs` runs that each need `buffers`, in bytes.

    Later runs may need more than the first run, because they start with the gaps of earlier runs.
    """
    needed = [buffer for buffer in buffers if buffer.size]
    births: dict[int, list[int]] = defaultdict(list)
    deaths: dict[int, list[int]] = defaultdict(list)
    for number, buffer in enumerate(needed):
        births[buffer.birth].append(number)
        deaths[buffer.death].append(number)
    arena = Arena()
    for _ in range(runs):
        held: dict[int, Block] = {}
        for step in sorted({*births, *deaths}):
            # A node allocates its outputs before the buffers that it reads last are freed.
            for number in births[step]:
                held[number] = arena.take(needed[number].size)
            for number in deaths[step]:
                arena.release(held[number])
    return arena.taken
