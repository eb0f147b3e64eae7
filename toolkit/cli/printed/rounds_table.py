"""What `edgetailor rounds` prints."""

from collections.abc import Sequence

from rich.console import Console

from toolkit.coordinator.storage.saved_rounds import SavedRound
from toolkit.terminal_output import table


def show_rounds(rounds: Sequence[SavedRound]) -> None:
    """Print one row for each round."""
    shown = table("round", "accuracy", "loss", "updates", "model", "note")
    shown.columns[-1].justify = "left"
    for one in rounds:
        shown.add_row(
            str(one.round),
            "" if one.accuracy is None else f"{one.accuracy:.2%}",
            f"{one.loss:.4f}",
            str(one.updates),
            "lost" if one.lost else one.model[:12] if one.kept else "not kept",
            ", ".join(_notes(one)),
        )
    with (console := Console(highlight=False)).capture() as drawn:
        console.print(shown)
    # rich pads every column to its width, so lines would end in spaces.
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def _notes(one: SavedRound) -> list[str]:
    notes = ["best"] if one.best else []
    if one.current:
        notes.append("current")
    if one.started_from is not None and one.started_from != one.round - 1:
        notes.append(f"from round {one.started_from}")
    return notes
