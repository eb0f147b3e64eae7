"""Models that change or average elements where a mask is true, compared with themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from exporters.recording.capture import capture
from parameters import half_quick
from refusals import refused

Compute = Callable[[Tensor], Tensor]


class Between(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.last, self.compute = nn.Linear(6, 8), nn.Linear(8, 3), compute

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.compute(self.first(x).clone()))
        return out


def same_mask(h: Tensor) -> Tensor:
    mask = h > 0
    h[mask] = torch.log(h[mask]) * 0.1
    h[mask] += 2
    return h


def same_comparison(h: Tensor) -> Tensor:
    h[h < 0] = h[h < 0] * 0.1
    h[h > 1] **= 0.5
    return h


def rows(h: Tensor) -> Tensor:
    chosen = h.mean(1) > 0
    h[chosen] = h[chosen].tanh() - h[chosen].mean() + h[chosen].sum()
    return h


def of_another(h: Tensor) -> Tensor:
    other, mask = h.flip(1), h > 0.5
    h[mask] = other[mask] + h[mask]
    return h


def at_positions(h: Tensor) -> Tensor:
    row, column = torch.where(h > 0)
    h[row, column] = h[row, column].tanh()
    return h


def columns_of_rows(h: Tensor) -> Tensor:
    chosen = h.mean(1) > 0
    h[chosen, 0] = h[:, 1][chosen] * 2
    h[chosen, 2:4] = h[chosen, 4:6].exp()
    return h


def experts(h: Tensor) -> Tensor:
    out, weight = torch.zeros_like(h), torch.linspace(-1, 1, 64).view(8, 8)
    for number in range(3):
        mine = torch.eq(h.argmax(1) % 3, number).nonzero(as_tuple=True)[0]
        wide = functional.gelu(functional.linear(h[mine], weight * number))
        out[mine, :] = functional.layer_norm(wide, (8,)) * h.softmax(1).amax(1)[mine, None]
    return out


def added_rows(h: Tensor) -> Tensor:
    (mine,) = torch.where(h[:, 0] > h[:, 1])
    return h.index_add(0, mine, h[mine].sin()).index_add_(0, mine, h[mine])


def losses(h: Tensor) -> Tensor:
    chosen, kinds = h > -0.5, h.argmax(1)
    target = torch.ones_like(h)
    binary = nn.BCEWithLogitsLoss()(h[chosen], target[chosen])
    known = kinds != 3
    kinds = torch.where(kinds == 2, -100, kinds)
    classes = functional.cross_entropy(h[known], kinds[known], label_smoothing=0.1)
    far = functional.smooth_l1_loss(h[chosen], h.sin()[chosen], reduction="sum")
    return h * (binary + classes + far)


def rows_of_elements(h: Tensor) -> Tensor:
    row, _ = torch.where(h > 0)
    return torch.zeros_like(h).index_add(0, row, h[row])


def chosen_experts(h: Tensor) -> Tensor:
    """As in Mixtral: a mask (choice, row) for each expert."""
    weights, chosen = h.softmax(1).topk(2, 1)
    mask, out = functional.one_hot(chosen, h.shape[1]).permute(2, 1, 0), torch.zeros_like(h)
    for expert in range(4):
        choice, row = torch.where(mask[expert])
        own = h[None, row].reshape(-1, h.shape[1]).tanh() * (expert + 1)
        out.index_add_(0, row, own * weights[row, choice, None])
    return out


def experts_in_place(h: Tensor) -> Tensor:
    """As in DeepSeek: a mask (row, choice), and rows are read and written."""
    weights, chosen = h.softmax(1).topk(2, 1)
    out = h.clone()
    for expert in range(4):
        row, choice = torch.where(chosen == expert)
        out[row] += (h[row] * expert).sin() * weights[row, choice, None]
    return out


def selected(h: Tensor) -> Tensor:
    mask = h > 0
    mean = torch.masked_select(h.sin(), mask).mean() + h.masked_select(h[:, :1] > 0.5).sum()
    return h * (mean + functional.mse_loss(h.masked_select(mask), h.cos().masked_select(mask)))


def overlaps(h: Tensor) -> Tensor:
    """As in losses of detectors: boxes of the positive places."""
    positive = torch.nonzero(h[:, 0] > 0).squeeze(1)
    own, other = h[positive], h.sin()[positive]
    ends, starts = torch.min(own[:, 2:4], other[:, 2:4]), torch.max(own[:, :2], other[:, :2])
    sizes = (ends - starts).clamp(min=0)
    return h * (sizes[:, 0] * sizes[:, 1]).sum()


def boxes_of_cells(h: Tensor) -> Tensor:
    """As in YOLO: boxes (batch, cells, 4) of the cells that have an object."""
    cells = h.view(-1, 2, 4)
    objects = cells[..., 0] > 0
    own, other = cells[objects], cells.sin()[objects]
    left, top, right, bottom = own.unbind(-1)
    shares = torch.cat([*other[..., :2].chunk(2, dim=1), (left - right)[:, None].abs()], -1)
    areas = torch.stack([left * top, abs(right) * bottom, shares.prod(-1)], dim=1)
    aim = areas.mean(1, keepdim=True).detach()
    far = functional.mse_loss(own[..., 0:1].sigmoid(), aim, reduction="sum")
    return h * (far + areas.sum(-1).sum())


def distributions_of_cells(h: Tensor) -> Tensor:
    cells = h.view(-1, 2, 4)
    objects = cells[..., 0] > 0
    own, other = cells[objects].softmax(-1), cells.cos()[objects].log_softmax(1)
    likely = (own * (own.log() - other)).sum(-1, True).sum()
    kinds = (cells[..., 1][objects] > 0).long() + cells[objects].argmax(-1) // 2
    return h * (likely + functional.cross_entropy(cells[objects], kinds, reduction="sum"))


def two_views(h: Tensor) -> Tensor:
    """As in SimCLR: of all pairs but the diagonal, those of one sample and the others."""
    size, both = h.shape[0], torch.cat([h, h.sin()])
    samples = torch.cat([torch.arange(size) for _ in range(2)])
    same = (samples.unsqueeze(0) == samples.unsqueeze(1)).float()
    diagonal = torch.eye(same.shape[0], dtype=torch.bool)
    same = same[~diagonal].view(same.shape[0], -1)
    similar = (both @ both.T)[~diagonal].view(same.shape[0], -1)
    one = similar[same.bool()].view(same.shape[0], -1)
    others = similar[~same.bool()].reshape(similar.shape[0], -1)
    logits = torch.cat([one, others], dim=1) / 10
    return h * functional.cross_entropy(logits, torch.zeros(2 * size, dtype=torch.long))


def spread(h: Tensor) -> Tensor:
    """As in the scale-invariant loss of depths, of the errors where the sensor measured."""
    mask = h > -1
    errors = h[mask].sin() - h.abs()[mask]
    largest = errors.max() - errors.min() + torch.norm(errors)
    return (
        h * (errors.var() + errors.std(unbiased=False) + torch.var(errors, correction=2)) + largest
    )


def balanced_classes(h: Tensor) -> Tensor:
    """As in trackers: the mean losses of positive and of negative places, each by its number."""
    kinds = (h[:, 0] > 0).long()
    likely, total = h.log_softmax(1), torch.zeros(())
    for kind in range(2):
        places = kinds.eq(kind).nonzero().squeeze(1)
        own = functional.nll_loss(
            torch.index_select(likely, 0, places),
            torch.index_select(kinds, 0, places),
            reduction="sum",
        )
        total = total + own / max(places.numel(), 1)
    return h * total * (kinds > 0).numel() / torch.numel(kinds)


COMPUTED = [
    balanced_classes,
    two_views,
    spread,
    boxes_of_cells,
    distributions_of_cells,
    selected,
    rows_of_elements,
    chosen_experts,
    experts_in_place,
    overlaps,
]
COMPUTED += [same_mask, same_comparison, rows, of_another]
COMPUTED += [at_positions, columns_of_rows, experts, added_rows, losses]


@pytest.mark.parametrize("compute", half_quick(COMPUTED))
def test_masked_elements_and_their_gradients(compute: Compute, seed: int) -> None:
    torch.manual_seed(seed)
    model = Between(compute)
    graph = capture(model, (6,)).training
    for x in 3 * torch.randn(3, 5, 6):
        expected, recorded = model(x), graph(x)
        torch.testing.assert_close(recorded, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        if expected.isnan().any():  # a mean over no element
            continue
        (own,), (other,) = (
            torch.autograd.grad(y.sin().sum(), [model.first.weight if m is model else w])
            for y, m, w in (
                (expected, model, model.first.weight),
                (recorded, graph, graph.get_parameter("first.weight")),
            )
        )
        # In float32: single elements may cancel, so the error is one of the whole gradient.
        assert (other - own).norm() <= 1e-4 * own.norm() + 1e-5


def changed_between(h: Tensor) -> Tensor:
    chosen = h[h > 0]
    h += 1
    h[h > 0] = chosen.repeat(3)[: (h > 0).sum()]
    return h


def as_a_list(h: Tensor) -> Tensor:
    return h + h[h > 0].median()


def clamped(h: Tensor) -> Tensor:
    chosen = h[h > 50]
    chosen.clamp_(max=60)
    h[h > 50] = chosen
    return h


def filled(h: Tensor) -> Tensor:
    chosen = h[h > 50]
    chosen[:] = 3
    h[h > 50] = chosen
    return h


def by_a_tensor(h: Tensor) -> Tensor:
    other, positive = h + 1, h > 0
    h[positive] = h[positive].clamp(max=other[positive])
    return h


def positions_of_an_older_mask(h: Tensor) -> Tensor:
    mask = h[:, 0] > 0
    (mine,) = torch.where(mask)
    mask &= h[:, 1] > 0
    return torch.zeros_like(h).index_add(0, mine, h[mine])


def of_two_masks(h: Tensor) -> Tensor:
    row, _ = torch.where(h > 0)
    _, column = torch.where(h > 1)
    return torch.zeros_like(h).index_add(0, row, h[row]) + h[:, column].amax(1, keepdim=True)


def above_the_diagonal(h: Tensor) -> Tensor:
    """Each row has another number of elements."""
    above = torch.ones(h.shape[0], h.shape[0]).triu().bool()
    return h * (h @ h.T)[above].view(h.shape[0], -1).sum()


def along_an_axis(h: Tensor) -> Tensor:
    cubes = h.view(-1, 2, 2, 2)
    return h + cubes[h[:, 0] > 0].var(dim=2).sum()


OTHERS = [
    along_an_axis,
    above_the_diagonal,
    changed_between,
    as_a_list,
    clamped,
    filled,
    by_a_tensor,
]
OTHERS += [positions_of_an_older_mask, of_two_masks]


@pytest.mark.parametrize("compute", OTHERS)
def test_other_uses_of_selected_elements_are_refused(compute: Compute) -> None:
    with refused("model.data-dependent-size", "test_boolean_masks.py, line"):
        capture(Between(compute), (6,))
