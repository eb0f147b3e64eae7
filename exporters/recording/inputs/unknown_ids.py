"""Errors about samples with ids that the tables of a model do not have."""

from exporters.programs import source_lines
from profiles.errors import DataError, ModelError

WRONG_ID = ("out of range", "out of bounds", "Class values must be")
"""Parts of PyTorch's messages about an id that a table does not have."""


def is_wrong_id(error: Exception) -> bool:
    """Whether PyTorch refuses an index or a class that a table does not have."""
    return isinstance(error, IndexError) or any(text in str(error) for text in WRONG_ID)


def unknown_ids(error: Exception) -> DataError:
    """The error for real samples with an id that the model does not have."""
    return DataError(
        "The samples contain ids that the model does not have: {reason}. Correct the data, or use "
        "a model with more ids.",
        code="data.unknown-ids",
        reason=source_lines.first_line(error),
    )


def wrong_ids(error: Exception, ranged: bool) -> ModelError:
    """The error for random samples with ids that the model does not have."""
    remedy = (
        "The range that you gave for the samples has ids that the model does not have. Correct it"
        if ranged
        else "Say which ids there are"
    )
    return ModelError(
        "The model uses numbers of its samples as ids, but random samples contain ids that the "
        "model does not have{place}. {remedy}: give --input-range LOW:HIGH, or --example FILE with "
        "real samples. In Python use set_input_range; in a federation's file set input_range or "
        "example.",
        code="model.ids-out-of-range",
        place=source_lines.place_of_error(error),
        remedy=remedy,
        reason=source_lines.first_line(error),
    )
