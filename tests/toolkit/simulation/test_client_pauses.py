"""The judge pauses simulated clients by the rule of `serve`."""

from fractions import Fraction

import numpy as np

from device_agent.formats.protocol.fleet import Limited
from toolkit.aggregation.committee import REJECTED
from toolkit.aggregation.model_judge import JUDGED
from toolkit.simulation.judging.client_pauses import ClientPauses

OUT, FAR, BEYOND = "left out", "too far", "beyond a limit"
REFUSED, WELL = "by a committee", "well"
REASONS = {OUT: f"{JUDGED}: worse", REFUSED: f"{REJECTED}: worse"}
LIMITS = {
    FAR: Limited(samples=8, counted=2, too_far=True),
    WELL: Limited(samples=9, counted=3, times=3.0),
}
LIMITS |= {BEYOND: Limited(tensor="w", tensors=2, times=3.01)}


def test_pauses_are_those_of_counting(seed: int) -> None:
    """Of the last twenty updates more than half do harm, and three or five do much."""
    draw, pauses, clients = np.random.default_rng(seed), ClientPauses(), range(12)
    shares = draw.dirichlet([1.0, 0.7, 1.0, 0.3, 2.0], size=len(clients))
    updates: dict[int, list[str]] = {client: [] for client in clients}
    told = set()
    for round_ in range(1, 60):
        came = {
            client: str(draw.choice([OUT, FAR, BEYOND, REFUSED, WELL], p=shares[client]))
            for client in clients
            if draw.random() < 0.7
        }
        expected = []
        for client, what in came.items():
            updates[client].append(what)
            last = updates[client][-20:]
            harm = last.count(OUT) + last.count(FAR) + last.count(BEYOND)
            half = Fraction(harm, len(last)) > Fraction(1, 2)
            if half and (last.count(OUT) >= 3 or last.count(BEYOND) >= 5):
                expected.append(client)
        left_out = {str(n): REASONS[what] for n, what in came.items() if what in REASONS}
        limited = {str(n): LIMITS[what] for n, what in came.items() if what in LIMITS}
        assert pauses.after(round_, came, left_out, limited) == expected
        told |= {*expected}
    assert told
