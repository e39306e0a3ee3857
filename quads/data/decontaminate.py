"""Training rows that overlap with test problems: found, removed, listed.

    exact      all tokens equal (see quads.data.overlap.tokens)
    ngram      a run of 13 tokens in common that is no formula; a test problem of 8 to 12 tokens counts as one run
    minhash    Jaccard of 3-gram sets >= 0.7
    date       a programming problem dated inside or after a reported window
    livecodebench   a row of a set that IS LiveCodeBench, dated so, or without a date
  The first that holds is the reason. Formula: a run that stands in 3 or more different test problems, or in more than
  10 different training texts ("where m and n are relatively prime positive integers find m + n", input formats): shared
  boilerplate says nothing about the problem, and counting it would remove rows for their style. Kept rows that only
  formulas matched are counted in the report.
  review     kept: Jaccard in [0.5, 0.7) and the same answer. For people to read (found with probability 0.87 or more).

Every match notes whether the answers are equal (mathematics). Test problems that occur in several sets count once.
Contract: deterministic, order of rows kept, every removed row in the report with reason and test id. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from quads.data import overlap
from quads.data.training_sets import livecodebench_reason

Row = dict[str, Any]
REASONS = ("exact", "ngram", "minhash", "date", "livecodebench")


@dataclass(frozen=True)
class Rules:
    """Thresholds; the defaults are the ones that the documentation explains."""

    ngram: int = 13
    short: int = 8
    jaccard: float = 0.7
    review: float = 0.5
    formula_tests: int = 3
    formula_rows: int = 10


@dataclass(frozen=True)
class Text:
    """One problem as it is compared."""

    id: str
    source: str
    words: tuple[str, ...]
    hashes: overlap.Hashes
    answer: str | None

    @classmethod
    def of(cls, row: Row, source: str) -> Text:
        """From a normalised row of either kind."""
        words = overlap.tokens(row["problem"] if "problem" in row else row["question"])
        answer = str(row["answer"]).strip() if row.get("answer") is not None else None
        return cls(str(row["id"]), source, words, overlap.token_hashes(words), answer)


@dataclass(frozen=True)
class Match:
    """Why a training row is removed (or listed for review)."""

    id: str
    reason: str
    test_id: str | None
    test_set: str | None
    detail: str
    answer_equal: bool | None = None

    def to_json(self) -> Row:
        """As it stands in the report."""
        return dict(vars(self))


@dataclass
class Result:
    """Outcome for one training set; `kept` are ids, in the order of the rows."""

    kept: list[str] = field(default_factory=list)
    removed: list[Match] = field(default_factory=list)
    review: list[Match] = field(default_factory=list)
    formula_only: int = 0


class TestProblems:
    """All test problems, distinct texts once, with the indices that the rules need."""

    __test__ = False  # not a pytest class

    def __init__(self, sets: Iterable[tuple[str, Iterable[Row]]], rules: Rules) -> None:
        self.rules = rules
        self.texts: list[Text] = []
        self.count = 0
        self.by_words: dict[tuple[str, ...], Text] = {}
        for name, rows in sets:
            for row in rows:
                text = Text.of(row, name)
                self.count += 1
                if text.words and text.words not in self.by_words:
                    self.by_words[text.words] = text
                    self.texts.append(text)
        self.index = overlap.Index(overlap.shingles(text.hashes) for text in self.texts)
        self._owners: dict[int, dict[int, list[tuple[int, int]]]] = {}
        for number, text in enumerate(self.texts):
            n = min(rules.ngram, len(text.words))
            if n >= rules.short:
                owners = self._owners.setdefault(n, {})
                for place, gram in enumerate(overlap.grams(text.hashes, n).tolist()):
                    owners.setdefault(gram, []).append((number, place))
        self._known = {n: np.array(sorted(owners), dtype=np.uint64) for n, owners in self._owners.items()}

    def shared(self, text: Text) -> set[tuple[str, ...]]:
        """Runs of tokens in common with some test problem, formulas included; compared as words, not as hashes."""
        found = set()
        for n, known in self._known.items():
            hashes = overlap.grams(text.hashes, n)
            # searchsorted, not np.isin: that would sort all grams of all tests again for every row.
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            for place in np.flatnonzero(known[at] == hashes).tolist():
                run = text.words[place : place + n]
                if self.owners(run):
                    found.add(run)
        return found

    def owners(self, run: tuple[str, ...]) -> list[int]:
        """Numbers of the test problems that hold this run, each once."""
        gram = int(overlap.grams(overlap.token_hashes(run), len(run))[0])
        places = self._owners.get(len(run), {}).get(gram, ())
        return sorted({i for i, place in places if self.texts[i].words[place : place + len(run)] == run})


def decontaminate(
    rows: Sequence[Row],
    tests: TestProblems,
    *,
    source: str = "train",
    is_livecodebench: bool = False,
    window_start: datetime | None = None,
) -> Result:
    """Apply all rules to one training set; of its rows only id, text, answer and date are looked at.

    `window_start`: earliest date of a reported code window.
    """
    texts = [Text.of(row, source) for row in rows]
    shared = [tests.shared(text) for text in texts]
    formulas = _formulas(texts, shared, tests)
    result = Result()
    for row, text, runs in zip(rows, texts, shared, strict=True):
        similar = tests.index.similar(overlap.shingles(text.hashes), min(tests.rules.review, tests.rules.jaccard))
        match = _match(text, runs - formulas, similar, tests)
        forbidden = livecodebench_reason(row, is_livecodebench, window_start)
        if match is None and forbidden is not None:
            detail = f"date {row.get('date')}, first reported date {window_start and window_start.date()}"
            match = Match(text.id, forbidden, None, None, detail)
        if match is not None:
            result.removed.append(match)
            continue
        result.kept.append(text.id)
        result.formula_only += bool(runs)
        if (near := _near(text, similar, tests)) is not None:
            result.review.append(near)
    return result


def _formulas(texts: list[Text], shared: list[set[tuple[str, ...]]], tests: TestProblems) -> set[tuple[str, ...]]:
    """Shared runs that too many different problems hold to mean anything."""
    rows: Counter[tuple[str, ...]] = Counter()
    seen: set[tuple[str, ...]] = set()
    for text, runs in zip(texts, shared, strict=True):
        if runs and text.words not in seen:  # a problem that is repeated a hundred times is one text
            seen.add(text.words)
            rows.update(runs)
    rules = tests.rules
    return {r for r, n in rows.items() if n > rules.formula_rows or len(tests.owners(r)) >= rules.formula_tests}


def _match(
    text: Text, runs: set[tuple[str, ...]], similar: list[tuple[int, float]], tests: TestProblems
) -> Match | None:
    if (same := tests.by_words.get(text.words)) is not None:
        return _found(text, same, "exact", f"{len(text.words)} tokens")
    if runs:
        votes = Counter(number for run in sorted(runs) for number in tests.owners(run))
        number, count = min(votes.items(), key=lambda pair: (-pair[1], pair[0]))
        example = next(run for run in sorted(runs) if number in tests.owners(run))
        return _found(text, tests.texts[number], "ngram", f"{count} shared runs, such as {' '.join(example)!r}")
    if similar and similar[0][1] >= tests.rules.jaccard:
        number, score = similar[0]
        return _found(text, tests.texts[number], "minhash", f"Jaccard {score:.3f}")
    return None


def _near(text: Text, similar: list[tuple[int, float]], tests: TestProblems) -> Match | None:
    for number, score in similar:
        match = _found(text, tests.texts[number], "review", f"Jaccard {score:.3f}")
        if match.answer_equal:
            return match
    return None


def _found(text: Text, test: Text, reason: str, detail: str) -> Match:
    equal = None if text.answer is None or test.answer is None else text.answer == test.answer
    return Match(text.id, reason, test.id, test.source, detail, equal)
