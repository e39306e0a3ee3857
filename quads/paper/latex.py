"""Paper tables as LaTeX: a document of its own per table, booktabs rules, every character escaped.

    \\documentclass{article} + booktabs, longtable, array, geometry;  one longtable with a repeated head

A table for a paper is what stands between the lines `% table begins` and `% table ends`.
Contract: text that came from data never becomes markup; a character without a known LaTeX form is an error that names
it, instead of a document that fails to compile somewhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from quads.paper.cells import HEADER, MISSING, PaperTable, display_rows
from quads.paper.ledger import Ledger

SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "→": r"$\to$",
    "–": "--",
    "µ": r"\textmu{}",
    "δ": r"$\delta$",
}


def escape(text: str) -> str:
    """`text` as LaTeX that prints it. Raises ValueError naming a character that has no form here."""
    out = []
    for character in text:
        if character in SPECIAL:
            out.append(SPECIAL[character])
        elif character.isascii() and (character.isprintable()):
            out.append(character)
        else:
            raise ValueError(
                f"no LaTeX form for {character!r} (U+{ord(character):04X}); add it to latex.SPECIAL: {text!r}"
            )
    return "".join(out)


def document(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str, items: Sequence[str]) -> str:
    """A whole document: one longtable, a note, and a list (sources). Columns share the line by what they hold."""
    return "\n".join(
        [
            r"\documentclass[9pt]{extarticle}",
            r"\usepackage[T1]{fontenc}",
            r"\usepackage{textcomp}",
            r"\usepackage{array,booktabs,longtable}",
            r"\usepackage[a4paper,landscape,margin=12mm]{geometry}",
            r"\begin{document}",
            "% table begins",
            *_longtable(title, header, rows),
            "% table ends",
            rf"\noindent {escape(note)}",
            *([r"\begin{itemize}", *(rf"\item {escape(i)}" for i in items), r"\end{itemize}"] if items else []),
            r"\end{document}",
            "",
        ]
    )


def cells_document(table: PaperTable, ledger: Ledger) -> str:
    """The document of one paper table, with the list of its sources."""
    rows = [[*said.values(), " ".join(map(ledger.label, k)) or MISSING] for said, k in display_rows(table, ledger)]
    cited = dict.fromkeys(key for cell in table.cells for key in cell.sources)
    items = [f"{ledger.label(e.key)}: {ledger.describe(e)}" for e in map(ledger.get, cited)]
    return document(table.title, [*HEADER, "sources"], rows, table.note, items)


def widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[float]:
    """Share of the line per column: by the root of its longest text, so that long columns wrap and short ones fit."""
    longest = [max(len(h), *(len(row[i]) for row in rows), 4) ** 0.5 for i, h in enumerate(header)]
    return [round(w / sum(longest), 4) for w in longest]


def _longtable(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    shape = "".join(
        rf">{{\raggedright\arraybackslash}}p{{\dimexpr {w:.4f}\linewidth-2\tabcolsep\relax}}"
        for w in widths(header, rows)
    )
    head = " & ".join(escape(h) for h in header) + r" \\"
    lines = [rf"\begin{{longtable}}{{{shape}}}", rf"\caption{{{escape(title)}}}\\"]
    lines += [r"\toprule", head, r"\midrule", r"\endhead", r"\bottomrule", r"\endfoot"]
    # A cell that starts with [ would be read as the optional argument of the row end before it.
    lines += [" & ".join("{}" + escape(w) if w.startswith("[") else escape(w) for w in row) + r" \\" for row in rows]
    return [*lines, r"\end{longtable}"]
