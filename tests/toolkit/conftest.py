"""What several of the toolkit's test files start from."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from command_models import NETS
from exporters.recording.capture import capture
from exporters.recording.captured import Captured
from toolkit.aggregation import federation
from toolkit.splitting import split
from toolkit.submodels import one_step_submodel, submodel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.submodel import Submodel
from vector_fleet import Fleet, configured, enrol, running

SPLIT: dict[tuple[object, ...], Submodel] = {}
"""The submodels of all federations in this process."""
RECORDED: dict[tuple[object, ...], Captured] = {}
"""The recordings of all splits in this process."""


def structure(model: nn.Module) -> tuple[object, ...]:
    """All that a submodel of a sequence of layers depends on: no weights, but which are shared."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    places = {id(value): number for number, (_, value) in enumerate(tensors)}
    return repr(model), *((n, v.shape, v.requires_grad, places[id(v)]) for n, v in tensors)


def split_once(
    model: nn.Module, spec: str, input_shape: tuple[int, ...], training: TrainingConfig
) -> Submodel:
    """Split a sequence of layers, once for all models of the same structure."""
    if type(model) is not nn.Sequential:
        return split(model, spec, input_shape, training)
    key = (structure(model), spec, input_shape, repr(training))
    if key not in SPLIT:
        SPLIT[key] = split(model, spec, input_shape, training)
    return SPLIT[key]


def options_of(layer: nn.Module) -> tuple[object, ...]:
    """All attributes of a layer that are no modules, tensors or hooks."""
    return tuple((name, value) for name, value in vars(layer).items() if name[0] != "_")


def capture_once(model: nn.Module, sample_shape: tuple[int, ...]) -> Captured:
    """Record a model, once for all of the same structure; the recording has the tensors of `model`.

    Its layers must be PyTorch's, the families' or those of `models_for_tests`, and unchanged.
    """
    layers = list(model.modules())
    rooms = ("torch.nn.", "toolkit.factor_layers.", "models_for_tests")
    known = all(type(layer).__module__.startswith(rooms) for layer in layers)
    changed = any(
        "forward" in vars(m)
        or m._forward_pre_hooks
        or m._forward_hooks
        or m._non_persistent_buffers_set
        for m in layers
    )
    if changed or not known:
        return capture(model, sample_shape)
    key = type(model), structure(model), repr([options_of(m) for m in layers]), sample_shape
    if key not in RECORDED:
        RECORDED[key] = capture(model, sample_shape)
    recording = RECORDED[key]
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def of_this(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: own[name].detach() for name in tensors}

    return replace(
        recording,
        parameters=of_this(recording.parameters),
        frozen=of_this(recording.frozen),
        buffers=of_this(recording.buffers),
    )


@pytest.fixture(autouse=True)
def shared_submodels() -> Iterator[None]:
    """Federations of the same model share its submodels, and all splits its recording.

    They take most of small rounds.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(federation, "split", split_once)
        patched.setattr(submodel, "capture", capture_once)
        patched.setattr(one_step_submodel, "capture", capture_once)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of the commands, with somebody's models in it."""
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A federation in round 1, shared by tests of refusals, which change nothing."""
    folder = tmp_path_factory.mktemp("fleet")
    with running(configured(folder)) as server:
        yield server, enrol(server, folder)
