"""Submodel specs: what is written is what is read, and every refusal says what to do."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import SpecError
from toolkit.submodels.spec import Spec, parse_spec

word = st.text("abz019.-", min_size=1, max_size=6)
single = st.builds(Spec, word, st.none() | word, st.dictionaries(word, word, max_size=3))
specs = st.recursive(single, lambda inner: st.builds(replace, single, inner=inner), max_leaves=3)


@given(specs)
def test_text_of_a_spec_reads_back_as_the_same_spec(spec: Spec) -> None:
    assert parse_spec(str(spec)) == spec
    assert parse_spec(f" {spec}\n") == spec


@pytest.mark.parametrize(
    ("text", "family", "size", "options"),
    [
        ("full", "full", None, {}),
        ("low-rank:0.25,keep=3", "low-rank", "0.25", {"keep": "3"}),
        ("slice:blocks.3", "slice", "blocks.3", {}),
        ("cp:2.0,penalty=1,factor-steps=5", "cp", "2.0", {"penalty": "1", "factor-steps": "5"}),
    ],
)
def test_parts_of_a_spec(text: str, family: str, size: str | None, options: dict[str, str]) -> None:
    assert parse_spec(text) == Spec(family, size, options)


@pytest.mark.parametrize("text", ["", ":", ":0.5", "full:", "full,", "full,keep", "full,=1"])
def test_malformed_specs_are_refused_by_name(text: str) -> None:
    with pytest.raises(SpecError, match=re.escape(repr(text))):
        parse_spec(text)


def test_a_family_inside_another() -> None:
    spec = parse_spec("slice:0.42,skip=2+low-rank:0.25,keep=1")
    assert spec == Spec("slice", "0.42", {"skip": "2"}, Spec("low-rank", "0.25", {"keep": "1"}))


@pytest.mark.parametrize("text", ["slice:0.5+", "+low-rank:0.5", "slice:0.5++cp:2"])
def test_a_plus_sign_needs_a_spec_on_both_sides(text: str) -> None:
    with pytest.raises(SpecError, match=r"follows the plus sign|is no submodel spec"):
        parse_spec(text)


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'keep=2' is no option; .* name=value, once"):
        parse_spec("low-rank:0.5,keep=1,keep=2")


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "nan", "inf", "half"])
def test_numbers_outside_their_range_are_refused_with_an_example(size: str) -> None:
    expected = rf"'low-rank:{size}': the rank ratio must be a number above 0 and at most 1, like"
    with pytest.raises(SpecError, match=expected):
        parse_spec(f"low-rank:{size}").number("rank ratio", 0, 1, "low-rank:0.25")


def test_a_missing_number_is_asked_for() -> None:
    with pytest.raises(SpecError, match=r"'cp' needs a compression rate: write it like cp:2\.0"):
        parse_spec("cp").number("compression rate", 0, 9, "cp:2.0")


def test_the_top_of_a_range_belongs_to_it() -> None:
    assert parse_spec("low-rank:1").number("rank ratio", 0, 1, "low-rank:0.25") == 1


@pytest.mark.parametrize("value", ["-1", "x", "nan", "inf"])
def test_options_that_are_no_usable_numbers_are_refused(value: str) -> None:
    with pytest.raises(SpecError, match="keep must be a number of at least 0"):
        parse_spec(f"low-rank:0.5,keep={value}").option("keep", 1)


def test_options_have_defaults_and_whole_numbers_are_whole() -> None:
    spec = parse_spec("low-rank:0.5,keep=2.5,decay=3.0")
    assert spec.option("other", 7) == 7
    assert spec.whole("decay", 1) == 3
    with pytest.raises(SpecError, match="keep must be a whole number"):
        spec.whole("keep", 1)


def test_unknown_options_and_numbers_that_nobody_takes_are_refused() -> None:
    with pytest.raises(SpecError, match="low-rank has no option 'kep'; it knows keep, decay"):
        parse_spec("low-rank:0.5,kep=1").check_options("keep", "decay")
    with pytest.raises(SpecError, match="full has no option 'keep'; it has none"):
        parse_spec("full,keep=1").check_options()
    with pytest.raises(SpecError, match="full takes no number, write 'full'"):
        parse_spec("full:1").check_no_size()
