"""Shares samples among clients: evenly, by a Dirichlet distribution, in shards, or by writers.

Each sample goes to exactly one client, and each client gets at least `LEAST` samples.
"""

from collections.abc import Sequence

import numpy as np

from profiles.errors import InputError

LEAST = 2
"""The fewest samples of a client: batch norm cannot train on a single sample."""

Parts = list[np.ndarray]
"""The indices of the samples of each client."""


def iid_split(samples: int, clients: int, order: np.random.Generator) -> Parts:
    """Shuffle the samples and give each client the same number of samples, or one more."""
    check_enough(samples, clients)
    return np.array_split(order.permutation(samples), clients)


def dirichlet_split(
    labels: np.ndarray, clients: int, alpha: float, order: np.random.Generator
) -> Parts:
    """Give each client a Dirichlet share of the samples of every label.

    Args:
        labels: The labels of all samples (n,).
        clients: The number of clients.
        alpha: Concentration; the smaller, the fewer labels a client gets.
        order: The random generator that draws the shares.

    Raises:
        InputError: There are fewer than `LEAST` samples for each client.
    """
    check_enough(len(labels), clients)
    pieces: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        own = order.permutation(np.flatnonzero(labels == label))
        shares = order.dirichlet(np.full(clients, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(own)).astype(int)
        for piece, part in zip(pieces, np.split(own, cuts), strict=True):
            piece.append(part)
    return _level([np.concatenate(piece) for piece in pieces])


def shard_split(labels: np.ndarray, clients: int, shards: int, order: np.random.Generator) -> Parts:
    """Sort the samples by label, cut them into equal shards and deal them (McMahan et al., sec. 3).

    Args:
        labels: The labels of all samples (n,).
        clients: The number of clients.
        shards: Shards of each client.
        order: The random generator that deals the shards.

    Raises:
        InputError: There are fewer than `LEAST` samples for each client.
    """
    check_enough(len(labels), clients)
    mixed = order.permutation(len(labels))
    by_label = mixed[np.argsort(labels[mixed], kind="stable")]
    pieces = np.array_split(by_label, clients * shards)
    dealt = order.permutation(len(pieces)).reshape(clients, shards)
    return _level([np.concatenate([pieces[number] for number in hand]) for hand in dealt])


def writer_split(writers: np.ndarray, clients: int, order: np.random.Generator) -> Parts:
    """Give each client the same number of writers, or one more, with all their samples.

    Args:
        writers: The number of each sample's writer (n,).
        clients: The number of clients.
        order: The random generator that deals the writers.

    Raises:
        InputError: There are fewer writers than clients, or too few samples.
    """
    check_enough(len(writers), clients)
    known, places = np.unique(writers, return_inverse=True)
    if len(known) < clients:
        raise InputError(
            "The data have {writers} writers, too few for {clients} clients. Use fewer clients or "
            "more data.",
            code="data.too-few-writers",
            writers=len(known),
            clients=clients,
        )
    client = order.permutation(len(known)) % clients  # of each writer
    client = client[places]  # of each sample
    cuts = np.cumsum(np.bincount(client, minlength=clients))[:-1]
    return _level(np.split(np.argsort(client, kind="stable"), cuts))


def check_enough(samples: int, clients: int) -> None:
    """Raise InputError unless there are `LEAST` samples for each client."""
    if samples < LEAST * clients:
        raise InputError(
            "{samples} samples are too few for {clients} clients: each client needs {least}. Use "
            "fewer clients or more data.",
            code="data.too-few-for-clients",
            samples=samples,
            clients=clients,
            least=LEAST,
        )


def _level(parts: Sequence[np.ndarray]) -> Parts:
    """Move samples from the largest part to parts that have fewer than `LEAST`."""
    parts = list(parts)
    while min(map(len, parts)) < LEAST:
        sizes = [len(part) for part in parts]
        poor, rich = int(np.argmin(sizes)), int(np.argmax(sizes))
        parts[poor] = np.append(parts[poor], parts[rich][-1])
        parts[rich] = parts[rich][:-1]
    return parts
