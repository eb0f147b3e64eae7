"""Detection, segmentation and classification of pictures."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


def conv_bn(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.1, inplace=True),
    )


class TinyYolo(nn.Module):
    """Boxes decoded to pixels, one row for each anchor of each cell."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("anchors", torch.tensor([[4.0, 6.0], [10.0, 8.0]]))
        self.backbone = nn.Sequential(
            conv_bn(3, 8), nn.MaxPool2d(2, 2), conv_bn(8, 12), nn.MaxPool2d(2, 2), conv_bn(12, 16)
        )
        self.head = nn.Conv2d(16, 2 * (5 + classes), 1)

    def forward(self, x: Tensor) -> Tensor:
        p = self.head(self.backbone(x))
        bs, _, ny, nx = p.shape
        p = p.view(bs, 2, 5 + self.classes, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
        stride = x.shape[2] // ny
        yv, xv = torch.meshgrid(torch.arange(ny), torch.arange(nx), indexing="ij")
        grid = torch.stack((xv, yv), 2).view(1, 1, ny, nx, 2).to(x.dtype)
        xy = (torch.sigmoid(p[..., 0:2]) + grid) * stride
        wh = torch.exp(p[..., 2:4]).clamp(max=1e3) * self.anchors.view(1, 2, 1, 1, 2)
        out = torch.cat((xy, wh, p[..., 4:]), -1)
        return out.view(bs, -1, 5 + self.classes)


class SSD(nn.Module):
    """Classes and offsets at two scales, in one tensor (batch, boxes, 4 + classes)."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.classes, boxes = classes, 2
        self.stage1 = nn.Sequential(conv_bn(3, 8, 2), conv_bn(8, 12, 2))
        self.stage2 = conv_bn(12, 16, 2)
        self.scale = nn.Parameter(torch.full((1, 12, 1, 1), 20.0))
        self.loc = nn.ModuleList([nn.Conv2d(c, boxes * 4, 3, padding=1) for c in (12, 16)])
        self.conf = nn.ModuleList([nn.Conv2d(c, boxes * classes, 3, padding=1) for c in (12, 16)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.stage1(x)
        sources = [F.normalize(first, dim=1) * self.scale, self.stage2(first)]
        loc, conf = [], []
        for source, where, what in zip(sources, self.loc, self.conf, strict=True):
            loc.append(where(source).permute(0, 2, 3, 1).contiguous())
            conf.append(what(source).permute(0, 2, 3, 1).contiguous())
        loc = torch.cat([o.view(o.size(0), -1) for o in loc], 1).view(x.size(0), -1, 4)
        conf = torch.cat([o.view(o.size(0), -1) for o in conf], 1)
        conf = conf.view(x.size(0), -1, self.classes)
        return torch.cat([loc, F.softmax(conf, dim=-1)], dim=-1)


class CenterNet(nn.Module):
    """Heatmap, offset and size at a quarter of the resolution, in a dictionary's order."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.down = nn.Sequential(conv_bn(3, 8, 2), conv_bn(8, 12, 2), conv_bn(12, 16, 2))
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 12, 4, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(True)
        )
        self.heads = nn.ModuleDict()
        for name, channels in {"hm": classes, "wh": 2, "reg": 2}.items():
            head = nn.Sequential(
                nn.Conv2d(12, 8, 3, 1, 1), nn.ReLU(True), nn.Conv2d(8, channels, 1)
            )
            if name == "hm":
                head[-1].bias.data.fill_(-2.19)
            self.heads[name] = head

    def forward(self, x: Tensor) -> Tensor:
        features = self.up(self.down(x))
        out = {name: head(features) for name, head in self.heads.items()}
        out["hm"] = torch.clamp(out["hm"].sigmoid(), min=1e-4, max=1 - 1e-4)
        return torch.cat(list(out.values()), dim=1)


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class UNet(nn.Module):
    """With padding for sizes that do not halve evenly."""

    def __init__(self, channels: int = 3, classes: int = 3) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, 6)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(6, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 12))
        self.up1 = nn.ConvTranspose2d(12, 8, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(16, 8)
        self.up2 = nn.ConvTranspose2d(8, 6, kernel_size=2, stride=2)
        self.conv2 = DoubleConv(12, 6)
        self.outc = nn.Conv2d(6, classes, kernel_size=1)

    @staticmethod
    def join(x1: Tensor, x2: Tensor) -> Tensor:
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return torch.cat([x2, x1], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.conv1(self.join(self.up1(x3), x2))
        x = self.conv2(self.join(self.up2(x), x1))
        return self.outc(x)


class ASPP(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.ReLU())]
            + [
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, 3, padding=rate, dilation=rate, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                )
                for rate in (1, 2)
            ]
        )
        self.pooling = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, outputs, 1, bias=False), nn.ReLU()
        )
        self.project = nn.Sequential(nn.Conv2d(4 * outputs, outputs, 1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        out = [conv(x) for conv in self.convs]
        pooled = self.pooling(x)
        out.append(F.interpolate(pooled, size=x.shape[-2:], mode="bilinear", align_corners=False))
        return self.project(torch.cat(out, dim=1))


class DeepLab(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.low = conv_bn(3, 8, 2)
        self.high = conv_bn(8, 12, 2)
        self.aspp = ASPP(12, 8)
        self.low_project = nn.Conv2d(8, 4, 1)
        self.classifier = nn.Conv2d(12, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(x)
        high = self.aspp(self.high(low))
        high = F.interpolate(high, size=low.shape[2:], mode="bilinear", align_corners=True)
        y = self.classifier(torch.cat([self.low_project(low), high], dim=1))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.channel = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(self, size: int = 12, patch: int = 4, dim: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.blocks = nn.Sequential(*[MixerBlock((size // patch) ** 2, dim) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))
