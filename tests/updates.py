"""Updates of every family by hand, and what numpy makes of them in float64."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from device_agent.formats.manifest import FileEntry, Role, TensorEntry, uploaded
from device_agent.formats.update import UpdateRecord
from profiles.errors import UpdateError
from refusals import refused
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.limits.reference import Figures
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.submodel import Ranges

Array = np.ndarray
RANK = 2
CONV = (4, 3, 3, 3)
PARAMETERS = {"w": (2, 3), "c": CONV}


def numbers(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn_updates(federation: Federation, specs: Sequence[str], seed: int) -> list[Received]:
    """An update of each spec: what a device received, moved at random."""
    draw = np.random.default_rng(seed)
    updates: list[Received] = []
    for spec in specs:
        submodel = federation.submodel(spec)
        table, cut = uploaded(submodel.program.tensors), submodel.cut(federation.model)
        arrays = {
            e.name: np.abs(cut[e.name].numpy() + 0.1 * draw.normal(size=e.shape)).astype(np.float32)
            for e in table
        }
        updates.append((record_of(spec, int(draw.integers(1, 500)), table), arrays))
    return updates


OLD = GlobalModel(
    {name: torch.from_numpy(numbers(shape, 99)) for name, shape in PARAMETERS.items()}
)


def entry(
    name: str,
    shape: tuple[int, ...],
    stands_for: str | None,
    factor: str | None = None,
    part: Ranges | None = None,
    role: Role = "parameter",
) -> TensorEntry:
    return TensorEntry(
        name=name,
        role=role,
        dtype="float32",
        shape=shape,
        stands_for=stands_for,
        factor=factor,
        part=part,
    )


def record_of(submodel: str, samples: int, table: tuple[TensorEntry, ...]) -> UpdateRecord:
    return UpdateRecord(
        bundle="b",
        base="g",
        submodel=submodel,
        samples=samples,
        steps=1,
        loss_first=1.0,
        loss_last=1.0,
        tensors=table,
        file=FileEntry(size=0, sha256=""),
    )


def figures_of(statistics: Mapping[str, Array]) -> Figures:
    """The figures of an update that holds nothing but `statistics`."""
    return Figures(kind="full", samples=1, steps=1, changes={}, statistics={**statistics})


def low_rank_update(seed: int, samples: int = 4, ratio: float = 0.5) -> Received:
    """Factors of `c` and a dense `w`."""
    shapes = {"c.u": (RANK, 3, 3, 1), "c.v": (4, RANK, 1, 3), "w": (2, 3)}
    table = (entry("c.u", shapes["c.u"], "c", "u"), entry("c.v", shapes["c.v"], "c", "v"))
    arrays = {name: numbers(shape, seed + n) for n, (name, shape) in enumerate(shapes.items())}
    record = record_of(f"low-rank:{ratio}", samples, (*table, entry("w", (2, 3), "w")))
    return record, arrays


def cp_update(seed: int, samples: int = 4, rate: float = 2.0) -> Received:
    """CP factors of `w` and `c`."""
    table = tuple(
        entry(f"{name}#{mode}", (size, RANK), name, str(mode))
        for name, shape in PARAMETERS.items()
        for mode, size in enumerate(shape)
    )
    arrays = {e.name: numbers(e.shape, seed + n) for n, e in enumerate(table)}
    return record_of(f"cp:{rate}", samples, table), arrays


def full_update(seed: int, samples: int = 4) -> Received:
    table = tuple(entry(name, shape, name) for name, shape in PARAMETERS.items())
    arrays = {name: numbers(shape, seed + n) for n, (name, shape) in enumerate(PARAMETERS.items())}
    return record_of("full", samples, table), arrays


def slice_update(seed: int, samples: int = 4) -> Received:
    table = (entry("w", (2, 3), "w"),)
    return record_of("slice:w", samples, table), {"w": numbers((2, 3), seed)}


ROWS, COLUMNS = ((0, 2), (3, 4)), ((1, 3),)
"""Channels of `c` that a narrow update holds."""
NARROW = np.ix_([0, 1, 3], [1, 2], range(3), range(3))


def narrow_update(seed: int, samples: int = 4) -> Received:
    """Some channels of `c`, in two ranges along its first axis (`NARROW`), and no `w`."""
    part = (ROWS, COLUMNS, ((0, 3),), ((0, 3),))
    table = (entry("c", (3, 2, 3, 3), "c", part=part),)
    return record_of("width:0.5", samples, table), {"c": numbers((3, 2, 3, 3), seed)}


KINDS = {"full": full_update, "low-rank": low_rank_update, "cp": cp_update, "slice": slice_update}


def dense_of(update: Received) -> dict[str, Array]:
    """What an update says of the global tensors, by numpy's einsum in float64."""
    record, arrays = update
    big = {name: array.astype(np.float64) for name, array in arrays.items()}
    match record.submodel.partition(":")[0]:
        case "low-rank":
            c = np.einsum("rmho,nrpw->nmhw", big["c.u"], big["c.v"])
            return {"c": c, "w": big["w"]}
        case "cp":
            return composed(big)
    return big


def composed(factors: dict[str, Array]) -> dict[str, Array]:
    w = np.einsum("ar,br->ab", *(factors[f"w#{mode}"] for mode in range(2)))
    c = np.einsum("ar,br,cr,dr->abcd", *(factors[f"c#{mode}"] for mode in range(4)))
    return {"w": w, "c": c}


def averaged(parts: Sequence[tuple[dict[str, Array], float]]) -> dict[str, Array]:
    """np.average of each tensor over those who have it; the old model's where nobody has."""
    means = {name: value.double().numpy() for name, value in OLD.tensors.items()}
    for name in PARAMETERS:
        held = [(tensors[name], weight) for tensors, weight in parts if name in tensors]
        if held:
            values, weights = zip(*held, strict=True)
            means[name] = np.average(np.stack(values), axis=0, weights=weights)
    return means


def assert_model(model: GlobalModel, expected: Mapping[str, Array]) -> None:
    for name, value in expected.items():
        assert model.tensors[name].dtype == torch.float32
        np.testing.assert_allclose(model.tensors[name].numpy(), value, rtol=2e-6, atol=2e-6)


def assert_refused(update: Received, code: str, **values: object) -> None:
    """Aggregating `update` raises an UpdateError with this `code` and these `values`."""
    with refused(code, **values) as caught:
        aggregate(OLD, [update])
    assert isinstance(caught.value, UpdateError)
