"""LaTeX of the tables: escaping, structure, and a real compiler where one is installed."""

import re
import shutil
import subprocess

import pytest
from made_up_studies import fig7_rows, k_sweep_rows, write_study

from quads.paper import latex
from quads.paper.assemble import Report


@pytest.fixture
def documents(made_up, inputs):
    """File name -> LaTeX of every table of a report with studies."""
    write_study(made_up[0] / "diagnose", "k_sweep", k_sweep_rows())
    write_study(made_up[0] / "diagnose", "fig7", fig7_rows())
    texts = Report(inputs()).texts()
    return {name: text for name, text in texts.items() if name.endswith(".tex")}


def test_special_characters_print_as_themselves():
    assert latex.escape(r"50 % of a_b & {c} $1 #2 ~ ^ \x <|>") == (
        r"50 \% of a\_b \& \{c\} \$1 \#2 \textasciitilde{} \textasciicircum{} \textbackslash{}x "
        r"\textless{}\textbar{}\textgreater{}"
    )
    with pytest.raises(ValueError, match=r"no LaTeX form for '☃' \(U\+2603\)"):
        latex.escape("a ☃")


def unescaped(line):
    """`line` without what the escapes and the layout commands of a row use."""
    line = re.sub(r"\\text\w+\{\}|\\[&%$#_{}]|\\\\$", "", line)
    return line.replace("{}", "")


def test_every_table_is_well_formed(documents):
    assert {"tables/claims.tex", "tables/table2.tex", "tables/table3.tex", "tables/curves.tex"} <= set(documents)
    for name, text in documents.items():
        assert re.findall(r"\\(begin|end)\{(\w+)\}", text)[0] == ("begin", "document"), name
        stack = []
        for kind, environment in re.findall(r"\\(begin|end)\{(\w+)\}", text):
            if kind == "begin":
                stack.append(environment)
            else:
                assert stack.pop() == environment, name
        assert not stack and text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
        columns = len(re.findall(r"p\{\\dimexpr", text))
        body = text[text.index(r"\endfoot") : text.index(r"\end{longtable}")].splitlines()[1:]
        for line in body:
            assert line.endswith(r"\\") and not line.startswith("["), (name, line)
            assert len(re.findall(r"(?<!\\)&", line)) == columns - 1, (name, line)
            assert not re.search(r"[%$#_{}\\^~<>|]", unescaped(line).replace("&", "")), (name, line)
        bare = re.sub(r"\\[{}]", "", text)
        assert bare.count("{") == bare.count("}") and bare.isascii(), name


def test_widths_share_the_line():
    rows = [["a", "x" * 100], ["b", "y"]]
    narrow, wide = latex.widths(["h", "i"], rows)
    assert narrow < wide and narrow + wide == pytest.approx(1.0, abs=1e-3)


COMPILER = shutil.which("pdflatex") or shutil.which("tectonic")


@pytest.mark.skipif(COMPILER is None, reason="needs pdflatex or tectonic on PATH")
def test_every_table_compiles(documents, tmp_path):
    for name, text in documents.items():
        path = tmp_path / name.replace("/", "-")
        path.write_text(text)
        options = ["-interaction=nonstopmode", "-halt-on-error"] if "pdflatex" in COMPILER else []
        done = subprocess.run([COMPILER, *options, path.name], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout[-1500:]}"
