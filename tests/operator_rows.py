"""All test rows by operator group of `operator_support`, one row for each case."""

import functools

import torch

from function_rows import FUNCTIONS
from layer_cases import Case, Row
from layer_rows import LAYERS
from product_rows import PRODUCTS

ROWS: dict[str, dict[str, Row]] = {**PRODUCTS, **LAYERS, **FUNCTIONS}


@functools.cache
def recorded(group: str, seed: int) -> dict[str, Case]:
    """The cases of `group` with weights drawn by `seed`, recorded once for all runtimes."""
    torch.manual_seed(seed)
    return {name: Case.of(row, record=True) for name, row in ROWS[group].items()}
