"""The status of a large fleet, which lists the first devices only."""

from device_agent.federation.fleet_status import lines
from device_agent.formats.protocol.fleet import DeviceStatus, Status


def status(listed: int, **more: object) -> Status:
    devices = [
        DeviceStatus(
            device=f"board-{number}",
            name="pi",
            submodel="full",
            state="waiting",
            loss=None,
            rounds_trained=0,
            bytes_down=0,
            bytes_up=0,
            idle_s=0.0,
        )
        for number in range(1, listed + 1)
    ]
    known = {"state": "enrolling", "round": 0, "rounds": 3, "expected_devices": 12_000}
    return Status(devices=devices, history=[], **{**known, **more})


def test_devices_that_are_not_listed_are_counted() -> None:
    states = {"waiting": 8_000, "training": 1_500, "left": 500}
    head, *rows = lines(status(3, states=states))
    assert "(9500 of 12,000 devices have joined)" in head
    assert [row.split()[0] for row in rows[:3]] == ["board-1", "board-2", "board-3"]
    said = " ".join(line.strip() for line in rows[3:])
    assert said.startswith("and 9,997 more devices (`edgetailor devices` lists them)")
    assert said.endswith("of all: 8,000 waiting, 1,500 training, 500 left")
    assert max(map(len, rows)) <= 80


def test_a_small_fleet_is_listed_whole() -> None:
    for sent in ({"states": {"waiting": 3}}, {}):  # an earlier coordinator sends no states
        head, *rows = lines(status(3, **sent))
        assert "3 of 12,000" in head
        assert len(rows) == 3
