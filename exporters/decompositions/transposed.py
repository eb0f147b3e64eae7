"""Transposed convolution where runtimes refuse what PyTorch takes."""

import torch
from torch import Tensor

from exporters.decompositions.form import Forms

aten = torch.ops.aten


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """The whole transposed convolution, cut by `padding` and padded by `output_padding`.

    Only where output padding reaches the stride; the rest is left to runtimes (NotImplemented).
    """
    if not transposed or all(o < s for o, s in zip(output_padding, stride, strict=True)):
        return NotImplemented  # type: ignore[no-any-return]
    none = [0] * len(stride)
    whole = aten.convolution(x, weight, None, stride, none, dilation, True, none, groups)
    pads = [
        n
        for p, o in zip(reversed(padding), reversed(output_padding), strict=True)
        for n in (-p, o - p)
    ]
    y: Tensor = aten.constant_pad_nd(whole, pads)
    return y if bias is None else y + bias.reshape([-1, *[1] * len(stride)])


FORMS: Forms = {aten.convolution.default: convolution}
