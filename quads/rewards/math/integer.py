r"""Strict integers: the path of AIME answers, without floats and without sympy.

    ^[+-]?[0-9]{1,20}(\.0*)?$     after trimming; compared with int()

ASCII digits only: `str.isdigit` and `\d` accept superscripts, full-width and Arabic digits, and int() the latter two.
Leading zeros count for nothing ("025" = 25). None means "not in this form", which is not yet "wrong":
`\frac{408}{2}` is evaluated exactly elsewhere. No torch, no sympy.
"""

from __future__ import annotations

import re

_INTEGER = re.compile(r"([+-]?[0-9]{1,20})(?:\.0*)?")


def parse_integer(text: str) -> int | None:
    """The integer that `text` spells out, or None where it has another form."""
    match = _INTEGER.fullmatch(text.strip(" \n\t"))
    return int(match.group(1)) if match else None
