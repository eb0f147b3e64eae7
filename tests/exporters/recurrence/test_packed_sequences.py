"""Recurrent layers over packed sequences of different lengths, compared with PyTorch's packing."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from exporters.programs.tracing import trace
from exporters.recording.capture import capture
from exporters.recurrence.recurrent_layers import RecurrenceLoops
from layer_cases import Case, Row, assert_close
from parameters import half_quick
from refusals import refused

STEPS, FEATURES, UNITS = 7, 3, 4
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Packed(nn.Module):
    """A recurrent layer over the first steps of each sample; its first number says how many."""

    def __init__(
        self,
        kind: str,
        reads: str,
        sort: bool = False,
        given: bool = False,
        **options: object,
    ) -> None:
        super().__init__()
        self.layer = KINDS[kind](FEATURES, UNITS, **options)
        self.reads, self.sort = reads, sort
        rows = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.first = nn.Parameter(torch.randn(rows, 1, UNITS)) if given else None

    def forward(self, x: Tensor) -> Tensor:
        batch_first = self.layer.batch_first
        lengths = ((x[:, 0, 0].sigmoid() * STEPS).floor().long() + 1).clamp(max=STEPS)
        order = lengths.argsort(descending=True)
        if self.sort:
            x, lengths = x[order], lengths[order]
        packed = pack_padded_sequence(
            x if batch_first else x.transpose(0, 1),
            lengths,
            batch_first=batch_first,
            enforce_sorted=self.sort,
        )
        packed = PackedSequence(packed.data * 0.5, *packed[1:])
        state = None
        if self.first is not None:
            state = self.first.expand(-1, x.shape[0], -1).contiguous()
        if state is not None and self.layer.mode == "LSTM":
            state = state, state.tanh()
        y, last = self.layer(packed, state)
        if self.reads == "states":
            last = last if isinstance(last, tuple) else (last,)
            result = torch.cat([s.transpose(0, 1).flatten(1) for s in last], 1)
        else:
            total = STEPS if self.reads == "all steps" else None
            steps, counts = pad_packed_sequence(y, batch_first, -0.5, total)
            steps = steps if batch_first else steps.transpose(0, 1)
            result = steps.flatten(1) if total else steps[torch.arange(x.shape[0]), counts - 1]
        return result[order.argsort()] if self.sort else result


FORMS = {
    "one layer": {"reads": "states", "batch_first": True},
    "both directions": {"reads": "all steps", "bidirectional": True, "given": True},
    "stacked": {"reads": "last step", "num_layers": 2, "bidirectional": True, "batch_first": True},
    "sorted": {"reads": "states", "sort": True, "bias": False},
}


@pytest.mark.parametrize(("kind", "form"), half_quick(itertools.product(KINDS, FORMS)))
def test_loops_with_masks_equal_pytorchs_packing(kind: str, form: str, seed: int) -> None:
    torch.manual_seed(seed)
    row = Row(lambda: Packed(kind, **FORMS[form]), (STEPS, FEATURES), offset=0.0, returned=True)
    case = Case.of(row, record=True)
    feeds = case.feeds(seed)
    with RecurrenceLoops():
        actual = case.signature.function({name: value.double() for name, value in feeds.items()})
    came = [actual[port.name] for port in case.signature.outputs]
    assert_close(case, came, case.expected(feeds), tolerance=1e-12)


def test_a_packed_layer_is_one_loop_per_pass_and_direction() -> None:
    row = Row(lambda: Packed("gru", "last step", bidirectional=True), (STEPS, FEATURES))
    graph = trace(Case.of(row, record=True).signature)
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("edgetailor.loop.default") == 4


class Text(nn.Module):
    """Packs as PyTorch asks for by default: samples sorted by their lengths."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.GRU(FEATURES, UNITS, 2, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        lengths = ((x[:, 0, 0].sigmoid() * STEPS).floor().long() + 1).clamp(max=STEPS)
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return self.layer(packed)[1][-1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_recording_is_compared_with_packing_in_any_order(dropout: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = Text(dropout)
    captured = capture(model, (STEPS, FEATURES))
    x = torch.randn(5, STEPS, FEATURES)
    order = x[:, 0, 0].argsort(descending=True)
    expected = model.eval()(x[order])[order.argsort()]
    with RecurrenceLoops():
        actual = torch.func.functional_call(captured.inference, captured.tensors, (x,))
    assert torch.allclose(actual, expected, atol=1e-6)


def test_projections_are_refused() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(FEATURES, UNITS, batch_first=True, proj_size=2)

        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, (x[:, :, 0] < 9).sum(1), True)
            return self.layer(packed)[1][0][-1]

    with refused("export.lstm-projections"):
        capture(Projected(), (STEPS, FEATURES))
