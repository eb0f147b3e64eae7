"""Messages of errors: templates that are filled in from their values."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import InputError, filled


@given(st.text())
def test_a_value_stands_in_the_message_as_it_is(text: str):
    error = InputError("The file {path} holds {text}.", code="x.y", path=Path("a"), text=text)
    assert str(error) == f"The file a holds {text}."
    assert error.template == "The file {path} holds {text}."
    assert error.values == {"path": "a", "text": text}


def test_values_are_written_in_the_form_that_the_template_names():
    error = InputError("{name!r} took {seconds:.1f} s.", code="x.y", name="a", seconds=2.25)
    assert str(error) == "'a' took 2.2 s."


def test_lists_are_written_with_commas_and_tuples_as_shapes():
    error = InputError("{known} {shape} {none}.", code="x.y", known=["a", 1], shape=(3, 4), none=[])
    assert str(error) == "a, 1 (3, 4) ."


def test_braces_that_name_no_value_stay():
    assert filled("Write {x}, {} or {not this}.", {"y": 1}) == "Write {x}, {} or {not this}."


def test_an_error_of_another_program_is_a_value_of_text():
    error = InputError("{path}: {reason}.", code="x.y", path=Path("a"), reason=ValueError("cut"))
    assert (str(error), error.values) == ("a: cut.", {"path": "a", "reason": "cut"})
