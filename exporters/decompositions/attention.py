"""Scaled dot product attention, forward and backward, as products and a softmax."""

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
    """O = P V with P = softmax(s Q K^T + mask), s = 1 / sqrt(width) unless `scale` is given.

    `query` is (N, heads, L, width), `key` and `value` (N, heads, S, width), or fewer heads that
    several of `query`'s share. Also returns log sum exp (N, heads, L), which backward needs not.
    """
    scores = masked_scores(query, shared(key, query), is_causal, attn_mask, scale)
    output = weights(scores, attn_mask) @ shared(value, query)
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

    P is written as in the forward pass, so that the writer's search for common subexpressions
    leaves one of the two. Heads that shared a key or value add their gradients up.
    """
    scores = masked_scores(query, shared(key, query), is_causal, attn_mask, scale)
    share = weights(scores, attn_mask)
    inward = grad @ shared(value, query).transpose(-2, -1)
    d_scores = share * (inward - (grad * out).sum(-1, keepdim=True)) * factor(query, scale)
    d_query = d_scores @ shared(key, query)
    d_key = d_scores.transpose(-2, -1) @ query
    d_value = share.transpose(-2, -1) @ grad
    return d_query, gathered(d_key, key), gathered(d_value, value)


def factor(query: Tensor, scale: float | None) -> float:
    """What scores are multiplied with."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def masked_scores(
    query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """s Q K^T + mask; a causal mask is -inf where a key comes after its query."""
    scores = (query * factor(query, scale)) @ key.transpose(-2, -1)
    if is_causal:
        places = [torch.arange(size) for size in scores.shape[-2:]]
        scores = torch.where(places[0].unsqueeze(1) >= places[1], scores, -math.inf)
    return scores if mask is None else scores + mask


def weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """P = softmax(scores); zeros, as PyTorch has it, for a query whose `mask` bars every key."""
    share = torch.softmax(scores, -1)
    if mask is None:
        return share
    return torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, share)


def shared(part: Tensor, query: Tensor) -> Tensor:
    """Keys or values with a head for each of `query`'s."""
    times = query.shape[1] // part.shape[1]
    if times == 1:
        return part
    batch, heads, length, width = part.shape
    apart = part.unsqueeze(2).expand(batch, heads, times, length, width)
    return apart.reshape(batch, heads * times, length, width)


def gathered(grad: Tensor, part: Tensor) -> Tensor:
    """The gradient of `part` from that of `shared(part)`."""
    times = grad.shape[1] // part.shape[1]
    if times == 1:
        return grad
    batch, heads, length, width = part.shape
    return grad.reshape(batch, heads, times, length, width).sum(2)


FORMS: Decompositions = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
