"""What a secure sum costs a device and the coordinator, in bytes and seconds of one core.

Groups of devices add up vectors of a model with 1.24M parameters in memory, without a network. Of
each group, `--lost` (a fifth) sends shares and is lost before its masked update. The sum is
compared with numpy's. Prints a table. Run `make bench-secagg`; ARGS="10 100 300" names the sizes.
"""

import argparse
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from device_agent.formats.protocol.secure_sums import SecureShares
from profiles.text_formatting import format_bytes
from secure_groups import Group, drawn

PARAMETERS = 1_240_000
SIZES = (10, 100)


class Costs:
    """Seconds and bytes, by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - begun

    def sent(self, what: str, message: object) -> None:
        self.bytes[what] = self.bytes.get(what, 0) + len(msgspec.json.encode(message))


def measured(devices: int, lost: float) -> Costs:
    """The costs of one sum. Raises AssertionError if it is not numpy's."""
    costs = Costs()
    vectors = drawn(devices, np.random.default_rng(0), elements=1)
    with costs.timed("keys"):
        group = Group(vectors)
    for member in group.members:
        costs.sent("up", member.keys)
    own = group.sum
    for device, sharer in group.sharers.items():
        asked = own.step_of(device)
        costs.sent("down", asked)
        with costs.timed("shares"):
            shares = sharer.shares(asked.members)
        costs.sent("up", SecureShares(shares=shares))
        with costs.timed("coordinator"):
            own.take_shares(device, shares)
    own.advance()
    gone = sorted(vectors)[: round(lost * devices)]
    total, plain = np.zeros(PARAMETERS, np.uint32), np.zeros(PARAMETERS, np.uint32)
    for device in sorted(own.waits_for - set(gone)):
        draw = np.random.default_rng(len(plain) + plain[0])
        vector = draw.integers(2**32, size=PARAMETERS, dtype=np.uint32)
        plain += vector
        asked = own.step_of(device)
        costs.sent("down", asked)
        with costs.timed("masks"):
            masked = group.sharers[device].masked(asked.shares, vector)
        with costs.timed("coordinator"):
            total += masked
            own.take_input(device)
    own.advance()
    for device in sorted(own.waits_for):
        asked = own.step_of(device)
        costs.sent("down", asked)
        with costs.timed("rest"):
            signature = group.sharers[device].confirmed(asked.present)
        with costs.timed("coordinator"):
            own.take_confirmation(device, signature)
    own.advance()
    for device in sorted(own.waits_for):
        asked = own.step_of(device)
        costs.sent("down", asked)
        with costs.timed("rest"):
            given = group.sharers[device].unmasking(asked.present, asked.confirmations)
        costs.sent("up", given)
        own.take_unmasking(device, given)
    own.advance()
    with costs.timed("unmasking"):
        found = own.total([total])
    assert np.array_equal(found, plain)
    return costs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--lost", type=float, default=0.2)
    options = parser.parse_args()
    update = 4 * PARAMETERS
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"A plain update has {format_bytes(update)}; {options.lost:.0%} of each group is lost.")
    print("| devices | more up | more down | device | coordinator |")
    print("|---|---|---|---|---|")
    for devices in options.sizes:
        costs = measured(devices, options.lost)
        seconds = costs.seconds
        device = sum(seconds[what] for what in ("keys", "shares", "masks", "rest")) / devices
        server = seconds["coordinator"] + seconds["unmasking"]
        up, down = (format_bytes(costs.bytes[way] // devices) for way in ("up", "down"))
        print(f"| {devices} | {up} | {down} | {device:.2f} s | {server:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
