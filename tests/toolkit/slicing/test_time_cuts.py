"""An LSTM cut along time equals a loop over its steps, including the gradients."""

import pytest
import torch
from torch import Tensor, nn

from edgetailor import TrainingConfig, split
from parameters import some_long
from refusals import refused
from toolkit.models.imdb_bilstm import ImdbBiLSTM
from toolkit.submodels.global_model import from_model
from toolkit.submodels.submodel import Submodel

WORDS, LENGTH, WIDTH = 11, 9, 4
RATE = 0.5
TRAINING = TrainingConfig(batch_size=6, learning_rate=RATE, momentum=0.0)
Run = tuple[Tensor, Tensor, Tensor]
"""Hidden states of all steps (batch, steps, units), the last hidden state and the last cell."""


class Stacked(nn.Module):
    """Two layers in one direction over sequences of numbers, the last step's output, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(x)[0][:, -1])


def loop(x: Tensor, lstm: nn.LSTM, suffix: str, state: tuple[Tensor, Tensor] | None = None) -> Run:
    """One layer and direction of `lstm`, step by step; `suffix` selects its weights."""
    w = {
        kind: getattr(lstm, f"{kind}_{suffix}")
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    zero = x.new_zeros(len(x), lstm.hidden_size)
    h, c = state or (zero, zero)
    hidden = []
    for step in x.unbind(1):
        gates = step @ w["weight_ih"].T + w["bias_ih"] + h @ w["weight_hh"].T + w["bias_hh"]
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        hidden.append(h)
    return torch.stack(hidden, 1), h, c


def bilstm_logits(model: ImdbBiLSTM, x: Tensor, skip: int) -> Tensor:
    words = model.embedding(x).detach()
    _, h, c = loop(words[:, :skip], model.lstm, "l0")
    rest = words[:, skip:]
    _, forward, _ = loop(rest, model.lstm, "l0", (h.detach(), c.detach()))
    _, backward, _ = loop(rest.flip(1), model.lstm, "l0_reverse")
    return model.classifier(torch.cat((forward, backward), 1))


def stacked_logits(model: Stacked, x: Tensor, skip: int) -> Tensor:
    first, h0, c0 = loop(x[:, :skip], model.lstm, "l0")
    _, h1, c1 = loop(first, model.lstm, "l1")
    below, _, _ = loop(x[:, skip:], model.lstm, "l0", (h0.detach(), c0.detach()))
    _, last, _ = loop(below, model.lstm, "l1", (h1.detach(), c1.detach()))
    return model.classifier(last)


def values(submodel: Submodel, model: nn.Module) -> dict[str, Tensor]:
    return {name: value.double() for name, value in submodel.cut(from_model(model)).items()}


def recorded(submodel: Submodel, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The result of all stages for `x`, one after the other."""
    for signature in submodel.program.signatures[:-3]:
        x = signature.function({**state, "x": x})["output"]
    return x


def case(name: str, seed: int) -> tuple[nn.Module, tuple[int, ...], Tensor, Tensor]:
    """Model, sample shape, samples and labels."""
    torch.manual_seed(seed)
    if name == "stacked":
        x = torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)
        return Stacked(), (LENGTH, WIDTH), x, torch.randint(3, (6,))
    model = ImdbBiLSTM(WORDS, WIDTH)
    nn.init.normal_(model.lstm.bias_hh_l0)
    nn.init.normal_(model.lstm.bias_hh_l0_reverse)
    return model, (LENGTH,), torch.randint(WORDS, (6, LENGTH)), torch.randint(2, (6,))


@pytest.mark.parametrize("skip", some_long([1, 4, LENGTH - 1], 4))
@pytest.mark.parametrize("name", ["bilstm", "stacked"])
def test_outputs_and_one_step_are_those_of_a_loop(name: str, skip: int, seed: int) -> None:
    model, shape, x, y = case(name, seed)
    submodel = split(model, f"slice:lstm,skip={skip}", shape, TRAINING)
    state = values(submodel, model)
    recording = recorded(submodel, state, x)
    train, predict, _ = submodel.program.signatures[-3:]
    feeds = {**state, "x": recording, "y": y, "rate": torch.tensor(RATE, dtype=torch.float64)}
    came = train.function(feeds)

    model.double()
    if isinstance(model, ImdbBiLSTM):
        logits = bilstm_logits(model, x, skip)
        loss = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], y.double())
    else:
        assert isinstance(model, Stacked)
        logits = stacked_logits(model, x, skip)
        loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(predict.function(feeds)["output"], logits.detach(), **close)
    torch.testing.assert_close(came["loss"], loss.detach(), **close)
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    assert came.keys() == {"loss", *(f"{name}+" for name in trained)}
    for name_, value in trained.items():
        gradient = (value.detach() - came[f"{name_}+"]) / RATE
        torch.testing.assert_close(gradient, value.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["bilstm", "stacked"])
def test_a_slice_of_all_steps_is_the_model(name: str, seed: int) -> None:
    model, shape, x, _ = case(name, seed)
    submodel = split(model, "slice:classifier", shape, TRAINING)
    state = values(submodel, model)
    came = submodel.program.signatures[-2].function({**state, "x": recorded(submodel, state, x)})
    with torch.no_grad():
        expected = model.double()(x)
    torch.testing.assert_close(came["output"], expected, rtol=1e-10, atol=1e-12)


def test_what_is_trained_and_what_is_frozen() -> None:
    submodel = split(ImdbBiLSTM(WORDS, WIDTH), "slice:lstm,skip=4", (LENGTH,), TRAINING)
    roles = {entry.name: entry.role for entry in submodel.program.tensors}
    assert {name for name, role in roles.items() if role == "frozen"} == {
        "embedding.weight",
        "lstm.bias_hh_l0",
        "lstm.bias_hh_l0_reverse",
    }
    assert len(submodel.program.tensors) == len(roles) == 11
    # Both states of the forward direction, and the words behind the first four.
    train = submodel.program.signatures[-3]
    assert train.inputs[0].shape == (None, 2 * WIDTH + (LENGTH - 4) * WIDTH)
    assert train.inputs[0].dtype == "float32"
    assert submodel.program.signatures[0].inputs[0].dtype == "int64"
    (decision,) = submodel.layer_decisions
    assert decision.layer == "the first 4 steps of lstm"


class Sequence(nn.Module):
    """One LSTM, `read` as a function of its outputs."""

    def __init__(self, lstm: nn.LSTM, read: object) -> None:
        super().__init__()
        self.lstm = lstm
        self.read = read
        self.classifier = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.read(x, *self.lstm(x)))  # type: ignore[operator]


def last(x: Tensor, y: Tensor, state: object) -> Tensor:
    return y[:, -1]


def mean(x: Tensor, y: Tensor, state: object) -> Tensor:
    return y.mean(1)


def shortcut(x: Tensor, y: Tensor, state: object) -> Tensor:
    return y[:, -1] + x[:, -1]


IMPOSSIBLE = "spec.impossible-time-cut"
REFUSED = {
    "mean": (nn.LSTM(3, 3, batch_first=True), mean, 2, IMPOSSIBLE, "at every step"),
    "shortcut": (nn.LSTM(3, 3, batch_first=True), shortcut, 2, IMPOSSIBLE, "bypass the LSTM"),
    "steps first": (nn.LSTM(3, 3), last, 2, IMPOSSIBLE, "batch_first=True"),
    "too many": (
        nn.LSTM(3, 3, batch_first=True),
        last,
        5,
        "spec.invalid-option",
        "skip must be from 1 to 4; the LSTM takes 5 steps",
    ),
    "two layers": (
        nn.LSTM(3, 3, 2, batch_first=True, bidirectional=True),
        last,
        2,
        IMPOSSIBLE,
        "bidirectional LSTM of 2 layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_lstm_that_cannot_be_cut_along_time(name: str) -> None:
    lstm, read, skip, code, words = REFUSED[name]
    model = Sequence(lstm, read)
    model(torch.zeros(2, 5, 3))
    with refused(code, words, spec=f"slice:lstm,skip={skip}"):
        split(model, f"slice:lstm,skip={skip}", (5, 3))


def test_skip_needs_the_name_of_an_lstm() -> None:
    model = ImdbBiLSTM(WORDS, WIDTH)
    for size in ("classifier", "0.5"):
        with refused("spec.unknown-lstm", lstms=["lstm"]):
            split(model, f"slice:{size},skip=2", (LENGTH,))
    with refused("spec.unknown-lstm", lstms=[]):
        split(nn.Linear(3, 2), "slice:lstm,skip=2", (3,))
