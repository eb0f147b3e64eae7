"""How samples are shared among clients: properties of every partition."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusals import refused
from toolkit.simulation.partition import (
    LEAST,
    Parts,
    dirichlet_split,
    iid_split,
    shard_split,
    writer_split,
)

LABELS = st.lists(st.integers(0, 9), min_size=24, max_size=200).map(np.array)
CLIENTS = st.integers(1, 12)
SEEDS = st.integers(0, 2**40)
SPLITS: dict[str, Callable[[np.ndarray, int, np.random.Generator], Parts]] = {
    "iid": lambda y, clients, order: iid_split(len(y), clients, order),
    "dirichlet": lambda y, clients, order: dirichlet_split(y, clients, 0.1, order),
    "shards": lambda y, clients, order: shard_split(y, clients, 2, order),
    "writers": lambda y, clients, order: writer_split(np.arange(len(y)) // 2, clients, order),
}
every_split = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)


@every_split
@given(labels=LABELS, clients=CLIENTS, seed=SEEDS)
def test_every_sample_is_one_client_s(
    split: Callable[..., Parts], labels: np.ndarray, clients: int, seed: int
) -> None:
    parts = split(labels, clients, np.random.default_rng(seed))
    assert len(parts) == clients
    assert min(map(len, parts)) >= LEAST
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


@every_split
@given(labels=LABELS, clients=CLIENTS, seed=SEEDS)
def test_a_seed_gives_the_same_parts_again(
    split: Callable[..., Parts], labels: np.ndarray, clients: int, seed: int
) -> None:
    one, other = (split(labels, clients, np.random.default_rng(seed)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@every_split
def test_too_few_samples_are_refused(split: Callable[..., Parts]) -> None:
    with refused("data.too-few-for-clients", samples=5, clients=3):
        split(np.zeros(5, int), 3, np.random.default_rng(0))


@given(clients=CLIENTS, seed=SEEDS)
def test_iid_parts_are_of_one_size(clients: int, seed: int) -> None:
    sizes = [len(part) for part in iid_split(101, clients, np.random.default_rng(seed))]
    assert max(sizes) - min(sizes) <= 1


@given(clients=st.integers(2, 10), shards=st.integers(1, 3), seed=SEEDS)
def test_a_shard_has_at_most_two_labels(clients: int, shards: int, seed: int) -> None:
    """Ten labels of 60 samples: a shard of at most 60 spans at most two of them."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(10), 60))
    hypothetical = 600 // (clients * shards)
    parts = shard_split(labels, clients, shards, np.random.default_rng(seed))
    if hypothetical < 60:
        assert max(len(np.unique(labels[part])) for part in parts) <= 2 * shards


@given(seed=SEEDS)
def test_a_small_alpha_gives_few_labels(seed: int) -> None:
    labels = np.repeat(np.arange(10), 100)
    most = [
        np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])
        for parts in (
            dirichlet_split(labels, 8, alpha, np.random.default_rng(seed)) for alpha in (0.1, 100)
        )
    ]
    assert most[0] > 2 * most[1]
