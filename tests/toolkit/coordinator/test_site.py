"""A coordinator as a site: models from above, partial aggregates back, restarts in between."""

from pathlib import Path

import numpy as np
import pytest
import torch

from device_agent.formats.manifest import uploaded
from edgetailor import Aggregation, TrainingConfig
from models_for_tests import INPUT_SHAPE
from refusals import refused
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.partial import decode_partial
from toolkit.coordinator.site import SiteModel, SiteTask, give_task, partial_for
from updates import record_of

SPECS = ("full", "low-rank:0.5", "slice:residual")
ROUNDS, SITES = 3, 2


def made(seed: int) -> Federation:
    training = TrainingConfig(batch_size=8, round_decay=0.5)
    return Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, training, seed=seed)


def drawn(federation: Federation, seed: int) -> list[Received]:
    """An update of each spec: what a device received, moved at random."""
    draw, updates = np.random.default_rng(seed), []
    for spec in SPECS:
        submodel = federation.submodel(spec)
        table, cut = uploaded(submodel.program.tensors), submodel.cut(federation.model)
        arrays = {
            e.name: np.abs(cut[e.name].numpy() + 0.1 * draw.normal(size=e.shape)).astype(np.float32)
            for e in table
        }
        updates.append((record_of(spec, int(draw.integers(1, 500)), table), arrays))
    return updates


def taken(above: Federation, partials: list[dict[str, bytes]]) -> None:
    whole = Aggregation(above.model, above.policy)
    for files in partials:
        whole.merge(decode_partial(files, above.model, above.policy))
    above.take(whole)


def test_sites_are_one_federation(tmp_path: Path, seed: int) -> None:
    """Oracle: a federation that folds the updates of all sites."""
    above, flat = made(1), made(1)
    federations = [made(2 + number) for number in range(SITES)]
    folders = [tmp_path / str(number) for number in range(SITES)]
    sites = [SiteModel(*both) for both in zip(federations, folders, strict=True)]
    for round_ in range(1, ROUNDS + 1):
        task = SiteTask(name=f"run-{round_}", round=round_)
        partials, updates = [], []
        for number, (site, federation, folder) in enumerate(
            zip(sites, federations, folders, strict=True)
        ):
            assert not site.ready()
            give_task(folder, task, above.save())
            assert site.ready()
            site.bundle("full", round_)
            assert partial_for(folder, task) is None
            found = drawn(federation, seed + 10 * round_ + number)
            site.fold(found)
            site.save()
            files = partial_for(folder, task)
            assert files is not None
            partials.append(files)
            updates += found
        taken(above, partials)
        flat.fold(updates)
        for name, value in flat.model.tensors.items():
            torch.testing.assert_close(above.model.tensors[name], value, rtol=1e-4, atol=1e-6)


def test_rates_follow_the_rounds_of_the_whole_fleet(tmp_path: Path) -> None:
    site, plain = SiteModel(made(0), tmp_path), made(0)
    give_task(tmp_path, SiteTask(name="late", round=3), plain.save())
    assert site.bundle("full", 1)["manifest.json"] == plain.bundle("full", 3)["manifest.json"]


def test_a_restarted_site_continues_its_round(tmp_path: Path, seed: int) -> None:
    above = made(1)
    task = SiteTask(name="run-1", round=1)
    first = SiteModel(made(2), tmp_path)
    before = first.save()  # the state folder's model, of before the round
    give_task(tmp_path, task, above.save())
    first.bundle("full", 1)

    federation = made(2)
    again = SiteModel(federation, tmp_path)
    again.load(before)
    assert again.ready()
    again.fold(drawn(above, seed))
    again.save()
    files = partial_for(tmp_path, task)
    assert files is not None
    expected = made(1)
    expected.fold(drawn(above, seed))
    taken(above, [files])
    for name, value in expected.model.tensors.items():
        torch.testing.assert_close(above.model.tensors[name], value, rtol=1e-4, atol=1e-6)
    assert not again.ready()


def test_a_later_model_replaces_one_that_was_not_begun(tmp_path: Path) -> None:
    site = SiteModel(made(0), tmp_path)
    for round_, seed in ((1, 3), (2, 4)):
        give_task(tmp_path, SiteTask(name=f"run-{round_}", round=round_), made(seed).save())
    newest = made(4).model.fingerprint()
    assert newest.encode() in site.bundle("full", 1)["manifest.json"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"name": "a", "round": 0}'])
def test_a_malformed_task_is_refused(tmp_path: Path, content: bytes) -> None:
    site = SiteModel(made(0), tmp_path)
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "task.json").write_bytes(content)
    with refused("site.malformed-task"):
        site.ready()
