r"""One spelling for one answer: unicode, LaTeX markup, spacing, units, percent, thousands.

    normalize(r"\dfrac{2{,}025}{101}\,\text{cm}")  ->  Clean(text=r"\frac{2025}{101}", unit="cm")

Unicode goes through an explicit table (minus signs, root, times, pi, degree, comparison signs, superscripts as
powers). NFKC is not used: it would turn full-width digits into ASCII digits, and a superscript into a plain digit.
What the table does not know stays and makes a mathematical comparison fail.
Thousands: `{,}` before three digits always; groups of three behind thin or plain spaces; plain commas only if the
caller says that the answer is no list and only in text without brackets, so that (3,375) stays a pair.
Every step is a single pass over text that the caller has cut to a bounded length. No torch, no sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from quads.rewards.math import units

_ROW = "\x00"
_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u00ad"), None)
_SPACES = dict.fromkeys(map(ord, "\u00a0\u202f\u2009\u2007\u2008\u200a\u2002\u2003\u3000\t\r\n"), " ")
_SIGNS = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\ufe63\uff0d", "-"),
    "\u00d7": "\\times ", "\u22c5": "\\cdot ", "\u00b7": "\\cdot ", "\u2217": "*",
    "\u00f7": "\\div ", "\u2044": "/", "\u2215": "/",
    "\u00b1": "\\pm ", "\u2213": "\\mp ", "\u00b0": "^\\circ ", "\u221e": "\\infty ", "\u2205": "\\emptyset ",
    "\u03c0": "\\pi ", "\u03b1": "\\alpha ", "\u03b2": "\\beta ", "\u03b3": "\\gamma ", "\u03b8": "\\theta ",
    "\u03bb": "\\lambda ", "\u03c6": "\\phi ", "\u03c9": "\\omega ",
    "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u2248": "\\approx ", "\u2261": "\\equiv ",
    "\u2208": "\\in ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u211d": "\\mathbb{R}",
    "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}",
    "\u2153": "\\frac{1}{3}", "\u2154": "\\frac{2}{3}",
}  # fmt: skip
_TABLE = str.maketrans({**_SIGNS, **{chr(k): v for k, v in (_ZERO_WIDTH | _SPACES).items()}})
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_ROOT = re.compile("\u221a\\s*(\\{|\\(|[0-9]+|[A-Za-z])?")

_MARKUP: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\[()\[\]]"), " "),
    # The point of `\left.` is an invisible bracket, the point of `\right).` is none.
    (re.compile(r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|rm|bf|it|tt)(?![A-Za-z])"), ""),
    (re.compile(r"\\!|\\hspace\*?\{[^{}]*\}|\\phantom\{[^{}]*\}"), ""),
    (re.compile(r"\\[,;:> ]|\\(?:quad|qquad|thinspace|enspace|space)(?![A-Za-z])|~|&nbsp;"), " "),
    (re.compile(r"\\color\{[^{}]*\}"), ""),
    (re.compile(r"\\textcolor\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:leqslant|leqq|leq)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\(?:geqslant|geqq|geq)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:lbrace|rbrace)(?![A-Za-z])"), lambda m: "\\{" if m.group() == "\\lbrace" else "\\}"),
    (re.compile(r"\\(?:varnothing|O)(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\(?:dots|ldots|cdots)(?![A-Za-z])"), "..."),
    (re.compile(r"\\degree(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}"), r"^\\circ"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<!\\)%"), r"\\%"),
)
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mbox|hbox|mathrm|mathsf|mathit|emph|operatorname)\s*\{([^{}]*)\}"
)
_WRAPPER = re.compile(r"\\(?:mathbf|boldsymbol|bm|underline|pmb|mathbin|mathord|ensuremath|fbox|boxed)\s*\{([^{}]*)\}")
_FUNCTIONS = ("sqrt", "arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "ln", "log", "exp", "gcd", "lcm", "pi")
_PLAIN_WORDS = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)}|infinity|inf)(?![A-Za-z])(\s*\()?")
_FRACTION = re.compile(r"\\frac\s*([0-9]|(?=\{))\s*([0-9]|[a-z]|(?=\{)|)")
_MODULUS = re.compile(
    r"\s*(?:\(\s*mod(?:ulo)?\s[^()]*\)|\\[pb]?mod(?![A-Za-z]).*|\(\s*\\[pb]?mod(?![A-Za-z])[^()]*\)|\bmod(?:ulo)?\s+[0-9]+)\s*$"
)
_UNIT_TEXT = re.compile(r"\\text\{([^{}]*)\}(\^\s*(?:\{\s*)?([23])(?:\s*\})?)?")
_DEGREE = re.compile(r"\^\s*\\circ\s*(?:\\text\{\s*[CFK]\s*\})?$")
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_UNIT_BARE = re.compile(rf"(?<=[0-9}})])\s*({units.BARE})\b\.?(\^\s*(?:\{{\s*)?([23])(?:\s*\}})?)?\s*$", re.IGNORECASE)
_THOUSANDS_TEX = re.compile(r"(?<=[0-9])\s*\{,\}\s*(?=[0-9]{3}(?![0-9]))")
_THOUSANDS_SPACE = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9/])")
_THOUSANDS_COMMA = re.compile(r"(?<![0-9,.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_SCIENTIFIC = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))[eE]([+-]?[0-9]{1,4})")


@dataclass(frozen=True)
class Clean:
    """Normalised text and the known unit that followed it (None: no unit, or one outside the table)."""

    text: str
    unit: str | None = None


def normalize(raw: str, thousands: bool = True) -> Clean:
    """One spelling of an answer. `thousands`: commas may group digits (the answer is a number, not a list)."""
    # A row break of a matrix is one sign while markup is removed: `\\\\ 3` holds no thin space.
    text = _symbols(raw.replace(_ROW, "").replace("\\\\", _ROW))
    text = _markup(text)
    text = _words(text)
    text = _shorthand(text)
    text, unit = _tail(text)
    text = _digits(text, thousands)
    return Clean(strip_braces(text).replace(_ROW, "\\\\"), unit)


def strip_braces(text: str) -> str:
    """Without outer { } pairs that enclose everything, and without outer spaces; linear in the length."""
    text = text.strip()
    match = _matching(text) if text.startswith("{") else {}
    start, end = 0, len(text) - 1
    while start < end and text[start] == "{" and match.get(start) == end:
        start, end = start + 1, end - 1
        while start <= end and text[start].isspace():
            start += 1
        while start <= end and text[end].isspace():
            end -= 1
    return text[start : end + 1]


def _matching(text: str) -> dict[int, int]:
    stack: list[int] = []
    pairs: dict[int, int] = {}
    for token in re.finditer(r"\\.|[{}]", text):
        if token.group() == "{":
            stack.append(token.start())
        elif token.group() == "}" and stack:
            pairs[stack.pop()] = token.start()
    return pairs


def _symbols(text: str) -> str:
    text = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _ROOT.sub(_root, text)
    text = text.translate(_TABLE)
    # \$ and the currency signs name a unit in front of a number; other dollars are markup.
    return re.sub(r"\\\$|[£€]", "", text).replace("$", "")


def _root(match: re.Match[str]) -> str:
    after = match.group(1) or ""
    if after in ("{", "("):
        return "\\sqrt" + after
    return "\\sqrt{" + after + "}" if after else "\\sqrt "


def _markup(text: str) -> str:
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    for _ in range(3):
        text, changes = _WRAPPER.subn(r"{\1}", text)
        if not changes:
            break
    return text


def _words(text: str) -> str:
    r"""\text{...}: separators, percent, plain mathematics, or a word (kept as \text{word})."""

    def replace(match: re.Match[str]) -> str:
        inner = match.group(1).strip()
        if inner.lower() in ("or", "and", ", and", ",and", ", or"):
            return " \\lor " if "or" in inner.lower() else " \\land "
        if inner.lower().strip(".") in ("percent", "per cent"):
            return "\\%"
        if not re.search(r"[A-Za-z]{2}", inner) and re.search(r"[0-9(]", inner):
            return inner
        if re.fullmatch(r"\(?\s*mod(?:ulo)?\s+[0-9]+\s*\)?", inner):
            return " (mod " + re.sub(r"[^0-9]", "", inner) + ")"
        if number := re.fullmatch(r"([-+0-9.,/ ]*[0-9])\s*([A-Za-z]+)", inner):
            return f"{number.group(1)}\\text{{{number.group(2)}}}"
        if inner in _FUNCTIONS:
            return f"\\{inner} "
        if inner.lower() in ("mod", "(mod"):
            return inner + " "
        return "\\text{" + inner + "}"

    text = _TEXT.sub(replace, text)
    text = re.sub(r"(?<=[0-9}])\s*percent\b", r"\\%", text)
    text = re.sub(r"(?<![\\A-Za-z{])(or|and)(?![A-Za-z}])", lambda m: f" \\l{m.group()} ", text)
    return _PLAIN_WORDS.sub(_plain_word, text)


def _plain_word(match: re.Match[str]) -> str:
    word, bracket = match.groups()
    if word in ("infinity", "inf"):
        return "\\infty " + (bracket or "")
    return "\\" + word + (bracket or " ")


def _shorthand(text: str) -> str:
    text = _FRACTION.sub(_fraction, text)
    # \frac{1}2 and \frac{1}x
    text = re.sub(r"\\frac(\{[^{}]*\})\s*([0-9a-z])", r"\\frac\1{\2}", text)
    # TeX reads \sqrt37 as \sqrt{3}7 and 2^10 as 2^{1}0; people mean \sqrt{37} and 2^{10}.
    text = re.sub(r"\\sqrt\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*\(", r"\\sqrt(", text)
    text = re.sub(r"\^\s*(-?[0-9]{2,}|-[0-9])", r"^{\1}", text)
    return _root_brackets(text)


def _root_brackets(text: str) -> str:
    r"""\sqrt(a+b) -> \sqrt{a+b}, with the bracket that closes it."""
    for _ in range(64):
        if (at := text.find("\\sqrt(")) < 0:
            break
        depth, start = 0, at + 5
        for index in range(start, len(text)):
            depth += {"(": 1, ")": -1}.get(text[index], 0)
            if not depth:
                text = text[:start] + "{" + text[start + 1 : index] + "}" + text[index + 1 :]
                break
        else:
            break
    return text


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match.groups()
    return "\\frac" + (f"{{{top}}}" if top else "") + (f"{{{bottom}}}" if bottom else "")


def _tail(text: str) -> tuple[str, str | None]:
    """Drops what may follow an answer: full stops, a modulus, an approximation, units."""
    text = re.sub(r" +", " ", text).strip().rstrip(".,;: " + _ROW) if not text.endswith("...") else text
    text = _MODULUS.sub("", text)
    if "\\approx" in text:
        head, _, rest = text.partition("\\approx")
        text = head.strip() or rest.strip()
    unit: str | None = None
    # Behind a function the degree belongs to its argument: \sin 60^\circ.
    if (match := _DEGREE.search(text)) and not _FUNCTION.search(text):
        text, unit = text[: match.start()], "degree"
    elif match := _UNIT_BARE.search(text):
        text, unit = text[: match.start()], _unit(match.group(1), match.group(3))
    elif found := _text_units(text):
        text, unit = found
    return text.strip().rstrip(".,;: "), unit


def _unit(words: str, exponent: str | None) -> str | None:
    name = units.canonical(words)
    return name and name + (exponent or "")


def _text_units(text: str) -> tuple[str, str | None] | None:
    r"""A tail of \text{unit} pieces joined by / or \cdot, behind something that can carry a unit."""
    pieces: list[str | None] = []
    end = len(text.rstrip())
    groups = list(_UNIT_TEXT.finditer(text))
    while groups and groups[-1].end() == end:
        match = groups.pop()
        if not (units.canonical(match.group(1)) or units.is_noun(match.group(1))):
            return None
        pieces.append(_unit(match.group(1), match.group(3)))
        end = len(re.sub(r"(?:/|\\cdot)\s*$", "", text[: match.start()]).rstrip())
    head = text[:end].rstrip()
    if not pieces or not re.search(r"[0-9A-Za-z)}!%\]]$", head):
        return None
    known = [piece for piece in reversed(pieces) if piece]
    return head, "/".join(known) if len(known) == len(pieces) else None


def _digits(text: str, thousands: bool) -> str:
    text = _THOUSANDS_TEX.sub("", text).replace("{,}", ",")
    text = _THOUSANDS_SPACE.sub(lambda m: m.group().replace(" ", ""), text)
    if thousands and not re.search(r"[()\[\]]|\\[{}]", text):
        text = _THOUSANDS_COMMA.sub(lambda m: m.group().replace(",", ""), text)
    if match := _SCIENTIFIC.fullmatch(text.strip()):
        text = f"{match.group(1)}\\cdot 10^{{{match.group(2)}}}"
    return text
