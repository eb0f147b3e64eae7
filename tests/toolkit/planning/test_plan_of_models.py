"""Plans of real models, against plans that export every candidate."""

import datetime
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from torch import nn

from bundles import SAMPLE_SHAPE, TRAINING, tiny_model
from foreign_models import FOREIGN
from made_calibration import DEVICE
from parameters import some_long
from profiles.cost_model.submodel_choice import RESOURCES, Budgets
from toolkit.aggregation.submodel_strength import most_strength
from toolkit.models import digits_cnn, mnist_dnn
from toolkit.planning.candidate_lookup import candidate
from toolkit.planning.candidate_specs import specs
from toolkit.planning.plan import Planned, decide, find_workloads, plan_for
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads
from toolkit.submodels.hyperparameters import TrainingConfig

TODAY = datetime.date(2026, 11, 2)
VARIANT = ",recompute=yes"


class Forgetful(Workloads):
    """Workloads without a memory between plans. So that a test takes seconds, they keep results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exact: dict[str, Known | Impossible] = {}
        self.least: dict[str, Known | Impossible] = {}

    def remembered(self, spec: str) -> None:
        return None

    def remembered_estimate(self, spec: str) -> None:
        return None

    def of(self, spec: str) -> Known | Impossible:
        if spec not in self.exact:
            self.exact[spec] = super().of(spec)
        return self.exact[spec]

    def at_least(self, spec: str) -> Known | Impossible:
        if spec not in self.least:
            self.least[spec] = super().at_least(spec)
        return self.least[spec]


def exhaustive(workloads: Workloads, wanted: Iterable[str], budgets: Budgets) -> Planned:
    """The plan from the workloads of all candidates."""
    known, impossible = find_workloads(workloads, wanted)
    planned = decide(DEVICE, known, impossible, budgets, TODAY)
    assert budgets.memory is not None
    chosen = planned.plan.chosen
    again = [
        row.candidate.submodel + VARIANT
        for row in planned.plan.rows
        if [excess.resource for excess in row.excesses] == ["memory"]
        and row.candidate.memory.upper <= 2 * budgets.memory
        and (chosen is None or row.candidate.strength > chosen.strength)
    ]
    known += find_workloads(workloads, again)[0]
    return decide(DEVICE, known, impossible, budgets, TODAY)


MODELS: dict[str, tuple[nn.Module, tuple[int, ...], TrainingConfig, tuple[str, ...]]] = {
    "tiny": (tiny_model()[0], SAMPLE_SHAPE, TRAINING, ("full", "slice:classifier")),
    "tiny, more": (
        tiny_model()[0], SAMPLE_SHAPE, TRAINING, ("full", "slice:classifier", "width:0.5"),
    ),
    "digits": (digits_cnn(), (1, 8, 8), TrainingConfig(), ()),
    "mnist with Adam": (mnist_dnn(), (1, 28, 28), TrainingConfig(optimizer="adam"), ()),
}  # fmt: skip


@pytest.fixture(scope="module", params=some_long(MODELS, *list(MODELS)[1:]))
def submodels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Forgetful, list[str]]:
    """The workloads of a model, and the candidates of its plans."""
    model, shape, training, wanted = MODELS[request.param]
    workloads = Forgetful(model, shape, training, cache=tmp_path_factory.mktemp("cache"))
    return workloads, list(wanted or specs(model, shape, training.batch_size, training.loss))


def test_estimates_are_lower_bounds(submodels: tuple[Forgetful, list[str]]) -> None:
    workloads, wanted = submodels
    for spec in wanted:
        check_bounds(workloads, spec)


@pytest.mark.long
@pytest.mark.parametrize("name", FOREIGN)
def test_estimates_of_foreign_models_are_lower_bounds(name: str, tmp_path: Path) -> None:
    foreign = FOREIGN[name]
    training = TrainingConfig(batch_size=16)
    workloads = Forgetful(foreign.build(), foreign.shape, training, cache=tmp_path)
    for spec in ("full", "slice:0.8,frozen=int8"):
        check_bounds(workloads, spec)


def check_bounds(workloads: Forgetful, spec: str) -> None:
    """Compare the estimate of `spec` with its export, and with that of its variant."""
    least, exact = workloads.at_least(spec), workloads.of(spec)
    if isinstance(exact, Impossible):
        return
    variant = workloads.of(spec + VARIANT)
    assert isinstance(least, Known)
    assert isinstance(variant, Known)
    below, above, again = (candidate(known, DEVICE) for known in (least, exact, variant))
    assert below.memory.value <= min(above.memory.value, again.memory.value)
    assert below.memory.upper <= min(above.memory.upper, again.memory.upper)
    assert below.step is not None
    assert above.step is not None
    assert below.step.upper <= above.step.upper
    assert (below.strength, below.traffic) == (above.strength, above.traffic)
    assert below.strength <= most_strength(spec)


def test_the_choice_is_that_of_exporting_all(submodels: tuple[Forgetful, list[str]]) -> None:
    """For budgets between the needs of neighbours, below all and above all."""
    workloads, wanted = submodels
    candidates = [
        candidate(known, DEVICE)
        for spec in wanted
        if isinstance(known := workloads.of(spec), Known)
    ]
    needs = [{one.needs(resource) or 0 for one in candidates} for resource in RESOURCES]
    memory, step, traffic = (
        [(a + b) / 2 for a, b in pairwise([0, *sorted(n), 1e12])] for n in needs
    )
    all_budgets = [
        *(Budgets(memory=limit) for limit in memory),
        *(Budgets(memory=1e12, step=limit) for limit in step),
        *(Budgets(memory=1e12, traffic=limit) for limit in traffic),
        *(Budgets(memory=a, step=b) for a, b in zip(memory[1:], step[1:], strict=False)),
    ]
    chosen = set()
    for budgets in all_budgets:
        planned = plan_for(DEVICE, workloads, wanted, budgets, TODAY)
        assert planned.plan.chosen == exhaustive(workloads, wanted, budgets).plan.chosen
        chosen.add(planned.plan.chosen and planned.plan.chosen.submodel)
    assert len(chosen) > 2


def test_what_cannot_fit_is_not_exported(tmp_path: Path) -> None:
    model, _ = tiny_model()
    workloads = Forgetful(model, SAMPLE_SHAPE, TRAINING, cache=tmp_path)
    wanted = ["full", "slice:classifier", "width:0.5"]
    planned = plan_for(DEVICE, workloads, wanted, Budgets(memory=40e6), TODAY)
    assert planned.plan.chosen is None
    [nearest] = workloads.exact
    assert [row.candidate.submodel for row in planned.plan.rows] == [nearest]
    left = {row.candidate.submodel for row in planned.exceeding}
    assert left == {*wanted} - {nearest}
    assert planned.notes[0].startswith("memory: every candidate needs at least ")
