"""Forms of a model's tensors that devices can train and send: all of them become float32."""

import torch
from torch import Tensor, nn

from exporters.recording.float_counters import with_float_counters
from exporters.recording.replacements.complex_numbers.complex_parameters import with_real_parameters
from exporters.recording.replacements.function_forms.sparse_matrices import with_sparse_matrices


def in_trainable_form(model: nn.Module) -> nn.Module:
    """Keep complex parameters, sparse matrices and counters of `model` as floats, in place.

    Returns:
        The same model.
    """
    return with_float_counters(with_sparse_matrices(with_real_parameters(model)))


def in_form_of(own: Tensor, given: Tensor) -> Tensor:
    """`given` in the form of `own`: as pairs, as complex numbers, or as a count in float32."""
    if given.is_complex() and own.is_floating_point():
        return torch.view_as_real(given)
    if own.is_complex() and given.is_floating_point() and given.shape == (*own.shape, 2):
        return torch.view_as_complex(given.contiguous())
    if own.dtype == torch.float32 and given.dtype in (torch.int32, torch.int64):
        return given.to(torch.float32)
    return given
