"""Plants one fault in a right graph: verification must fail and name the operator that is wrong."""

from collections.abc import Sequence

import numpy as np
import pytest

from exporters.export import Format
from exporters.onnx.forms import blocked_depthwise_gradient, blocked_sums
from faulty_subjects import CASES, subjects
from onnx_faults import check_onnx, files_of
from parameters import half_quick
from tflite_faults import check_tflite


def run(cases: Sequence[tuple[str, str, Format]], draws: int, seed: int) -> None:
    """Plant `draws` faults that count in the submodels (model, spec, format), in turn."""
    draw = np.random.default_rng(seed)
    failures, count = [], 0
    for number, (name, spec, format) in enumerate(cases):
        steps = subjects(CASES[name], spec, format, seed)
        wanted = draws * (number + 1) // len(cases)
        files = [f for s in steps for f in files_of(s, draw)] if format == "onnx" else []
        while count < wanted:
            own = int(draw.integers(2**31))
            if format == "onnx":
                file = files[draw.integers(len(files))]
                result = check_onnx(file, np.random.default_rng(own), seed, fresh=own % 10 == 0)
            else:
                step = steps[draw.integers(len(steps))]
                result = check_tflite(step, np.random.default_rng(own), seed)
            count += result is not None
            if result:
                failures.append(f"{name} {spec} {format} (draw {own}): {result}")
                print(failures[-1], flush=True)
    assert not failures, "\n".join(failures)


@pytest.fixture
def always_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums are computed in blocks too, so that forms have graphs inside `If`."""
    monkeypatch.setattr(blocked_sums, "LEAST_BYTES", 0)
    monkeypatch.setattr(blocked_depthwise_gradient, "LEAST_BYTES", 0)


@pytest.mark.usefixtures("always_in_blocks")
@pytest.mark.parametrize("name", half_quick(["depthwise", "tied-tokens"]))
def test_some_planted_faults_are_found_and_named(name: str, seed: int) -> None:
    run([(name, "full", "onnx")], 6, seed)


def test_some_planted_tflite_faults_are_found_and_named(seed: int) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    run([("tied-tokens", "full", "tflite")], 3, seed)


@pytest.mark.long
@pytest.mark.usefixtures("always_in_blocks")
@pytest.mark.parametrize("name", CASES)
def test_planted_faults_are_found_and_named(name: str, seed: int) -> None:
    """Fourteen faults in ONNX and six in TFLite, spread over the submodels of one model."""
    specs = CASES[name].specs
    run([(name, spec, "onnx") for spec in specs], 14, seed)
    pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    no_recomputation = [spec for spec in specs if "recompute" not in spec]
    run([(name, spec, "tflite") for spec in no_recomputation], 6, seed)
