"""A coordinator as a site: models from above, partial aggregates back, restarts in between."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from edgetailor import Aggregation, TrainingConfig
from models_for_tests import INPUT_SHAPE
from refusals import refused
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.partial_aggregates.partial import decode_partial
from toolkit.coordinator.flower_site import SiteModel, SiteTask, give_task, partial_for
from updates import drawn_updates

SPECS = ("full", "low-rank:0.5", "slice:residual")
ROUNDS, SITES = 3, 2


def made(seed: int, model: str = "smooth_cnn") -> Federation:
    training = TrainingConfig(batch_size=8, round_decay=0.5)
    return Federation(f"models_for_tests:{model}", INPUT_SHAPE, training, seed=seed)


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
            drawn = drawn_updates(federation, SPECS, seed + 10 * round_ + number)
            site.fold_checked(drawn)
            site.save()
            files = partial_for(folder, task)
            assert files is not None
            partials.append(files)
            updates += drawn
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
    again.fold_checked(drawn_updates(above, SPECS, seed))
    again.save()
    files = partial_for(tmp_path, task)
    assert files is not None
    expected = made(1)
    expected.fold(drawn_updates(above, SPECS, seed))
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


def floating(federation: Federation) -> dict[str, np.ndarray]:
    tensors = federation.model.tensors
    return {name: v.numpy().copy() for name, v in tensors.items() if v.is_floating_point()}


def test_a_dense_round_gives_the_own_model(tmp_path: Path, seed: int) -> None:
    """Oracle: a plain federation that folds the same updates of the model from above."""
    above, expected = made(1), made(1)
    federation = made(2)
    site = SiteModel(federation, tmp_path)
    task = SiteTask(name="run-1", round=1, dense=True)
    give_task(tmp_path, task, save(floating(above)))
    site.bundle("full", 1)
    updates = drawn_updates(federation, SPECS, seed)
    site.fold_checked(updates)
    site.save()
    files = partial_for(tmp_path, task)
    assert files is not None
    assert files.keys() == {"global.safetensors"}
    expected.fold(updates)
    came = load(files["global.safetensors"])
    for name, value in floating(expected).items():
        np.testing.assert_array_equal(came[name], value)


def test_kept_factors_follow_the_model_from_above(tmp_path: Path, seed: int) -> None:
    """A site's factors stay its own, stand for the new model, and survive a restart."""
    federation = made(2, "relu_cnn")
    site = SiteModel(federation, tmp_path)
    for round_ in (1, 2):
        task = SiteTask(name=f"run-{round_}", round=round_, dense=True)
        give_task(tmp_path, task, save(floating(federation)))
        site.bundle("cp:1.0", round_)
        site.fold_checked(drawn_updates(federation, ["cp:1.0"], seed + round_))
        before = site.save()
    change = np.random.default_rng(seed)
    moved = {
        n: (v + 0.05 * change.normal(size=v.shape)).astype(np.float32)
        for n, v in floating(federation).items()
    }
    gap = {name: composition_gap(federation, name, moved) for name in factorized(federation)}
    give_task(tmp_path, SiteTask(name="run-3", round=3, dense=True), save(moved))
    site.bundle("cp:1.0", 3)
    assert gap
    for name, far in gap.items():
        assert composition_gap(federation, name, moved) < far
    again = made(3, "relu_cnn")
    SiteModel(again, tmp_path).load(before)
    assert again.model.fingerprint() == federation.model.fingerprint()


def factorized(federation: Federation) -> set[str]:
    return {name.rpartition("#")[0] for name in federation.model.kept["cp:1.0"]}


def composition_gap(federation: Federation, name: str, tensors: dict[str, np.ndarray]) -> float:
    """Distance of the composed factors of `name` from its tensor: sum over ranks of products."""
    kept = federation.model.kept["cp:1.0"]
    factors = [kept[f"{name}#{mode}"].double().numpy() for mode in range(tensors[name].ndim)]
    letters = "abcdefg"[: len(factors)]
    rule = ",".join(f"{letter}z" for letter in letters) + "->" + letters
    return float(np.linalg.norm(np.einsum(rule, *factors) - tensors[name]))


def test_a_noisy_variance_becomes_zero(seed: int) -> None:
    federation = made(0)
    name = next(name for name in federation.model.tensors if name.endswith("running_var"))
    noise = np.random.default_rng(seed).normal(size=federation.model.tensors[name].shape)
    federation.adopt({name: torch.from_numpy(noise)})
    adopted = federation.model.tensors[name]
    np.testing.assert_array_equal(adopted.numpy(), np.maximum(noise, 0).astype(np.float32))


@pytest.mark.parametrize("tensors", [{"other": torch.zeros(1)}, {"conv.weight": torch.zeros(1)}])
def test_a_model_of_another_kind_is_not_adopted(tensors: dict[str, torch.Tensor]) -> None:
    federation = made(0)
    before = federation.model.fingerprint()
    with refused("model.wrong-weights"):
        federation.adopt(tensors)
    assert federation.model.fingerprint() == before
