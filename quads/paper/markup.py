"""Pieces of the HTML report: escaping, tables, inline SVG. No scripts, no requests, no templates.

    table   <table> with caption and scopes; on a narrow screen each row becomes a card (column names from data-label)
    figure  matplotlib's SVG inside the page: ids made unique, black replaced by the page's own text colour, so that one
            drawing serves light and dark; title and description for readers who do not see it

Contract: text from data is escaped; `Markup` marks what is HTML already. Roles are written out, because display: block
takes a table's meaning away from assistive technology.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from quads.paper.status import WORDS


class Markup(str):
    """Text that is HTML already."""


def text(value: str) -> Markup:
    """Escaped, unless it is markup."""
    return value if isinstance(value, Markup) else Markup(html.escape(value))


def prose(value: str) -> Markup:
    """Escaped text in which `words between backticks` are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", text(value)))


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Parts (escaped where needed), joined."""
    return Markup(between.join(text(p) for p in parts))


def tag(name: str, *content: str, **attributes: str) -> Markup:
    """<name attributes>content</name>; `class_` is class, `_` in names is `-`."""
    said = "".join(f' {k.rstrip("_").replace("_", "-")}="{html.escape(v)}"' for k, v in attributes.items())
    return Markup(f"<{name}{said}>{join(content)}</{name}>")


def link(target: str, label: str) -> Markup:
    """A link; a target that would leave the page's folder tree through a scheme or another host is refused.

    Browsers read `//host`, and `\\\\host` and `/\\host` too, as a host, and skip white space in front.
    """
    if re.match(r"[a-zA-Z][\w+.-]*:|[/\\]{2}", target.strip()):
        raise ValueError(f"link to {target!r}: the report must not point to the network")
    return tag("a", label, href=target)


def pill(status: str) -> Markup:
    """A status with its colour class and a sign, so that colour is never alone; the reason after the colon stays."""
    word, _, why = status.partition(": ")
    if word not in WORDS:
        return text(status)
    name = f"pill {word.replace(' ', '-')}"
    return join([tag("span", word, class_=name), tag("span", why, class_="why") if why else ""], " ")


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    cards: bool = True,
    hidden_caption: bool = False,
) -> Markup:
    """A table whose first column names the row. `cards`: rows become cards on a narrow screen; otherwise it scrolls.

    `hidden_caption`: a heading says the same just before; the caption stays for those who do not see the page.
    """
    head = tag("tr", *(tag("th", h or "row", scope="col", role="columnheader") for h in header), role="row")
    body = [tag("tr", *_cells(header, row), role="row") for row in rows]
    inner = tag(
        "table",
        tag("caption", tag("span", caption, class_="hidden") if hidden_caption else caption),
        tag("thead", head, role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",
        class_="cards" if cards else "wide",
    )
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cells(header: Sequence[str], row: Sequence[str]) -> list[Markup]:
    first = tag("th", row[0], scope="row", role="rowheader")
    rest = zip(header[1:], row[1:], strict=True)
    return [first, *(_cell(label, value) for label, value in rest)]


def _cell(label: str, value: str) -> Markup:
    empty = {"class_": "none"} if value in ("-", "") else {}
    return tag("td", tag("div", value), role="cell", data_label=label, **empty)


def svg_of(figure: Figure) -> str:
    """A figure as SVG text; the same input gives the same text."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "quads", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def inline_svg(svg: str, name: str, title: str, description: str, *, themed: bool = True) -> Markup:
    """SVG text from matplotlib as an element of the page. `themed` False keeps its own white background."""
    inside = re.search(r"<svg\b([^>]*)>(.*)</svg>", svg, flags=re.S)
    box = re.search(r'viewBox="([^"]+)"', svg)
    if inside is None or box is None:
        raise ValueError(f"figure {name}: not an SVG of matplotlib")
    body = re.sub(r"<metadata>.*?</metadata>", "", inside[2], flags=re.S)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    if themed:
        # patch_1 is the figure's background, the next ones the axes'
        body = re.sub(r'(id="[^"]*patch_\d+">\s*<path [^>]*?fill: )#ffffff', r"\1none", body)
        body = re.sub("#(000000|333333)", "currentColor", body)
    labels = tag("title", title, id=f"{name}-title") + tag("desc", description, id=f"{name}-desc")
    kind = "themed" if themed else "card"
    width = float(box[1].split()[2])
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="{kind}" role="img" '
        f'viewBox="{box[1]}" style="max-width: {width / 12:.1f}rem" aria-labelledby="{name}-title {name}-desc">'
        f"{labels}{body}</svg>"
    )


def figure(svg: Markup, caption: str) -> Markup:
    """A figure with its caption; scrolls on a narrow screen."""
    box = tag("div", svg, class_="scroll", tabindex="0", role="region", aria_label="figure")
    return tag("figure", box, tag("figcaption", caption))


def details(summary: str, *content: str) -> Markup:
    """A part that opens on demand."""
    return tag("details", tag("summary", summary), *content)


STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f3f5f7; --line: #d5dbe1; --dim: #57606a;
  --link: #0b5cad; --good: #0a6b4b; --warn: #8a5300; --bad: #b3261e; --none: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14181c; --soft: #1e242a; --line: #39424b;
  --dim: #a3adb8; --link: #78b7ff; --good: #5fd3a5; --warn: #f2b54a; --bad: #ff8f85; --none: #a3adb8; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
header, main, footer { max-width: 76rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.08rem; margin: 1.8rem 0 .4rem; }
p, li, figcaption, dd { max-width: 46rem; }
a { color: var(--link); text-underline-offset: .15em; }
a:focus-visible, .scroll:focus-visible, summary:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.lead { font-size: 1.1rem; color: var(--dim); margin: 0 0 1rem; }
.note, figcaption, .why { color: var(--dim); font-size: .9rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; padding: 0; margin: 1rem 0 0; }
.counts { display: flex; flex-wrap: wrap; gap: .6rem; list-style: none; padding: 0; margin: 1rem 0; }
.counts b { font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--dim); font-weight: 600; border-bottom: 2px solid var(--line); vertical-align: bottom; }
tbody th { font-weight: 600; }
.wide td, .wide th { white-space: nowrap; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.src { white-space: nowrap; font-size: .82rem; }
.pill { display: inline-block; padding: 0 .5em; border: 1.5px solid currentColor; border-radius: 1em; font-size: .84rem;
  font-weight: 600; white-space: nowrap; color: var(--none); }
.pill::before { content: "\\25CB\\A0"; }
.pill.reproduced { color: var(--good); } .pill.reproduced::before { content: "\\2713\\A0"; }
.pill.partly { color: var(--warn); } .pill.partly::before { content: "\\25D0\\A0"; }
.pill.contradicted { color: var(--bad); } .pill.contradicted::before { content: "\\2717\\A0"; }
.pill.inconclusive { color: var(--warn); } .pill.inconclusive::before { content: "?\\A0"; }
.pill.reference::before, .pill.no-claim::before { content: "\\2013\\A0"; }
figure { margin: 1rem 0 1.6rem; }
svg { display: block; width: 100%; min-width: 30rem; height: auto; }
svg.themed { fill: currentColor; }
svg.card { background: #ffffff; color: #000000; border-radius: 6px; }
pre, code { font: .88em/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: 6px; overflow-x: auto; }
td code, li code, dd code { overflow-wrap: anywhere; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--link); font-size: .92rem; padding: .3rem 0; }
.source { border: 1px solid var(--line); border-radius: 6px; padding: .6rem 1rem; margin: .6rem 0; font-size: .9rem; }
.source:target { border-color: var(--link); box-shadow: 0 0 0 2px var(--link); }
.source h3 { margin: 0; }
.source dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .4rem 0; }
.source dt { color: var(--dim); } .source dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 3rem; padding-bottom: 2rem; color: var(--dim); font-size: .9rem; }
@media (max-width: 46rem) {
  header, main, footer { padding-left: 1rem; padding-right: 1rem; }
  h1 { font-size: 1.5rem; }
  table.cards thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table.cards, table.cards tbody, table.cards tr, table.cards td, table.cards th { display: block; width: auto; }
  table.cards tr { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; margin: .6rem 0; }
  table.cards tbody th { border: 0; padding: 0 0 .2rem; font-size: .98rem; }
  table.cards td { border: 0; padding: .15rem 0; display: grid; grid-template-columns: 6.5rem 1fr; gap: .6rem; }
  table.cards td.none { display: none; }
  table.cards caption { display: block; }
  table.cards td::before { content: attr(data-label); color: var(--dim); }
  .source dl { grid-template-columns: 1fr; } .source dt { margin-top: .3rem; }
}
@media print { .scroll { overflow: visible; } svg { min-width: 0; } }
"""
