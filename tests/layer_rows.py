"""Test rows of normalisation, pooling and embedding layers."""

from torch import nn
from torch.nn import functional

from layer_cases import Row
from row_kinds import layer, of, with_weight

LAYERS: dict[str, dict[str, Row]] = {
    "batch norm": {
        "batch norm 2d": Row(layer(nn.BatchNorm2d, 3), (3, 4, 5)),
        "batch norm 2d, not affine": Row(layer(nn.BatchNorm2d, 3, affine=False), (3, 4, 5)),
        "batch norm 2d, momentum and eps": Row(
            layer(nn.BatchNorm2d, 3, eps=0.1, momentum=0.3), (3, 4, 5)
        ),
        "batch norm 2d, predicting": Row(layer(nn.BatchNorm2d, 3), (3, 4, 5), training=False),
        "batch norm 1d": Row(layer(nn.BatchNorm1d, 6), (6,)),
        "batch norm 1d over time": Row(layer(nn.BatchNorm1d, 6), (6, 5)),
        "batch norm 1d, predicting": Row(layer(nn.BatchNorm1d, 6), (6,), training=False),
    },
    "normalisation": {
        "layer": Row(layer(nn.LayerNorm, 6), (5, 6)),
        "layer over two axes": Row(layer(nn.LayerNorm, (5, 6), eps=0.1), (5, 6)),
        "layer, not affine": Row(layer(nn.LayerNorm, 6, elementwise_affine=False), (6,)),
        "layer, no bias": Row(layer(nn.LayerNorm, 6, bias=False), (6,)),
        "group": Row(layer(nn.GroupNorm, 2, 6), (6, 4, 5)),
        "group, not affine": Row(layer(nn.GroupNorm, 3, 6, affine=False), (6, 4, 5)),
        "group over time": Row(layer(nn.GroupNorm, 3, 6), (6, 5)),
        "group of one channel": Row(layer(nn.GroupNorm, 6, 6), (6, 4, 5)),
        "instance": Row(layer(nn.InstanceNorm2d, 3), (3, 4, 5)),
        "instance, affine": Row(layer(nn.InstanceNorm2d, 3, affine=True), (3, 4, 5)),
        "instance over time": Row(layer(nn.InstanceNorm1d, 3, affine=True), (3, 7)),
        "instance, running statistics": Row(
            layer(nn.InstanceNorm2d, 3, track_running_stats=True), (3, 4, 5)
        ),
        "batch, no running statistics": Row(
            layer(nn.BatchNorm2d, 3, track_running_stats=False), (3, 4, 5)
        ),
        "root mean square": Row(layer(nn.RMSNorm, 6), (5, 6)),
        "root mean square, not affine": Row(
            layer(nn.RMSNorm, (5, 6), elementwise_affine=False, eps=0.1), (5, 6)
        ),
        "local response": Row(layer(nn.LocalResponseNorm, 2), (4, 3, 5)),
        "to unit length": Row(of(lambda x: functional.normalize(x, dim=1)), (5, 4)),
        "cosine similarity": Row(
            with_weight((5, 4), lambda x, w: functional.cosine_similarity(x, w, -1)), (5, 4)
        ),
        "weight": Row(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    },
    "max pooling": {
        "plain": Row(layer(nn.MaxPool2d, 2), (3, 4, 6)),
        "overlapping": Row(layer(nn.MaxPool2d, 3, 2, 1), (3, 7, 8)),
        "stride 1": Row(layer(nn.MaxPool2d, 3, 1, 1), (3, 5, 4)),
        "dilation": Row(layer(nn.MaxPool2d, 2, 1, dilation=2), (3, 6, 5)),
        "ceil mode": Row(layer(nn.MaxPool2d, 3, 2, ceil_mode=True), (3, 6, 8)),
        # With tanh, the gradient depends on the pooled values.
        "ceil mode, a window outside": Row(
            of(lambda x: functional.max_pool2d(x, 2, 3, 1, ceil_mode=True).tanh()), (3, 7, 9)
        ),
        "ceil mode, padding, dilation": Row(
            of(lambda x: functional.max_pool2d(x, 2, (3, 4), 1, (2, 3), ceil_mode=True).tanh()),
            (2, 9, 11),
        ),
        "uneven": Row(layer(nn.MaxPool2d, (3, 2), (2, 1), (1, 0)), (3, 6, 8)),
        "1d": Row(layer(nn.MaxPool1d, 3, 2, 1), (3, 9)),
        "without channels": Row(of(lambda x: functional.max_pool2d(x, 2).tanh()), (4, 6)),
        "adaptive": Row(layer(nn.AdaptiveMaxPool2d, 2), (3, 4, 6)),
        "adaptive, windows that overlap": Row(layer(nn.AdaptiveMaxPool2d, (3, 2)), (3, 5, 7)),
        "adaptive to one": Row(layer(nn.AdaptiveMaxPool2d, 1), (3, 5, 7)),
        "adaptive 1d": Row(layer(nn.AdaptiveMaxPool1d, 3), (3, 7)),
    },
    "average pooling": {
        "plain": Row(layer(nn.AvgPool2d, 2), (3, 4, 6)),
        "overlapping": Row(layer(nn.AvgPool2d, 3, 2, 1), (3, 7, 8)),
        "padding not counted": Row(
            layer(nn.AvgPool2d, 3, 2, 1, count_include_pad=False), (3, 7, 8)
        ),
        "ceil mode": Row(layer(nn.AvgPool2d, 3, 2, 1, ceil_mode=True), (3, 6, 8)),
        "ceil mode, padding not counted": Row(
            layer(nn.AvgPool2d, 3, 2, 1, ceil_mode=True, count_include_pad=False), (3, 6, 8)
        ),
        "divisor": Row(layer(nn.AvgPool2d, 2, divisor_override=3), (3, 4, 6)),
        "rest left over": Row(layer(nn.AvgPool2d, 2), (3, 5, 7)),
        "uneven": Row(layer(nn.AvgPool2d, (3, 2), (2, 1), (1, 0)), (3, 6, 8)),
        "1d": Row(layer(nn.AvgPool1d, 3, 2, 1), (3, 9)),
        "3d": Row(layer(nn.AvgPool3d, 2), (2, 4, 5, 6)),
        "3d, overlapping": Row(layer(nn.AvgPool3d, 3, 2, 1), (2, 4, 5, 6)),
        "power": Row(layer(nn.LPPool2d, 2, 2), (3, 4, 6), positive=True),
        "adaptive to one": Row(layer(nn.AdaptiveAvgPool2d, 1), (3, 4, 5)),
        "adaptive": Row(layer(nn.AdaptiveAvgPool2d, 2), (3, 4, 6)),
        "adaptive, windows that overlap": Row(layer(nn.AdaptiveAvgPool2d, (3, 2)), (3, 5, 7)),
        "adaptive, to more": Row(layer(nn.AdaptiveAvgPool2d, (7, 9)), (2, 3, 4)),
        "adaptive 1d": Row(layer(nn.AdaptiveAvgPool1d, 3), (3, 7)),
        # PyTorch writes this mean through strides, as after a normalisation of the last axis.
        "adaptive to one, channels last": Row(
            of(lambda x: functional.adaptive_avg_pool2d(x.tanh().movedim(-1, 1), 1)), (4, 5, 3)
        ),
        "adaptive 1d to one, channels last": Row(
            of(lambda x: functional.adaptive_avg_pool1d(x.tanh().movedim(-1, 1), 1)), (5, 3)
        ),
        "adaptive 3d to one, channels last": Row(
            of(lambda x: functional.adaptive_avg_pool3d(x.tanh().movedim(-1, 1), 1)), (4, 5, 2, 3)
        ),
        "mean over the image": Row(of(lambda x: x.mean((2, 3))), (3, 4, 5)),
    },
    "embedding": {
        "plain": Row(layer(nn.Embedding, 7, 4), (5,), limit=7),
        "one for a sample": Row(layer(nn.Embedding, 7, 4), (), limit=7),
        "padding": Row(layer(nn.Embedding, 7, 4, padding_idx=2), (5,), limit=7),
        "scaled by frequency": Row(
            layer(nn.Embedding, 7, 4, scale_grad_by_freq=True), (5,), limit=7
        ),
        "one-hot": Row(
            with_weight((7, 4), lambda x, w: functional.one_hot(x, 7).to(w) @ w), (5,), limit=7
        ),
        "weights indexed": Row(with_weight((7, 4), lambda x, w: w[x]), (5,), limit=7),
    },
}
