"""Units that may follow an answer, and what is hedging instead of a unit.

`canonical(words)` maps a unit to one name ("centimeters" -> "cm"), so that 25 cm and 25 m differ while 25 cm and 25
agree. Nouns outside the table ("apples", "ways") may follow a number too, in \\text{...} only; they are dropped,
never compared. Differs from a list of words to delete anywhere in the text: only the tail of an answer is looked at.
No torch.
"""

from __future__ import annotations

import re

_GROUPS = (
    "degree degrees deg",
    "dollar dollars usd",
    "cent cents",
    "euro euros eur",
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres",
    "in inch inches",
    "ft foot feet",
    "yd yard yards",
    "mi mile miles",
    "mph",
    "mg milligram milligrams",
    "g gram grams",
    "kg kilogram kilograms",
    "lb lbs pound pounds",
    "oz ounce ounces",
    "ml milliliter milliliters millilitre millilitres",
    "l liter liters litre litres",
    "gal gallon gallons",
    "s sec secs second seconds",
    "min mins minute minutes",
    "h hr hrs hour hours",
    "day days",
    "week weeks",
    "month months",
    "yr year years",
    "rad radian radians",
    "unit units",
    "j joule joules",
    "w watt watts",
    "v volt volts",
    "hz hertz",
    "n newton newtons",
    "k kelvin",
    "c celsius",
)
_CANONICAL = {word: group.split()[0] for group in _GROUPS for word in group.split()}
_HEDGES = frozenset(
    "or and not no nor any other either neither maybe perhaps if unless about approximately around than least most "
    "more less some all none never wrong correct incorrect undefined true false but except times half thirds "
    "quarters".split()
)
_WORDS = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+){0,3}\.?")


def canonical(text: str) -> str | None:
    """The unit's one name, or None if `text` is not in the table. "square inches" is "in2", "meters/s" is "m/s"."""
    if "/" in text:
        names = [canonical(part) for part in text.split("/")]
        return "/".join(name for name in names if name) if all(names) else None
    words = text.lower().strip(" .").split()
    power = ""
    if words and words[0] in ("square", "sq", "cubic"):
        power = "3" if words[0] == "cubic" else "2"
        words = words[1:]
    if len(words) == 1 and words[0] in _CANONICAL:
        return _CANONICAL[words[0]] + power
    return None


def is_noun(text: str) -> bool:
    """Whether `text` can be what was counted ("apples", "square tiles"): up to four words, none of which hedges."""
    text = text.strip()
    # One letter is a symbol: 2\mathrm{e} is no amount of "e".
    return (
        len(text) > 1
        and bool(_WORDS.fullmatch(text))
        and not _HEDGES & set(re.split(r"[ -]", text.lower().rstrip(".")))
    )


# Bare unit words after a number. One letter is a symbol unless it stands in \text{...}; "in" and "min" are none here.
BARE = "|".join(sorted((w for w in _CANONICAL if len(w) > 1 and w not in ("in", "min")), key=len, reverse=True))
