"""Test rows of operators that multiply samples and weights."""

import torch
from torch import einsum, nn
from torch.nn import functional

from layer_cases import Row
from row_kinds import (
    IMAGE,
    Attention,
    Pair,
    WithWeights,
    attend,
    back1d,
    back2d,
    conv1d,
    conv2d,
    encoder,
    in_order,
    layer,
    of,
    with_weight,
)

PRODUCTS: dict[str, dict[str, Row]] = {
    "convolution": {
        "conv2d": Row(conv2d(3, 4, 3), (3, 6, 7)),
        "conv2d padding": Row(conv2d(3, 4, 3, padding=1), (3, 6, 7)),
        "conv2d more padding than kernel": Row(conv2d(2, 3, 2, padding=3), (2, 4, 5)),
        "conv2d uneven padding": Row(conv2d(3, 4, 3, padding=(0, 2)), (3, 6, 5)),
        "conv2d same": Row(conv2d(3, 4, 3, padding="same"), (3, 6, 5)),
        "conv2d no bias": Row(conv2d(3, 4, 3, padding=1, bias=False), (3, 6, 7)),
        "conv2d stride": Row(conv2d(3, 4, 3, stride=2, padding=1), (3, 6, 6)),
        "conv2d stride, rest left over": Row(conv2d(3, 4, 3, stride=3), (3, 8, 7)),
        "conv2d stride above kernel": Row(conv2d(3, 4, 2, stride=3), (3, 9, 7)),
        "conv2d uneven stride": Row(conv2d(3, 4, 3, stride=(1, 2), padding=1), (3, 5, 8)),
        "conv2d dilation": Row(conv2d(3, 4, 3, dilation=2, padding=2), (3, 7, 6)),
        "conv2d uneven dilation": Row(conv2d(3, 4, 3, dilation=(1, 2)), (3, 5, 8)),
        "conv2d stride, padding, dilation": Row(
            conv2d(2, 3, (3, 2), stride=(2, 3), padding=(2, 1), dilation=(2, 3)), (2, 9, 10)
        ),
        "conv2d groups": Row(conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 6)),
        "conv2d groups, stride, dilation": Row(
            conv2d(6, 3, 3, groups=3, stride=2, padding=2, dilation=2), (6, 8, 7)
        ),
        "conv2d depthwise": Row(conv2d(4, 4, 3, groups=4, padding=1), (4, 6, 5)),
        "conv2d depthwise with multiplier": Row(conv2d(3, 6, 3, groups=3, stride=2), (3, 7, 7)),
        "conv2d 1x1": Row(conv2d(3, 5, 1), (3, 4, 6)),
        "conv2d 1x1 stride": Row(conv2d(3, 5, 1, stride=2), (3, 5, 6)),
        "conv2d kx1": Row(conv2d(3, 2, (3, 1), padding=(1, 0)), (3, 6, 5)),
        "conv2d 1xk": Row(conv2d(2, 4, (1, 3), padding=(0, 1), stride=(1, 2)), (2, 4, 7)),
        "conv2d few outputs": Row(conv2d(6, 3, (3, 1), padding=(2, 0), dilation=(2, 1)), (6, 8, 9)),
        "conv2d few outputs, groups": Row(conv2d(8, 4, 3, groups=2), (8, 9, 8)),
        "conv2d few inputs": Row(conv2d(3, 7, (2, 3), padding=1), (3, 8, 8)),
        "conv2d even kernel": Row(conv2d(3, 4, (2, 4), padding=(1, 2)), (3, 6, 7)),
        "conv2d kernel of the image": Row(conv2d(2, 4, (4, 5)), (2, 4, 5)),
        "conv2d one channel": Row(conv2d(1, 1, 3, padding=1), (1, 4, 4)),
        "conv1d": Row(conv1d(3, 4, 3, padding=1), (3, 9)),
        "conv1d stride, dilation": Row(conv1d(3, 4, 3, stride=2, padding=2, dilation=2), (3, 10)),
        "conv1d groups, even kernel": Row(conv1d(4, 6, 4, groups=2), (4, 9)),
    },
    "transposed convolution": {
        "plain": Row(back2d(3, 4, 3), IMAGE),
        "no bias": Row(back2d(3, 4, 3, bias=False), IMAGE),
        "stride": Row(back2d(3, 4, 2, stride=2), IMAGE),
        "stride, padding, output padding": Row(
            back2d(3, 4, 3, stride=2, padding=1, output_padding=1), IMAGE
        ),
        "uneven": Row(
            back2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(0, 2)), (2, 4, 5)
        ),
        "dilation": Row(back2d(3, 4, 3, dilation=2, padding=1), IMAGE),
        "stride, dilation, output padding": Row(
            back2d(2, 3, 3, stride=3, dilation=2, padding=2, output_padding=2), (2, 4, 3)
        ),
        "groups": Row(back2d(4, 6, 3, groups=2, stride=2, padding=1), (4, 4, 5)),
        "depthwise": Row(back2d(4, 4, 4, groups=4, stride=2, padding=1), (4, 4, 5)),
        "depthwise with multiplier": Row(back2d(3, 6, 3, groups=3, dilation=2), (3, 4, 5)),
        "more padding than kernel": Row(back2d(2, 3, 2, padding=2), (2, 6, 7)),
        "1x1": Row(back2d(3, 5, 1), IMAGE),
        "more output padding than stride": Row(
            back2d(2, 3, 3, dilation=3, output_padding=(2, 1)), (2, 4, 5)
        ),
        "1d": Row(back1d(3, 4, 3), (3, 7)),
        "1d, everything": Row(
            back1d(4, 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2), (4, 7)
        ),
    },
    "linear": {
        "linear": Row(layer(nn.Linear, 5, 3), (5,)),
        "linear no bias": Row(layer(nn.Linear, 5, 3, bias=False), (5,)),
        "linear over a sequence": Row(layer(nn.Linear, 5, 3), (4, 5)),
    },
    "matrix product": {
        "matmul": Row(with_weight((4, 3), torch.matmul), (5, 4)),
        "vector": Row(with_weight((4,), torch.matmul), (5, 4)),
        "of samples": Row(of(lambda x: x @ x.transpose(1, 2)), (5, 4)),
        "bmm": Row(of(lambda x: torch.bmm(x, x.transpose(1, 2).tanh())), (5, 4)),
        "baddbmm": Row(of(lambda x: torch.baddbmm(x, x, x, beta=0.5, alpha=2.0)), (4, 4)),
        "addmm": Row(with_weight((4, 4), lambda x, w: torch.addmm(w[0], x, w)), (4,)),
        "outer": Row(with_weight((4,), lambda x, w: x.unsqueeze(2) * w), (3,)),
        "bilinear": Row(layer(Pair), (4,)),
        "einsum": Row(with_weight((3, 4, 2), lambda x, w: einsum("nij,jkl->nikl", x, w)), (5, 3)),
        "einsum over two": Row(
            with_weight((5, 3, 2), lambda x, w: einsum("nij,ijk->nk", x, w)), (5, 3)
        ),
        "einsum of samples": Row(of(lambda x: einsum("nid,njd->nij", x, x.sin())), (5, 3)),
    },
    "attention": {
        "plain": Row(of(attend), (2, 5, 4)),
        "causal": Row(of(lambda x: attend(x, is_causal=True)), (2, 5, 4)),
        "mask of booleans": Row(of(lambda x: attend(x, attn_mask=in_order(x))), (2, 5, 4)),
        "mask that bars all keys of a query": Row(
            of(lambda x: attend(x, attn_mask=in_order(x).tril(-1))), (2, 5, 4)
        ),
        "mask that is added": Row(
            with_weight((5, 5), lambda x, w: attend(x, attn_mask=w)), (2, 5, 4)
        ),
        "scale": Row(of(lambda x: attend(x, scale=0.3)), (2, 5, 4)),
        "without heads": Row(of(attend), (1, 5, 4)),
        "grouped queries": Row(
            of(
                lambda x: functional.scaled_dot_product_attention(
                    x, x[:, :2], x[:, 2:] * 2, enable_gqa=True
                )
            ),
            (4, 5, 4),
        ),
        "multi-head": Row(Attention, (5, 8)),
        "multi-head, causal": Row(layer(Attention, causal=True), (5, 8)),
        "multi-head, no bias": Row(layer(Attention, bias=False), (5, 8)),
        "multi-head, weights": Row(WithWeights, (5, 8)),
        "encoder layer": Row(
            encoder(activation="gelu"),
            (5, 8),
            offset=0.1,
        ),
        "encoder layer, norm first": Row(
            encoder(norm_first=True),
            (5, 8),
            offset=0.1,
        ),
        "encoder layer, predicting": Row(
            encoder(activation="gelu"),
            (5, 8),
            offset=0.1,
            training=False,
        ),
    },
}
