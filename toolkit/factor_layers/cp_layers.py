"""Layers that compute with CP factors, without composing the dense weight (TDPFed, section IV-B).

A convolution (n, m, kh, kw) of rank R becomes four convolutions: 1 x 1 to R channels, kh x 1 and
1 x kw for each channel separately, and 1 x 1 to n channels (eq. 9 to 12). The factor of each mode
of the weight is a parameter (I_n, R).
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from toolkit.factorization.cp_decomposition import compose
from toolkit.submodels.weighted_layers import Convolution, copy_settings, replace_module


def zero_factors(weight: Tensor, rank: int) -> nn.ParameterList:
    """Factors (I_n, rank) for the modes of `weight`, filled with zeros."""
    return nn.ParameterList([torch.zeros(size, rank) for size in weight.shape])


def composed_weight(layer: nn.Module) -> Tensor:
    """Compose the dense weight, which some models (nn.TransformerEncoder) read from the layer."""
    return compose(list(layer.factors))  # type: ignore[arg-type]


class TensorizedConvolution(nn.Module):
    """A convolution with CP factors, see the module. All groups share the factor of the inputs."""

    weight = property(composed_weight)

    def __init__(self, dense: Convolution, rank: int) -> None:
        super().__init__()
        copy_settings(self, dense)
        self.factors = zero_factors(dense.weight, rank)
        self.bias = dense.bias
        self.groups, self.stride, self.dilation = dense.groups, dense.stride, dense.dilation
        self.kernel, self.mode = dense.kernel_size, dense.padding_mode.replace("zeros", "constant")
        self.margins = [self.margin(dense.padding, axis) for axis in range(len(self.kernel))]

    def margin(self, padding: str | tuple[int, ...], axis: int) -> tuple[int, int]:
        """Padding before and after the values along the spatial `axis`."""
        if isinstance(padding, str):
            # As in torch, an odd pixel of padding="same" goes to the end.
            total = self.dilation[axis] * (self.kernel[axis] - 1) if padding == "same" else 0
            return total // 2, total - total // 2
        return padding[axis], padding[axis]

    def forward(self, x: Tensor) -> Tensor:
        """(N, m, H, W) -> (N, n, H', W')."""
        outer, inner, *kernels = self.factors
        points = [1] * len(kernels)
        convolve = torch.conv1d if len(kernels) == 1 else torch.conv2d
        x = convolve(
            x, self.repeat_for_groups(inner).reshape(-1, len(inner), *points), groups=self.groups
        )
        for axis, factor in enumerate(kernels):
            sizes = [len(factor) if n == axis else 1 for n in range(len(kernels))]
            weight = self.repeat_for_groups(factor).reshape(-1, 1, *sizes)
            stride, dilation = (
                [value[axis] if n == axis else 1 for n in range(len(kernels))]
                for value in (self.stride, self.dilation)
            )
            # One group for each channel: the kernel is applied to every channel separately.
            x = convolve(self.pad_axis(x, axis), weight, None, stride, 0, dilation, weight.shape[0])
        return convolve(x, outer.reshape(*outer.shape, *points), self.bias, groups=self.groups)

    def repeat_for_groups(self, factor: Tensor) -> Tensor:
        """Repeat a factor for every group: (I_n, R) becomes (groups * R, I_n)."""
        return factor.T.repeat(self.groups, 1)

    def pad_axis(self, x: Tensor, axis: int) -> Tensor:
        """Pad `x` along the spatial `axis` only."""
        if not any(self.margins[axis]):
            return x
        ends = [self.margins[axis] if n == axis else (0, 0) for n in range(len(self.kernel))]
        return pad(x, [end for pair in reversed(ends) for end in pair], self.mode)


class TensorizedLinear(nn.Module):
    """Two linear layers: to R features, then to n (eq. 6)."""

    weight = property(composed_weight)

    def __init__(self, dense: nn.Linear, rank: int) -> None:
        super().__init__()
        copy_settings(self, dense)
        self.factors = zero_factors(dense.weight, rank)
        self.bias = dense.bias

    def forward(self, x: Tensor) -> Tensor:
        """(N, ..., m) -> (N, ..., n)."""
        outer, inner = self.factors
        return linear(linear(x, inner.T), outer, self.bias)


def with_cp_factors(model: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """Copy `model` and let some convolutions and linear layers compute with CP factors.

    Args:
        model: The model.
        ranks: Rank by the name of each weight to replace. The weight `a.weight` becomes the factors
            `a.factors.0`, `a.factors.1` and so on.
    """
    model = copy.deepcopy(model)
    for name, rank in ranks.items():
        layer, _, _ = name.rpartition(".")
        dense = model.get_submodule(layer)
        new_layer = (
            TensorizedLinear(dense, rank)
            if isinstance(dense, nn.Linear)
            else TensorizedConvolution(dense, rank)  # type: ignore[arg-type]
        )
        if not layer:
            return new_layer
        replace_module(model, dense, new_layer)
    return model
