"""The federation's file is refused if a key cannot be combined with secure sums."""

from pathlib import Path

import pytest

from refusals import refused
from vector_fleet import configured

FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [2]
rounds = 2
held_out = "held_out.npz"
{keys}

[training]
epochs = 1
{training}

[aggregation]
{aggregation}

[evaluation]
{evaluation}

[privacy]
secure_aggregation = true
{privacy}

[[devices]]
name = "board"
submodel = "{submodel}"
count = {count}
{kind}
"""
NOISE = "clip = 1.0\ndelta = 0.1\nnoise_multiplier = 1.0"
FINE = {
    "keys": "", "training": "", "aggregation": "", "evaluation": "", "privacy": "",
    "submodel": "full", "count": 5, "kind": "",
}  # fmt: skip


def test_a_file_with_secure_sums(tmp_path: Path) -> None:
    config = configured(tmp_path, FLEET.format(**FINE))
    assert config.secure_terms(None) is not None
    assert not config.aggregation.bounds
    assert not config.aggregation.judge


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keys": 'mode = "async"\nbuffer_size = 3'}, 'set mode = "sync"'),
        ({"keys": "site = true"}, "`site = true`"),
        ({"keys": "keep_updates = 1"}, "`keep_updates`"),
        ({"keys": "budget_s = 5"}, "`budget_s`"),
        ({"keys": 'clients_per_round = 5\nselection = "data-size"'}, "another selection"),
        ({"aggregation": 'rule = "median"'}, 'rule = "median"'),
        ({"aggregation": 'weights = "uniform"'}, "most_samples = 1"),
        ({"aggregation": 'factors = "act"'}, 'factors = "act"'),
        ({"aggregation": "bounds = true"}, "[privacy] sets bounds = false itself"),
        ({"evaluation": "share = 0.2\nby_class = true"}, "`by_class` of [evaluation]"),
        ({"training": "masked = true"}, "masked = true"),
        ({"privacy": f"{NOISE}\nclip_quantile = 0.5"}, "remove `clip_quantile`"),
        ({"privacy": f"{NOISE}\nmost_samples = 50"}, "remove `most_samples`"),
        ({"privacy": NOISE, "submodel": "cp:2.0"}, "noise in factors"),
        ({"privacy": NOISE, "keys": "clients_per_round = 4"}, "a round asks 4 devices"),
        ({"privacy": NOISE, "evaluation": "share = 0.2"}, "counts from devices get no noise"),
        ({"privacy": "smallest_group = 2"}, "smallest_group"),
        ({"submodel": "auto"}, "whose devices get planned submodels"),
        ({"count": 4}, "a group of 4 devices"),
    ],
)
def test_a_misfit_is_refused(tmp_path: Path, values: dict[str, object], said: str) -> None:
    with refused("config.bad-value", said):
        configured(tmp_path, FLEET.format(**{**FINE, **values}))
