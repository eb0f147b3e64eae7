"""What does not go with secure sums is said when the federation's file is read."""

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
FINE = {
    "keys": "", "training": "", "aggregation": "", "evaluation": "", "privacy": "",
    "submodel": "full", "count": 5, "kind": "",
}  # fmt: skip


def test_a_file_with_secure_sums(tmp_path: Path) -> None:
    config = configured(tmp_path, FLEET.format(**FINE))
    assert config.secure_terms is not None
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
        ({"aggregation": "bounds = true"}, "needs bounds = false"),
        ({"evaluation": "share = 0.2\nby_class = true"}, "`by_class` of [evaluation]"),
        ({"training": "masked = true"}, "masked = true"),
        ({"privacy": "clip = 1.0\nnoise_multiplier = 1.0"}, "not possible yet"),
        ({"privacy": "smallest_group = 2"}, "smallest_group"),
        ({"submodel": "low-rank:0.5"}, "low-rank:0.5 of the kind 'board'"),
        ({"submodel": "slice:0.42+low-rank:0.5"}, "the product of the mean factors"),
        ({"kind": 'fallback = "low-rank:0.5"'}, "low-rank:0.5 of the kind 'board'"),
        ({"submodel": "auto"}, "whose submodels are planned"),
        ({"count": 4}, "a group of 4 devices"),
    ],
)
def test_a_misfit_is_refused(tmp_path: Path, values: dict[str, object], said: str) -> None:
    with refused("config.bad-value") as error:
        configured(tmp_path, FLEET.format(**{**FINE, **values}))
    assert said in str(error.value)
