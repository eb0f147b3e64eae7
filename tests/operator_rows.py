"""All test rows by operator group of `operator_support`, one row for each case."""

from function_rows import FUNCTIONS
from layer_cases import Row
from layer_rows import LAYERS
from product_rows import PRODUCTS

ROWS: dict[str, dict[str, Row]] = {**PRODUCTS, **LAYERS, **FUNCTIONS}
