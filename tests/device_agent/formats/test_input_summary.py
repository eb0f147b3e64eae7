"""Summaries of inputs: what they tell, and which inputs lie far off."""

import json
import math

import numpy as np
import pytest

from device_agent.formats.input_summary import LEAST_SAMPLES, far_off, summary_of
from device_agent.formats.manifest import encode
from device_agent.formats.protocol.rounds import MOST_CHANNELS, InputSummary
from device_agent.formats.update import decode_record
from profiles.errors import UpdateError
from updates import record_of


def samples(seed: int, count: int = 200, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, *shape))
    return drawn.astype(np.float32)


def test_quantiles_by_channel_in_two_digits(seed: int) -> None:
    x = samples(seed) * np.array([1, 50, 1e-3], np.float32)[:, None]
    summary = summary_of(x)
    assert summary is not None
    for channel, quantiles in enumerate(summary.channels):
        expected = np.sort(x[:, channel].reshape(-1))[[50, 500, 950]]  # of 1,000 values
        width = expected[2] - expected[0]
        assert np.allclose(quantiles, expected, rtol=0.06, atol=0.01 * width)
        assert all(value == float(f"{value:.1e}") for value in quantiles)


def test_what_has_no_summary(seed: int) -> None:
    assert summary_of(np.zeros((100, 8), np.int64)) is None
    assert summary_of(samples(seed, LEAST_SAMPLES - 1)) is None


def test_many_channels_are_one(seed: int) -> None:
    summary = summary_of(samples(seed, shape=(MOST_CHANNELS + 1,)))
    assert summary is not None
    assert len(summary.channels) == 1


@pytest.mark.parametrize(
    ("scale", "offset", "is_far"),
    [
        *((1.0, 0.0, False), (1.5, 0.5, False), (0.4, -1.0, False)),
        *((10_000.0, 0.0, True), (1e-3, 0.0, True), (9.81, 0.0, True), (1.0, 273.15, True)),
    ],
)
def test_other_units_lie_far_off(seed: int, scale: float, offset: float, is_far: bool) -> None:
    reference, x = summary_of(samples(seed)), samples(seed + 1)
    x[:, 2] = x[:, 2] * scale + offset
    own = summary_of(x)
    assert own is not None
    assert reference is not None
    difference = far_off(own, reference)
    assert (difference is not None) == is_far
    assert difference is None or difference.startswith("channel 2: ")


def test_a_constant_channel_is_held_against_the_others(seed: int) -> None:
    x = samples(seed)
    x[:, 1] = 0
    reference, own = summary_of(x), summary_of(samples(seed + 1))
    assert own is not None
    assert reference is not None
    assert far_off(own, reference) is None
    assert far_off(reference, own) is None
    x[:, 1] = 1000
    shifted = summary_of(x)
    assert shifted is not None
    assert far_off(shifted, reference) is not None


@pytest.mark.parametrize(
    "channels",
    [
        [[0.0, 0.0, 1e300]],
        [[0.0, 0.0, math.nan]],
        [[0.0, 0.0]],
        [[0.0, 0.0, 0.0]] * (MOST_CHANNELS + 1),
        "none",
    ],
)
def test_hostile_summaries_are_refused(channels: object) -> None:
    document = json.loads(encode(record_of("full", 1, ())))
    assert "inputs" not in document  # coordinators before 0.2 refuse the field
    document["inputs"] = {"channels": channels}
    with pytest.raises(UpdateError):
        decode_record(json.dumps(document).encode(), "it")
    document["inputs"] = {"channels": [[0.0, 1.0, 2.0]]}
    read = decode_record(json.dumps(document).encode(), "it")
    assert read.inputs == InputSummary(((0.0, 1.0, 2.0),))
