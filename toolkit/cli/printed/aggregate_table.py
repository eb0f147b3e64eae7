"""What `edgetailor aggregate` prints: the updates that went into the model."""

from rich.console import Console

from toolkit.aggregation.aggregate_files import Aggregated
from toolkit.terminal_output import table


def show_aggregated(aggregated: Aggregated) -> None:
    """Print the updates that a new global model was made of."""
    console = Console(highlight=False, soft_wrap=True)
    rows = table("submodel", "samples", "steps", "loss")
    for record in aggregated.records:
        rows.add_row(
            record.submodel,
            f"{record.samples:,}",
            f"{record.steps:,}",
            record.losses(3),
        )
    console.print(rows)
    console.print(f"global model: {aggregated.out}", markup=False)
