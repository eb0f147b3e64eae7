"""A small network in the manner of MobileNetV3, in plain PyTorch."""

from torch import Tensor, nn


class Inverted(nn.Module):
    """An inverted residual block with squeeze and excitation (MobileNetV3, Howard et al. 2019)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inner
        self.shortcut = stride == 1 and inner == outer
        self.body = nn.Sequential(
            *(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.Hardswish()),
        )
        self.excite = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, inner, 1), nn.ReLU()),
            *(nn.Conv2d(inner, wide, 1), nn.Hardsigmoid()),
        )
        self.end = nn.Sequential(nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = self.end(y * self.excite(y))
        return x + y if self.shortcut else y


class MobileNet(nn.Sequential):
    """Six blocks, for pictures of any size."""

    def __init__(self, channels: int = 3) -> None:
        widths = [(16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1)]
        blocks = [Inverted(*width) for width in widths]
        begin = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
        super().__init__(*begin, nn.Hardswish(), *blocks, *end)
