"""Hook of the documentation site: formulas between $$ become MathML, which needs no script."""

import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every formula; one on lines of its own is a block."""

    def mathml(found: re.Match[str]) -> str:
        if "\n" in found[1]:
            return convert(found[1].strip(), display="block")
        # Markdown takes a line that begins with an unknown tag for a block of HTML.
        return f"<span>{convert(found[1].strip())}</span>"

    return FORMULA.sub(mathml, markdown)
