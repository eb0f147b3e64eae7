"""One row for each case of an operator group in `exporters.programs.coverage`: a layer and the
shape of its sample.
"""

from function_rows import FUNCTIONS
from layer_cases import Row
from layer_rows import LAYERS
from product_rows import PRODUCTS

ROWS: dict[str, dict[str, Row]] = {**PRODUCTS, **LAYERS, **FUNCTIONS}
