"""Tables: numbers and categories in the columns of one array."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


class TabTransformer(nn.Module):
    """Columns of categories become tokens; the numbers join after the attention."""

    def __init__(self, categories: tuple[int, ...] = (4, 3, 6), numbers: int = 3) -> None:
        super().__init__()
        dim = 8
        self.count = len(categories)
        offset = F.pad(torch.tensor(categories), (1, 0)).cumsum(-1)[:-1]
        self.register_buffer("offset", offset)
        self.embed = nn.Embedding(sum(categories), dim)
        self.norm = nn.LayerNorm(numbers)
        layer = nn.TransformerEncoderLayer(
            dim, 2, 16, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mlp = nn.Sequential(
            nn.Linear(dim * self.count + numbers, 16), nn.SELU(), nn.Linear(16, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        categories, numbers = x[:, : self.count].long(), x[:, self.count :]
        tokens = self.transformer(self.embed(categories + self.offset))
        return self.mlp(torch.cat((tokens.flatten(1), self.norm(numbers)), dim=-1))


class EntityEmbeddings(nn.Module):
    """The regression of a price, with the rule of thumb for the sizes of embeddings."""

    def __init__(self, cardinalities: tuple[int, ...] = (7, 12, 31), numbers: int = 4) -> None:
        super().__init__()
        sizes = [(n, min(50, (n + 1) // 2)) for n in cardinalities]
        self.embeddings = nn.ModuleList([nn.Embedding(n, size) for n, size in sizes])
        self.numbers = numbers
        self.bn = nn.BatchNorm1d(numbers)
        width = sum(size for _, size in sizes) + numbers
        self.layers = nn.Sequential(
            nn.Dropout(0.04),
            nn.Linear(width, 20),
            nn.ReLU(inplace=True),
            nn.BatchNorm1d(20),
            nn.Dropout(0.1),
            nn.Linear(20, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        numbers, ids = x[:, : self.numbers], x[:, self.numbers :].round().long()
        columns = [
            e(ids[:, i].clamp(0, e.num_embeddings - 1)) for i, e in enumerate(self.embeddings)
        ]
        x = torch.cat([*columns, self.bn(numbers)], 1)
        return self.layers(x).squeeze(-1)


class ObliviousTrees(nn.Module):
    """Soft oblivious trees: each depth chooses a feature and a threshold."""

    def __init__(self, features: int, trees: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.choice = nn.Parameter(torch.randn(features, trees, depth))
        self.threshold = nn.Parameter(torch.randn(trees, depth))
        self.log_temperature = nn.Parameter(torch.zeros(trees, depth))
        self.response = nn.Parameter(torch.randn(trees, outputs, 2**depth))
        codes = torch.stack([(torch.arange(2**depth) >> i) & 1 for i in range(depth)])
        bins = torch.stack([codes, 1 - codes], dim=-1).float()
        self.bin_codes = nn.Parameter(bins, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.choice, dim=0)
        selected = torch.einsum("bf,ftd->btd", x, weights)
        logits = (selected - self.threshold) * torch.exp(-self.log_temperature)
        logits = torch.stack([-logits, logits], dim=-1)
        bins = torch.clamp(0.5 * logits + 0.5, 0, 1)
        matches = torch.einsum("btds,dcs->btdc", bins, self.bin_codes)
        leaves = torch.prod(matches, dim=-2)
        return torch.einsum("btc,toc->bto", leaves, self.response)


class NODE(nn.Module):
    def __init__(self, features: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.first = ObliviousTrees(features, 4, 3, classes)
        self.second = ObliviousTrees(features + 4 * classes, 4, 3, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        first = self.first(x)
        second = self.second(torch.cat([x, first.flatten(1)], dim=1))
        return torch.cat([first, second], dim=1).mean(dim=1)


def sparsemax(z: Tensor) -> Tensor:
    ordered, _ = torch.sort(z, dim=-1, descending=True)
    k = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
    sums = ordered.cumsum(-1)
    support = (1 + k * ordered > sums).to(z.dtype)
    size = support.sum(-1, keepdim=True)
    tau = (sums.gather(-1, size.long() - 1) - 1) / size
    return torch.clamp(z - tau, min=0)


class TabNet(nn.Module):
    """Steps that choose features by sparsemax."""

    def __init__(self, features: int = 10, classes: int = 3, steps: int = 3) -> None:
        super().__init__()
        dim, self.dim, self.gamma = 8, 8, 1.3
        self.bn = nn.BatchNorm1d(features, momentum=0.01)
        self.shared = nn.Linear(features, 4 * dim, bias=False)
        self.own = nn.ModuleList(nn.Linear(2 * dim, 4 * dim, bias=False) for _ in range(steps + 1))
        self.masks = nn.ModuleList(nn.Linear(dim, features, bias=False) for _ in range(steps))
        self.norms = nn.ModuleList(nn.BatchNorm1d(features) for _ in range(steps))
        self.out = nn.Linear(dim, classes, bias=False)

    def transform(self, x: Tensor, own: nn.Linear) -> Tensor:
        h = F.glu(self.shared(x))
        return (h + F.glu(own(h))) * 0.5**0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x)
        prior = torch.ones_like(x)
        attention = self.transform(x, self.own[0])[:, self.dim :]
        output = 0
        for own, mask, norm in zip(self.own[1:], self.masks, self.norms, strict=True):
            m = sparsemax(norm(mask(attention)) * prior)
            prior = prior * (self.gamma - m)
            h = self.transform(m * x, own)
            output = output + F.relu(h[:, : self.dim])
            attention = h[:, self.dim :]
        return self.out(output)
