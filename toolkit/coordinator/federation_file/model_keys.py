"""The keys of the federation's file about the model and the inputs that it takes."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StrictInt, model_validator

from device_agent.formats.input_range import InputRange
from device_agent.formats.manifest import Part
from device_agent.formats.packing import packed_size
from exporters.recording.inputs.sample_range import Inputs, parse_inputs, range_between, read_range
from profiles.errors import InputError
from toolkit.coordinator.federation_file.value_types import Positive
from toolkit.toml_files import Table


class ModelKeys(Table):
    """The model, and the samples that it takes.

    - `inputs`: the inputs if the model has several, like "words:20:int64". They give `input_shape`.
    - `input_range`: the smallest and the largest number of a sample. If both are whole numbers, all
      numbers of a sample are whole.
    - `example`: a file with a few real samples, which show the range of each number.
    """

    model: str
    weights: Path | None = None
    input_shape: Annotated[tuple[Positive, ...], Field(min_length=1)]
    inputs: tuple[str, ...] = ()
    input_range: tuple[StrictInt, StrictInt] | tuple[float, float] | None = None
    example: Path | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _inputs_have_a_shape(cls, given: Any) -> Any:
        texts = given.get("inputs") if isinstance(given, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return given
        if "input_shape" in given:
            raise ValueError("`inputs` and `input_shape` both give the shape: remove one of them")
        try:
            return {**given, "input_shape": [packed_size(parse_inputs(texts))]}
        except InputError as error:
            raise ValueError(f"`inputs`: {error}") from None

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.input_range is None:
            return self
        if self.example is not None:
            raise ValueError("`input_range` cannot be combined with `example`: remove one of them")
        try:
            range_between(*self.input_range)
        except InputError as error:
            raise ValueError(f"`input_range`: {error}") from None
        return self

    @property
    def parts(self) -> tuple[Part, ...]:
        """The inputs that are packed into a sample; empty if a sample is one array."""
        return parse_inputs(self.inputs)

    def known_inputs(self) -> Inputs:
        """What the file says about the samples: the range of their numbers, and their inputs.

        Raises DataError if `example` cannot be used.
        """
        known: InputRange = ()
        if self.input_range is not None:
            known = range_between(*self.input_range)
        elif self.example is not None:
            known = read_range(self.example, self.input_shape, self.parts)
        return Inputs(known, self.parts)
