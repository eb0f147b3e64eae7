"""A round with too few updates at its deadline opens again: no single device becomes the model."""

from pathlib import Path

import pytest

from device_agent.formats.protocol.rounds import SubmodelFailure
from large_fleet import LargeFleet
from toolkit.coordinator.coordinator import restore
from toolkit.coordinator.rounds.round_state import fewest_updates
from vector_fleet import messages_to

DEADLINE_S = 600.0


class SlowFleet(LargeFleet):
    """Its clock stands until it is set."""

    def __init__(self, folder: Path, devices: int) -> None:
        self.now = 0.0
        super().__init__(folder, devices, clock=lambda: self.now)

    def after_the_deadline(self) -> list[str]:
        """What is logged when the open round comes to its deadline."""
        self.now += DEADLINE_S
        told: list[str] = []
        with messages_to(told.append):
            self.worker.turn()
        return told

    def send_value(self, folder: Path, number: int, value: float) -> None:
        self.send(number, self.update(folder / str(number), number, value))


def test_one_update_of_twelve_is_not_published_and_need_not_come_again(tmp_path: Path) -> None:
    fleet = SlowFleet(tmp_path, 12)
    fleet.send_value(tmp_path, 0, 2.0)
    failure = SubmodelFailure(submodel="full", failures=3, reason="out of memory")
    fleet.coordinator.submodel_failed(fleet.device(1), failure)
    (told,) = fleet.after_the_deadline()
    assert told == (
        "Round 1: 1 update came before its deadline, but a round needs at least 6. The round "
        "stays open for 600 s more. The updates that have come count."
    )
    assert [fleet.coordinator.work(fleet.device(n)).state for n in (0, 1, 2)] == [
        "wait", "train", "train",
    ]  # fmt: skip
    for number in range(2, 7):
        fleet.send_value(tmp_path, number, 4.0)
    fleet.worker.turn()
    assert fleet.coordinator.rounds.done == 0  # others may still come
    assert [line for line in fleet.after_the_deadline() if line.startswith("Round 1 of")] == [
        "Round 1 of 3: accuracy 0.5000, loss 3.6667, from 6 updates"
    ]
    fleet.store.close()


def test_a_round_that_nobody_answers_says_so_once_and_then_rarely(tmp_path: Path) -> None:
    fleet = SlowFleet(tmp_path, 3)
    told = [fleet.after_the_deadline() for _ in range(11)]
    assert [len(lines) for lines in told] == [1, *[0] * 8, 1, 0]
    assert told[0][0].startswith("Round 1: 0 updates came before its deadline")
    assert told[9] == [f"{told[0][0]} It was opened again 10 times."]
    # A restart in the repeated round keeps its deadline.
    fleet.now += DEADLINE_S - 1
    coordinator = restore(fleet.config, fleet.store, lambda: fleet.now)
    assert coordinator.store.open_round.begin(1, 0.0) > 0
    fleet.store.close()


@pytest.mark.parametrize(
    ("waited_for", "members", "given", "quorum", "fewest"),
    [
        (1, 1, None, None, 1),
        (2, 2, None, None, 1),
        (3, 3, None, None, 2),
        (1, 3, None, None, 2),
        (12, 12, None, None, 6),
        (7, 12, None, None, 4),
        (12, 12, None, 1, 1),
        (12, 12, None, 9, 6),
        (12, 12, 1, None, 1),
        (12, 12, 3, 3, 3),
    ],
)
def test_the_fewest_updates(
    waited_for: int, members: int, given: int | None, quorum: int | None, fewest: int
) -> None:
    assert fewest_updates(waited_for, members, given, quorum) == fewest
