"""Scaled dot product attention, forward and backward, as matrix products and a softmax."""

import math

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """O = P V with P = softmax(s Q K^T + mask), and s = 1 / sqrt(width) unless `scale` is given.

    `query` is (N, heads, L, width), and `key` and `value` are (N, heads, S, width). `key` and
    `value` may have fewer heads. Then several heads of `query` share a head. The second result, log
    sum exp (N, heads, L), is part of the operator's schema, but this backward pass does not read
    it.
    """
    scores = masked_scores(query, repeat_heads(key, query), is_causal, attn_mask, scale)
    output = weights(scores, attn_mask) @ repeat_heads(value, query)
    return output, torch.logsumexp(scores, -1)


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dV = P^T dO, dS = P * (dP - sum(dO * O)) with dP = dO V^T, dQ = s dS K, dK = s dS^T Q.

    P is computed exactly as in the forward pass. The writer removes repeated computations, so the
    graph computes P only once. If several heads share a key or value, their gradients are added up.
    """
    scores = masked_scores(query, repeat_heads(key, query), is_causal, attn_mask, scale)
    p = weights(scores, attn_mask)
    d_p = grad @ repeat_heads(value, query).transpose(-2, -1)
    d_scores = p * (d_p - (grad * out).sum(-1, keepdim=True)) * score_factor(query, scale)
    d_query = d_scores @ repeat_heads(key, query)
    d_key = d_scores.transpose(-2, -1) @ query
    d_value = p.transpose(-2, -1) @ grad
    return d_query, sum_shared(d_key, key), sum_shared(d_value, value)


def score_factor(query: Tensor, scale: float | None) -> float:
    """The factor s of the scores."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def masked_scores(
    query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """s Q K^T + mask. If `is_causal` is set, keys after their query get -inf."""
    # Scaling the query needs fewer multiplications than scaling the scores of long sequences.
    scores = (query * score_factor(query, scale)) @ key.transpose(-2, -1)
    if is_causal:
        positions = [torch.arange(size) for size in scores.shape[-2:]]
        scores = torch.where(positions[0].unsqueeze(1) >= positions[1], scores, -math.inf)
    return scores if mask is None else scores + mask


def weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """P = softmax(scores). If `mask` excludes every key of a query, P is zero, as in PyTorch."""
    if mask is None:
        return torch.softmax(scores, -1)
    # The softmax of a row of -inf is nan. Its gradient is nan even if the softmax is replaced.
    excluded = (scores == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(torch.where(excluded, 0.0, scores), -1)
    return torch.where(excluded, 0.0, p)


def repeat_heads(part: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of keys or values until there is one for each head of `query`."""
    times = query.shape[1] // part.shape[1]
    if times == 1:
        return part
    batch, heads, length, width = part.shape
    repeated = part.unsqueeze(2).expand(batch, heads, times, length, width)
    return repeated.reshape(batch, heads * times, length, width)


def sum_shared(grad: Tensor, part: Tensor) -> Tensor:
    """Turn the gradient of `repeat_heads(part)` into the gradient of `part`: sum repeated heads."""
    times = grad.shape[1] // part.shape[1]
    if times == 1:
        return grad
    batch, heads, length, width = part.shape
    return grad.reshape(batch, heads, times, length, width).sum(2)


DECOMPOSITIONS: Decompositions = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
