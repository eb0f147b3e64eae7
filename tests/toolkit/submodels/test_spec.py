"""Submodel specs: what is written is what is read, and every refusal says what to do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusals import refused
from toolkit.submodels.spec import Spec, parse_spec
from toolkit.submodels.spec_form import Choice, Number, Option, SpecForm, Text

word = st.text("abz019.-", min_size=1, max_size=6)
single = st.builds(Spec, word, st.none() | word, st.dictionaries(word, word, max_size=3))
specs = st.recursive(single, lambda inner: st.builds(replace, single, inner=inner), max_leaves=3)

RATIO = Number("rank ratio", "low-rank:0.25", 1)
OPTIONS = (Option("keep", whole=True), Option("decay"), Option("steps", lowest=1, whole=True))
LOW_RANK = SpecForm("low-rank", "low-rank:RATIO", "", RATIO, OPTIONS)
FULL = SpecForm("full", "full", "")


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
    with refused("spec.malformed", spec=text):
        parse_spec(text)


@pytest.mark.parametrize(
    ("text", "suggested"),
    [("low-rank:0,5", "low-rank:0.5"), ("slice:0.5+low-rank:0.5,decay=0,5", "decay=0.5")],
)
def test_a_decimal_comma_is_refused_with_the_number_to_write(text: str, suggested: str) -> None:
    with refused("spec.decimal-comma", suggested=suggested):
        parse_spec(text)


def test_spaces_around_the_signs_are_left_out() -> None:
    spec = parse_spec("slice : blocks.6 , skip = 1 + low-rank: 0.5")
    assert spec == Spec("slice", "blocks.6", {"skip": "1"}, Spec("low-rank", "0.5"))
    assert str(spec) == "slice:blocks.6,skip=1+low-rank:0.5"
    for text in (" ", "full + ", " + full", "full: ", "full, "):
        with refused("spec.malformed"):
            parse_spec(text)


def test_a_family_inside_another() -> None:
    spec = parse_spec("slice:0.42,skip=2+low-rank:0.25,keep=1")
    assert spec == Spec("slice", "0.42", {"skip": "2"}, Spec("low-rank", "0.25", {"keep": "1"}))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("slice:0.5+", "slice:0.5+"),
        ("+low-rank:0.5", "+low-rank:0.5"),
        ("slice:0.5++cp:2", "+cp:2"),
    ],
)
def test_a_plus_sign_needs_a_spec_on_both_sides(text: str, named: str) -> None:
    with refused("spec.malformed", spec=named):
        parse_spec(text)


def test_an_option_given_twice_is_refused() -> None:
    with refused("spec.malformed", option="keep=2"):
        parse_spec("low-rank:0.5,keep=1,keep=2")


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "nan", "inf", "half"])
def test_numbers_outside_their_range_are_refused_with_an_example(size: str) -> None:
    with refused("spec.invalid-size", spec=f"low-rank:{size}", size=size) as caught:
        LOW_RANK.check(parse_spec(f"low-rank:{size}"))
    assert "the rank ratio must be a number above 0 and at most 1" in str(caught.value)
    assert "low-rank:0.25" in str(caught.value)


def test_a_missing_size_is_asked_for() -> None:
    with refused("spec.missing-size", spec="cp", family="cp") as caught:
        Number("compression rate", "cp:2.0").read(parse_spec("cp"))
    assert "the compression rate" in str(caught.value)
    assert "cp:2.0" in str(caught.value)
    with refused("spec.missing-size", spec="slice", family="slice") as caught:
        Text("first module to train", "slice:blocks.3").read(parse_spec("slice"))
    assert "the first module to train" in str(caught.value)
    assert "slice:blocks.3" in str(caught.value)


def test_the_top_of_a_range_belongs_to_it() -> None:
    assert LOW_RANK.size_as_number(parse_spec("low-rank:1")) == 1
    assert Number("compression rate", "cp:2.0").read(parse_spec("cp:1e9")) == 1e9


@pytest.mark.parametrize("value", ["-1", "x", "nan", "inf"])
@pytest.mark.parametrize("name", ["keep", "decay"])
def test_options_that_are_no_usable_numbers_are_refused(name: str, value: str) -> None:
    text = f"low-rank:0.5,{name}={value}"
    with refused("spec.invalid-option", "of at least 0", spec=text, option=name, value=value):
        LOW_RANK.check(parse_spec(text))


def test_options_have_defaults_and_whole_numbers_are_whole() -> None:
    spec = parse_spec("low-rank:0.5,keep=2.5,decay=3.0")
    assert LOW_RANK.whole_number(spec, "steps", 7) == 7
    assert LOW_RANK.number(spec, "decay", 1) == 3
    with refused("spec.invalid-option", "whole number", option="keep", value="2.5"):
        LOW_RANK.whole_number(spec, "keep", 1)
    with refused("spec.invalid-option", "of at least 1", option="steps", value="0"):
        LOW_RANK.check(parse_spec("low-rank:0.5,steps=0"))


def test_unknown_options_and_sizes_that_are_not_taken_are_refused() -> None:
    with refused("spec.unknown-option", family="low-rank", option="kep") as caught:
        LOW_RANK.check(parse_spec("low-rank:0.5,kep=1"))
    assert "did you mean 'keep'?" in str(caught.value)
    assert "keep, decay" in str(caught.value)
    with refused("spec.unknown-option", family="full", option="keep"):
        FULL.check(parse_spec("full,keep=1"))
    with refused("spec.unexpected-size", spec="full:1", size="1"):
        FULL.check(parse_spec("full:1"))


def test_an_option_of_words() -> None:
    form = SpecForm("cp", "cp", "", None, (Choice("start", ("kept", "aggregate")),))
    assert form.choice(parse_spec("cp"), "start") == "kept"
    assert form.choice(parse_spec("cp,start=aggregate"), "start") == "aggregate"
    with refused("spec.invalid-option", "one of kept, aggregate", option="start", value="new"):
        form.check(parse_spec("cp,start=new"))
