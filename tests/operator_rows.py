"""One row a case of each operator group in `exporters.coverage`: a layer and its sample's shape."""

from function_rows import FUNCTIONS
from layer_cases import Row
from layer_rows import LAYERS
from product_rows import PRODUCTS

ROWS: dict[str, dict[str, Row]] = {**PRODUCTS, **LAYERS, **FUNCTIONS}
