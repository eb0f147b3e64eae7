"""The words of the page are in `texts/`, so that every language has all of them."""

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[3] / "toolkit/web/phone"
COMMENTS = re.compile(r"/\*.*?\*/|(?<![:\w])//[^\n]*", re.DOTALL)
LITERAL = re.compile(r"""(["`])((?:\\.|(?!\1)[^\\\n])*)\1""")
SENTENCE = re.compile(r"[a-z,.:] [A-Za-z{$}]+[,.:]? [A-Za-z{$]")
"""Three words or more."""
NOT_SAID = {
    # What goes into a profile, for programs and operators.
    "said by the browser",
    "performance.now, in steps of ${((now - start) * 1000).toFixed(0)} µs",
    "WebAssembly memory, which never shrinks",
    # What the operator reads about a release that a device refused.
    "its predictions are not finite numbers",
    "this device has refused it before",
    "worse on the samples of this device",
    "accuracy ${figure(after)} on ${lost.length} own samples; present model: ${figure(before)}",
    "loss ${figure(after)} on ${lost.length} own samples; present model: ${figure(before)}",
}


@pytest.mark.parametrize("room", ["agent", "page"])
def test_no_sentence_is_outside_of_the_texts(room: str) -> None:
    files = sorted((SOURCES / room).glob("*.ts"))
    assert len(files) > 5
    for path in files:
        code = COMMENTS.sub("", path.read_text())
        literals = {match[2] for match in LITERAL.finditer(code)}
        sentences = {literal for literal in literals if SENTENCE.search(literal)} - NOT_SAID
        assert not sentences, f"{path.name}: {sentences}"
