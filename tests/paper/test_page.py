"""index.html as a browser sees it: well formed, self-contained, every link lands, every table and figure is named."""

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from made_up_results import made_up_arms, made_up_experiment, write_run
from made_up_studies import decomposition_rows, fig7_rows, k_sweep_rows, write_study

from quads import report
from quads.paper import figures
from quads.paper.markup import inline_svg, link, pill, prose, svg_of, tag
from quads.paper.sources import load_sources

VOID = {"meta", "br", "img", "link", "input", "hr"}
EXTERNAL = ("http:", "https:", "//", "data:", "javascript:")


class Page(HTMLParser):
    """Collects elements; fails on a tag that closes another one."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes), tuple(self.open)))
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes), tuple(self.open)))

    def handle_endtag(self, name):
        assert self.open and self.open.pop() == name, f"</{name}> closes {self.open[-3:]}"

    def handle_data(self, data):
        self.words.append(data)

    def all(self, *names):
        return [(n, a) for n, a, _ in self.elements if n in names]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    experiment, arms = made_up_experiment(), made_up_arms()
    for arm in arms:
        write_run(results, experiment, arm, 0)
    for name, rows in (("k_sweep", k_sweep_rows()), ("fig7", fig7_rows()), ("decomposition", decomposition_rows())):
        write_study(results / "diagnose", name, rows)
    sources = load_sources(results, experiment, arms)
    places = {"diagnose": results / "diagnose", "throughput": results / "throughput"}
    report.build(report.read_inputs(experiment, sources, results, **places), results / "out")
    return Page((results / "out" / "index.html").read_text()), results / "out"


def test_ids_are_unique_and_every_link_lands(page):
    parsed, out = page
    ids = Counter(a["id"] for _, a, _ in parsed.elements if "id" in a)
    assert not [i for i, n in ids.items() if n > 1]
    targets = [a["href"] for n, a in parsed.all("a")]
    assert len(targets) > 60
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in ids, target
        else:
            assert (out / target).exists(), target
    for name in ("use", "path", "g"):
        for _, a in parsed.all(name):
            for value in a.values():
                for used in re.findall(r"(?:url\()?#([\w-]+)\)?", value or ""):
                    if value.startswith(("#", "url(")):
                        assert used in ids, value


def test_nothing_is_requested_from_elsewhere(page):
    parsed, out = page
    assert not parsed.all("script", "link", "iframe", "object", "embed", "form")
    for name, attributes, _ in parsed.elements:
        for key in ("src", "href", "xlink:href", "srcset", "action"):
            value = attributes.get(key) or ""
            # an image inside a figure may be embedded, never fetched
            assert not value.startswith(EXTERNAL) or (name == "image" and value.startswith("data:image/")), value
    style = re.search(r"<style>(.*?)</style>", (out / "index.html").read_text(), flags=re.S)[1]
    assert "url(" not in style and "@import" not in style


def test_tables_figures_and_headings_are_named(page):
    parsed, _ = page
    kinds = Counter(n for n, _, _ in parsed.elements)
    assert kinds["table"] == kinds["caption"] > 5 and kinds["h1"] == 1
    svgs = [a for n, a in parsed.all("svg")]
    ids = {a["id"] for _, a, _ in parsed.elements if "id" in a}
    assert len(svgs) >= 7 and all(a["role"] == "img" and set(a["aria-labelledby"].split()) <= ids for a in svgs)
    assert all(a.get("scope") in ("col", "row") for _, a in parsed.all("th"))
    levels = [int(n[1]) for n, _ in parsed.all("h1", "h2", "h3", "h4")]
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert parsed.all("html")[0][1]["lang"] == "en"
    assert any(a.get("name") == "viewport" for _, a in parsed.all("meta"))


def test_a_number_leads_to_its_configuration_inside_the_page(page):
    """Two clicks: the number's link is the id of a source, and that source holds the resolved configuration."""
    _, out = page
    text = (out / "index.html").read_text()
    key = re.search(r'<td role="cell" data-label="here \[interval\]"><div><a href="#(bf16-seed0-\w+)">', text)[1]
    entry = text[text.index(f'<div id="{key}" class="source">') :]
    entry = entry[: entry.index('class="source"', 40)]
    assert f"<dd>{key}</dd>" in entry and "0" * 40 in entry and "result.json" in entry
    assert "resolved configuration" in entry and "&quot;name&quot;: &quot;bf16&quot;" in entry


def test_text_from_data_is_text(page):
    assert tag("p", "<script>alert(1)</script> & co") == "<p>&lt;script&gt;alert(1)&lt;/script&gt; &amp; co</p>"
    assert tag("a", "x", href='"><b>') == '<a href="&quot;&gt;&lt;b&gt;">x</a>'
    assert prose("`a<b>` c") == "<code>a&lt;b&gt;</code> c"
    assert 'class="pill not-run"' in pill("not run: why <x>") and "&lt;x&gt;" in pill("not run: why <x>")
    for target in (
        "https://example.org",
        "//evil.example/x",
        " //evil.example/x",
        r"/\evil.example",
        r"\\evil.example",
    ):
        with pytest.raises(ValueError, match="must not point to the network"):
            link(target, "x")
    assert 'href="../a/b.json"' in link("../a/b.json", "x") and 'href="/a"' in link("/a", "x")


@pytest.mark.parametrize(("commit", "line"), [("0" * 40, "git checkout 0000"), ("unknown", ""), ("unknown-dirty", "")])
def test_a_commit_that_was_not_recorded_is_not_checked_out(tmp_path, commit, line):
    experiment, arm = made_up_experiment(), made_up_arms()[0]
    path = write_run(tmp_path, experiment, arm, 0)[0] / "result.json"
    path.write_text(path.read_text().replace("0" * 40, commit))
    sources = load_sources(tmp_path, experiment, [arm])
    places = {"diagnose": tmp_path / "diagnose", "throughput": tmp_path / "throughput"}
    report.build(report.read_inputs(experiment, sources, tmp_path, **places), tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    assert (line in text) if line else "git checkout" not in text
    assert ("code state of these runs was not recorded" in text) == (not line)


def test_a_figure_inside_the_page_takes_the_pages_colours():
    figure, axes = figures._axes("t", "y")
    axes.plot([0, 1], [0, 1], color="#000000")
    themed = inline_svg(svg_of(figure), "f", "title", "what it shows")
    assert "#000000" not in themed and "currentColor" in themed and "#ffffff" not in themed
    assert '<title id="f-title">title</title>' in themed and "<metadata>" not in themed
    assert "#ffffff" in inline_svg(svg_of(figure), "f", "title", "what it shows", themed=False)
    with pytest.raises(ValueError, match="figure f: not an SVG"):
        inline_svg("<p>", "f", "t", "d")
