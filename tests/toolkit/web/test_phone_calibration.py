"""A page whose kind is planned for measures its browser, and trains what fits it."""

from pathlib import Path

import msgspec
import pytest

from disclosure import Listener, assert_told
from made_calibration import DEVICE
from models_for_tests import INPUT_SHAPE, smooth_cnn
from phones import Keeping, Phone, fleet, samples
from profiles.cost_model.prediction import TIMED
from toolkit.coordinator.devices.submodel_assignment import Planner
from toolkit.coordinator.server import Server
from toolkit.planning.candidate_lookup import candidate
from toolkit.planning.plan import find_workloads
from toolkit.planning.submodel_workloads import Known, Workloads
from toolkit.submodels.hyperparameters import TrainingConfig

pytestmark = pytest.mark.web

WEB = msgspec.structs.replace(
    DEVICE, calibration=msgspec.structs.replace(DEVICE.calibration, runtime="onnxruntime-web 1.30")
)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    cache = tmp_path_factory.mktemp("cache")
    training = TrainingConfig(batch_size=8, epochs=2, momentum=0.9)
    workloads = Workloads(smooth_cnn(), INPUT_SHAPE, training, cache=cache)
    return find_workloads(workloads, ["full", "width:0.5"])[0]


def test_a_page_gets_what_fits_it(
    browser, serve, tmp_path: Path, seed: int, known: list[Known]
) -> None:
    upper = sorted(candidate(submodel, WEB).memory.upper for submodel in known)
    toml, folder = fleet(tmp_path / "c", kinds={"phone": "auto"})
    toml += f'memory = "{sum(upper) / 2:.0f}B"\n'

    def plan_with(server: Server, some: list[Known]) -> Keeping:
        server.coordinator.planner = Keeping(Planner(tuple(some)))
        return server.coordinator.planner

    with serve(toml, folder) as server:
        phone = Phone.opened(browser, server, "phone")
        listener = Listener(phone.page)
        nothing = plan_with(server, [whole for whole in known if whole.submodel == "full"])
        phone.join("page")
        phone.page.get_by_text("Measuring how fast this device is").wait_for()
        phone.wait_for_problem("plan.nothing-fits")
        kept = plan_with(server, known)
        phone.train(samples(tmp_path, seed, 0, 40), "page")
        phone.wait_for("finished")
        assert phone.view()["device"]["submodel"] == "width:0.5"
        assert_told(phone.page, listener, "POST /devices", "POST /devices profile")
    (first,), (second,) = nothing.seen, kept.seen
    assert second.calibration == first.calibration  # measured once
    assert first.machine.kind == "browser"
    assert first.storage_free_bytes > 0
    assert first.sources["calibration"].startswith("performance.now, in steps of ")
    assert {timing.kind for timing in first.calibration.timings} == TIMED
    for figure in ("run_s", "node_s", "byte_s"):
        assert getattr(first.calibration, figure) > 0, figure
