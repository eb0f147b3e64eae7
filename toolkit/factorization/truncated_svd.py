"""The matrix of a weight and its truncated SVD (FedHM)."""

import math

import torch
from torch import Tensor


def unroll(weight: Tensor) -> Tensor:
    """The matrix that FedHM factorizes in place of a weight.

    (n, m, kh, kw) becomes (m * kh, n * kw), (n, m, k) becomes (m * k, n), (n, m) becomes (m, n).
    """
    if weight.dim() == 2:
        return weight.T
    outputs, inputs, rows, *columns = weight.shape
    moved = weight.movedim(0, 2)
    return moved.reshape(inputs * rows, outputs * math.prod(columns))


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (m, rank) and V (n, rank) such that U V^T approximates `matrix` (m, n) best.

    Spectral initialisation: both sides are scaled by the square root of the singular values.
    """
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).float(), (vh[:rank].T * root).float()
