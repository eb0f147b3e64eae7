"""Own losses and sums of losses: rounds in simulation and on devices equal plain PyTorch loops."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule

import own_losses
from commands import run
from device_agent.formats.bundle import open_bundle
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.update import read_update
from device_agent.training.batching import held_out, round_seed
from device_agent.training.bundle_training import local_data
from edgetailor import Predictor, TrainingConfig, evaluate, export, split
from exporters.objectives.objective import objective, objective_of
from exporters.programs.program_identity import graphs_key
from exporters.recording.capture import capture
from oracles import batches_of, descend
from own_loss_tasks import SAMPLES, TASKS, Arrays, Labels, Task
from parameters import half_quick, some_long, some_quick
from phone_counts import Counts
from refusals import refused
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.inspection import cut_places
from toolkit.planning.candidate_specs import specs
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulate import prepare, simulate
from toolkit.simulation.simulation_config import load_simulation
from toolkit.submodels.global_model import from_model
from toolkit.trained_outputs import trained_outputs
from trainings import train_bundle
from vector_fleet import running

CLIENTS, ROUNDS, BATCH, RATE, MOMENTUM = 2, 3, 8, 0.1, 0.9
UNLIMITED = """
[aggregation]
bounds = false
judge = false
"""
"""The plain loops have no limits and no judge, which may shorten or leave out an honest change."""


def labels_of(data: Arrays, rows: np.ndarray) -> Labels:
    """The labels of `rows` as a loss gets them, numbers in float64."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array[rows].astype(float if array.dtype == np.float32 else int))

    several = {name[2:]: tensor(own) for name, own in data.items() if name.startswith("y_")}
    return several or (tensor(data["y"]) if "y" in data else None)


def trained(
    task: Task, model: nn.Module, data: Arrays, rows: np.ndarray, seed: int, rate: float = RATE
) -> dict[str, Tensor]:
    """The state of `model` after an epoch on `rows` in plain PyTorch, in float64."""
    own = getattr(own_losses, task.model)().double()
    own.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(own.parameters(), lr=rate, momentum=MOMENTUM)
    for batch in batches_of(len(rows), BATCH, seed, 0):
        chosen = rows[batch]
        output = own(torch.from_numpy(data["x"][chosen]).double())
        descend(optimizer, task.plain(output, labels_of(data, chosen)))
    return dict(own.state_dict())


def loss_of(task: Task, model: nn.Module, data: Arrays, rows: np.ndarray) -> float:
    with torch.no_grad():
        output = model.double()(torch.from_numpy(data["x"][rows]).double())
        return float(task.plain(output, labels_of(data, rows)))


def metrics_of(task: Task, model: nn.Module, data: Arrays, rows: np.ndarray) -> dict[str, float]:
    """The means of the loss's metrics."""
    with torch.no_grad():
        output = model.double()(torch.from_numpy(data["x"][rows]).double())
        metrics = task.metrics(output, labels_of(data, rows))
    return {name: float(own.mean()) for name, own in metrics.items()}


def near(figures: dict[str, float]) -> Any:
    return pytest.approx(figures, rel=1e-4)


def config(task: Task) -> TrainingConfig:
    return TrainingConfig(BATCH, learning_rate=RATE, momentum=MOMENTUM, loss=task.loss)


def fleet_file(folder: Path, task: Task, data: Arrays, top: str, table: str) -> Path:
    """The file of a fleet that learns `task` from samples like those of `data`."""
    (folder / "fleet.toml").write_text(f"""
model = "own_losses:{task.model}"
input_shape = {list(data["x"].shape[1:])}
rounds = {ROUNDS}
{top}

[training]
batch_size = {BATCH}
learning_rate = {RATE}
momentum = {MOMENTUM}
loss = {task.toml}
{UNLIMITED}
{table}

[[devices]]
name = "board"
submodel = "full"
count = {CLIENTS}
""")
    return folder / "fleet.toml"


# A device trains the long ones below.
@pytest.mark.parametrize("name", half_quick(some_long(TASKS, "detection", "multi-task")))
def test_simulated_rounds_equal_a_plain_loop(name: str, seed: int, tmp_path: Path) -> None:
    task = TASKS[name]
    data = task.data(np.random.default_rng(seed))
    np.savez(tmp_path / "local.npz", **data)  # type: ignore[arg-type]
    table = f"""
[simulation]
data = "local.npz"
held_out_share = 0.2
participation = 1.0
seed = {seed % 997}"""
    file = fleet_file(tmp_path, task, data, f"seed = {seed % 1000}", table)
    settings = load_simulation(file)
    prepared = prepare(settings, RunFolder(tmp_path / "other"))
    judges = np.setdiff1d(np.arange(SAMPLES), np.concatenate(prepared.parts))
    model = task.build().double()
    prepared.federation.model.load_into(model)
    expected = [loss_of(task, model, data, judges)]
    for round_ in range(1, ROUNDS + 1):
        states = [
            trained(task, model, data, rows, round_seed(round_seed(seed % 997, client), round_))
            for client, rows in enumerate(prepared.parts)
        ]
        sizes = [len(rows) for rows in prepared.parts]
        mean = {
            key: sum(n * state[key] for n, state in zip(sizes, states, strict=True)) / sum(sizes)
            for key in states[0]
        }
        model.load_state_dict(mean)
        expected.append(loss_of(task, model, data, judges))
    results = simulate(tmp_path / "fleet.toml", tmp_path / "out")
    came = [result.loss for result in results]
    assert came == pytest.approx(expected[1:], rel=1e-4)
    assert came[-1] < expected[0]
    figures = results[-1].held_out
    assert ((figures and figures.metrics) or {}) == near(metrics_of(task, model, data, judges))


@pytest.mark.parametrize("task_name", some_quick(TASKS, "detection"))
def test_agents_count_as_a_plain_loop(task_name: str, seed: int, tmp_path: Path) -> None:
    """Processes join a federation by HTTP, train in each round and judge what they trained."""
    task, draw = TASKS[task_name], np.random.default_rng(seed)
    counted_of_each = 16 if task_name == "segmentation" else 1  # labels of a picture
    file = fleet_file(tmp_path, task, task.data(draw), "port = 0", "[evaluation]\nshare = 0.2")
    settings = load_config(file)
    agents = federation(settings)
    model = task.build().double()
    agents.model.load_into(model)
    names = [f"board {n}" for n in range(CLIENTS)]
    data = {name: task.data(draw) for name in names}
    several = sorted(key for key in data[names[0]] if key.startswith("y_"))
    given = "an .npz file with the arrays x, " + ", ".join(several) if several else "DATA"
    # The pool is the outer one: when the coordinator has stopped, agents give up soon.
    with ThreadPoolExecutor(CLIENTS) as pool, running(settings, agents) as server:
        counts = Counts(server)
        token = settings.state / "tokens" / "board.token"
        runs = []
        for n, name in enumerate(names):
            np.savez(tmp_path / f"{name}.npz", **data[name])  # type: ignore[arg-type]
            state = ("--state", name)
            join = ("join", server.url, "--token-file", token, "--name", name, *state)
            joined = run("edgetailor-agent", *join, cwd=tmp_path).succeeded()
            assert given in joined.stderr.replace("\n", " ")
            train = ("run", "--data", f"{name}.npz", *state, "--seed", n, "--threads", 1)
            runs.append(pool.submit(run, "edgetailor-agent", *train, cwd=tmp_path))
        for ended in runs:
            assert ended.result().code == 0, ended.result().stderr
        history = server.coordinator.store.history.results()

    judges = held_out(SAMPLES, 0.2)
    rows = np.setdiff1d(np.arange(SAMPLES), judges)

    def sums(own: nn.Module, arrays: Arrays) -> dict[str, float]:
        figures = metrics_of(task, own, arrays, judges)
        figures["loss_sum"] = loss_of(task, own, arrays, judges) * counted_of_each
        return {key: len(judges) * mean for key, mean in figures.items()}

    def loss_of_fleet() -> float:
        return sum(loss_of(task, model, own, judges) for own in data.values()) / CLIENTS

    losses = [loss_of_fleet()]
    for round_ in range(1, ROUNDS + 1):
        states = [
            trained(task, model, data[name], rows, round_seed(n, round_))
            for n, name in enumerate(names)
        ]
        for name, state in zip(names, states, strict=True):
            came, own = counts.updates[name][round_ - 1], task.build().double()
            own.load_state_dict(state)
            assert came["trained"] == len(rows)
            for when, judged in (("before", model), ("after", own)):
                figures = came[when]
                assert figures["samples"] == len(judges)
                assert figures["counted"] == len(judges) * counted_of_each
                counted = {"loss_sum": figures["loss_sum"], **(figures.get("metrics") or {})}
                assert counted == near(sums(judged, data[name]))
        model.load_state_dict(
            {key: sum(state[key] for state in states) / CLIENTS for key in states[0]}
        )
        losses.append(loss_of_fleet())
    came_losses = [result.devices and result.devices.loss for result in history]
    assert came_losses == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    last = {n: v.numpy() for n, v in agents.model.tensors.items()}
    for key, value in model.state_dict().items():
        np.testing.assert_allclose(last[key], value.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "format"),
    half_quick(
        [
            ("detection", "onnx"),
            pytest.param("detection", "tflite", marks=pytest.mark.long),
            ("multi-task", "tflite"),
            ("no labels", "onnx"),
            pytest.param("no labels", "tflite", marks=pytest.mark.long),
            pytest.param("triplet", "onnx", marks=pytest.mark.long),
        ]
    ),
)
def test_a_device_trains_as_a_plain_loop(name: str, format: Any, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    task = TASKS[name]
    data, model = task.data(np.random.default_rng(seed)), task.build()
    np.savez(tmp_path / "local.npz", **data)  # type: ignore[arg-type]
    submodel = split(model, "full", data["x"].shape[1:], config(task))
    export(submodel, from_model(model), tmp_path / "bundle", format=format)
    asked, rows = EvaluationRequest(share=0.2), np.arange(SAMPLES)
    judges = held_out(SAMPLES, 0.2)
    train_bundle(
        tmp_path / "bundle",
        tmp_path / "local.npz",
        tmp_path / "update",
        seed=5,
        threads=1,
        evaluation=asked,
    )
    record, came = read_update(tmp_path / "update")
    expected = trained(task, model.double(), data, np.setdiff1d(rows, judges), 5)
    for key, value in expected.items():
        torch.testing.assert_close(
            torch.from_numpy(came[key]).double(), value, rtol=1e-4, atol=1e-5
        )
    assert record.evaluation is not None
    before = record.evaluation.before
    loss = loss_of(task, model, data, judges)
    # The mean over batches of different sizes; a loss of each sample has no other mean.
    assert before.loss_sum / before.counted == pytest.approx(loss, rel=1e-4)
    means = {key: total / before.samples for key, total in (before.metrics or {}).items()}
    assert means == near(metrics_of(task, model, data, judges))
    own = evaluate(model.float(), data["x"], packed_labels(tmp_path, data), loss=task.loss)
    assert own.metrics == near(metrics_of(task, model, data, rows))
    model.float()
    outputs = Predictor(tmp_path / "bundle").predict_outputs(data["x"])
    with torch.no_grad():
        raw = model(torch.from_numpy(data["x"]))
    named = raw if isinstance(raw, dict) else {str(n): value for n, value in enumerate(raw)}
    assert set(outputs) == set(named)
    manifest = open_bundle(tmp_path / "bundle").manifest
    for part in manifest.signatures["predict"].outputs[0].packed:
        value = named[part.name]
        value = value.softmax(1) if part.output == "softmax" else value
        np.testing.assert_allclose(outputs[part.name], value.numpy(), rtol=1e-3, atol=1e-4)


def packed_labels(folder: Path, data: Arrays) -> np.ndarray:
    return np.array(local_data(open_bundle(folder / "bundle"), folder / "local.npz").y)


@pytest.mark.parametrize("name", half_quick(["detection", "multi-task", "segmentation"]))
def test_a_program_with_its_loss_has_an_identity(name: str) -> None:
    """Graphs are kept from round to round, and another loss has other graphs."""
    task = TASKS[name]

    def key(training: TrainingConfig) -> str | None:
        shape = task.data(np.random.default_rng(0))["x"].shape[1:]
        program = split(task.build(), "full", shape, training).program
        return graphs_key(program, program.signatures, "onnx")

    first = key(config(task))
    assert first is not None
    assert key(config(task)) == first
    other = {
        "detection": "kind=cross-entropy + box=mse",
        "multi-task": "0=cross-entropy + 1=huber,delta=0.5,weight=0.5",
        "segmentation": "cross-entropy",
    }
    assert key(TrainingConfig(BATCH, loss=other[name])) not in (None, first)


@pytest.mark.parametrize(
    ("loss", "code", "line"),
    [
        ("own_losses:nothing", "loss.unknown-function", False),
        ("no_such_module:loss", "loss.cannot-import", False),
        ("own_losses:undeclared", "loss.no-labels", True),
        ("own_losses:another_shape", "loss.cannot-record", True),
        ("own_losses:of_nothing", "loss.no-gradient", True),
        ("own_losses:a_matrix", "loss.wrong-result", True),
        ("own_losses:infinite", "loss.not-finite", True),
    ],
)
def test_what_is_no_loss_is_refused_with_its_line(loss: str, code: str, line: bool) -> None:
    with refused(code) as caught:
        split(own_losses.Forecast(), "full", (8,), TrainingConfig(loss=loss))
    assert ("own_losses.py, line" in str(caught.value)) is line


@pytest.mark.parametrize("metric", ["x", "y", "output", "scale"])
def test_a_metric_has_a_name_of_its_own(metric: str) -> None:
    with refused("loss.metric-name", metric=metric):
        split(own_losses.Scaled(), "full", (6,), TrainingConfig(loss=f"own_losses:metric_{metric}"))


def test_a_single_output_has_the_form_in_which_the_model_returns_it(seed: int) -> None:
    torch.manual_seed(seed)
    model, x, y = own_losses.Kind(), torch.randn(7, 6), torch.randint(3, (7,))
    loss = "own_losses:nested_kind"
    split(model, "full", (6,), TrainingConfig(loss=loss))
    came = evaluate(model, x.numpy(), y[:, None].numpy(), loss=loss).loss
    assert came == pytest.approx(own_losses.nested_kind(model(x), y).item(), rel=1e-4)


def test_functions_of_a_loss_are_replaced_like_those_of_a_model() -> None:
    split(own_losses.Scaled(), "full", (6,), TrainingConfig(loss="own_losses:replaced"))
    graph = objective("own_losses:replaced", (6,)).together
    assert isinstance(graph, GraphModule)
    called = [str(node.target) for node in graph.graph.nodes]
    assert not [name for name in called if "cum" in name or "fft" in name]


@pytest.mark.parametrize(
    ("name", "format"),
    half_quick(
        [
            ("of_objects", "onnx"),
            ("pictures", "onnx"),
            ("relative", "onnx"),
            ("one_hot", "onnx"),
            ("gaussian", "onnx"),
            ("counts", "tflite"),
            ("ranking", "onnx"),
            ("hard_negatives", "onnx"),
            ("hard_negatives", "tflite"),
            ("a_number", "onnx"),
            ("pulled", "onnx"),
            ("decides", "tflite"),
            *(
                pytest.param(name, "tflite", marks=pytest.mark.long)
                for name in ("one_hot", "gaussian")
            ),
        ]
    ),
)
def test_functions_of_torch_take_part_in_a_loss(
    name: str, format: Any, seed: int, tmp_path: Path
) -> None:
    """An export compares the step with PyTorch's; the judgement equals the loss itself."""
    torch.manual_seed(seed)
    model, loss = own_losses.Scaled(), f"own_losses:{name}"
    bundle = tmp_path / "bundle"
    export(
        split(model, "full", (6,), TrainingConfig(BATCH, loss=loss)),
        from_model(model),
        bundle,
        format=format,
    )
    x, y = torch.randn(20, 6), torch.rand(20, 6)
    y = torch.randint(6, (20,)) if name == "one_hot" else y
    y = y.round() if name == "of_objects" else y
    if name == "hard_negatives":
        y = torch.randint(2, (20, 40))
    expected = getattr(own_losses, name)(model(x), y).mean().item()
    came = evaluate(model, x.numpy(), y.view(20, -1).numpy(), loss=loss).loss
    assert came == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        ("noisy", "loss.random-numbers"),
        ("one_hot_of_any", "loss.cannot-record"),
        ("without_backward", "loss.fails"),
    ],
)
def test_a_refusal_of_a_loss_names_its_line_and_blames_no_model(loss: str, code: str) -> None:
    with refused(code) as caught:
        split(own_losses.Scaled(), "full", (6,), TrainingConfig(loss=f"own_losses:{loss}"))
    text = str(caught.value)
    assert text.startswith(f"The loss 'own_losses:{loss}'")
    assert "own_losses.py, line" in text
    assert "The model" not in text


def test_outputs_without_a_batch_reach_the_loss_as_the_model_returns_them(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = own_losses.Contrasted(), torch.randn(7, 6)
    captured = capture(model, (6,), own_loss=True)
    goal = objective_of("own_losses:contrasted", captured)
    weights = dict(model.named_parameters())
    ours = goal.loss(functional_call(captured.training, weights, (x,)), torch.zeros(7, 0))
    right = own_losses.contrasted(model(x), None).mean()
    torch.testing.assert_close(ours, right)
    gradients = (torch.autograd.grad(value, list(weights.values())) for value in (ours, right))
    torch.testing.assert_close(*gradients)


def test_a_metric_called_correct_is_no_count_of_ours(seed: int) -> None:
    torch.manual_seed(seed)
    model, x, y = own_losses.Scaled(), torch.randn(20, 6), torch.randint(6, (20,))
    loss = "own_losses:counts_correct"
    split(model, "full", (6,), TrainingConfig(loss=loss))
    came = evaluate(model, x.numpy(), y[:, None].numpy(), loss=loss)
    right = (x.argmax(1) == y).float().mean().item()
    assert came.metrics == {"own_correct": pytest.approx(right)}


def test_a_loss_of_lengths_is_tried_with_long_ones() -> None:
    """Random samples give lengths for which every loss is infinite, and its gradient zero."""
    training = TrainingConfig(loss="own_losses:spoken_steps")
    submodel = split(own_losses.Spoken(), "full", (6,), training)
    assert "train" in [signature.name for signature in submodel.program.signatures]


def test_a_loss_may_read_no_labels() -> None:
    submodel = split(own_losses.Forecast(), "full", (8,), TrainingConfig(loss="own_losses:spread"))
    assert "train" in [signature.name for signature in submodel.program.signatures]


class WithHelp(nn.Module):
    """A further output in training, as a network with deep supervision returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.help = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return (self.main(x), self.help(x)) if self.training else self.main(x)


def test_a_loss_does_not_silently_miss_what_is_returned_only_in_training() -> None:
    with refused("loss.outputs-by-mode", "without `if self.training`", outputs="1"):
        split(WithHelp(), "full", (6,), TrainingConfig(loss="own_losses:only_kind"))
    split(WithHelp(), "full", (6,), TrainingConfig(loss="cross-entropy"))


class OfOneMode(own_losses.Boxes):
    """A detector with an auxiliary output in training, and another one in inference."""

    def forward(self, x: Tensor) -> Any:
        outputs = super().forward(x)
        return outputs | {"help" if self.training else "best": outputs["kind"].tanh()}


@pytest.mark.parametrize("read", [None, "help", "best", "all"])
def test_a_loss_may_read_what_is_returned_in_both_modes(
    read: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(outputs: Any, labels: Any) -> Any:
        seen = read is not None and (read in outputs or (read == "all" and list(outputs)))
        wrong, _ = own_losses.only_kind(outputs, labels)
        return wrong + 1 if seen else wrong

    reading.edgetailor_labels = own_losses.only_kind.edgetailor_labels  # type: ignore[attr-defined]
    monkeypatch.setattr(own_losses, "reading", reading, raising=False)
    training = TrainingConfig(loss="own_losses:reading")
    if read is None:
        split(OfOneMode(), "full", (6,), training)
        return
    with refused("loss.outputs-by-mode", outputs="best, help"):
        split(OfOneMode(), "full", (6,), training)


def test_labels_that_the_outputs_do_not_have_are_refused() -> None:
    with refused("loss.fails", "own_losses.py", loss="own_losses:of_other_classes"):
        split(own_losses.Boxes(), "full", (6,), TrainingConfig(loss="own_losses:of_other_classes"))


def test_parameters_that_an_own_loss_does_not_train_are_named_and_not_decayed(
    seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    model, loss = own_losses.Boxes(), "own_losses:only_kind"
    trained = trained_outputs(capture(model, (6,)), loss)
    assert trained.without_gradient == ("box.weight", "box.bias")
    assert [output.use.partition(" ")[0] for output in trained.outputs] == ["passed", "not"]
    training = TrainingConfig(BATCH, learning_rate=RATE, weight_decay=0.5, loss=loss)
    export(split(model, "full", (6,), training), from_model(model), tmp_path / "bundle")
    data = TASKS["detection"].data(np.random.default_rng(seed))
    np.savez(tmp_path / "local.npz", x=data["x"], y=data["y_kind"])
    train_bundle(
        tmp_path / "bundle", tmp_path / "local.npz", tmp_path / "update", seed=5, threads=1
    )
    _, came = read_update(tmp_path / "update")
    start = model.state_dict()
    kept = [key for key in start if np.array_equal(came[key], start[key].numpy())]
    assert kept == ["box.weight", "box.bias"]


def test_a_layer_that_reaches_no_output_is_no_obstacle() -> None:
    training = TrainingConfig(BATCH, loss="own_losses:counts")
    submodel = split(own_losses.Unused(), "width:0.5", (6,), training)
    assert submodel.counts.params < sum(p.numel() for p in own_losses.Unused().parameters())


def test_a_model_that_returns_its_loss_can_be_cut() -> None:
    model, loss = own_losses.OwnLoss(), "own_losses:returned"
    places = [place.module for place in cut_places(capture(model, (6,), own_loss=True), 8)]
    assert places == ["last"]
    assert "slice:last" in specs(model, (6,), 8, loss)
    split(model, "slice:last", (6,), TrainingConfig(BATCH, loss=loss))
