"""MinHash against brute force, n-grams against slices, tokens on the spellings that mirrors differ in."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES

from quads.data import overlap

words = st.lists(st.sampled_from([f"w{i}" for i in range(12)]), min_size=1, max_size=60)


def brute_jaccard(left: list[str], right: list[str]) -> float:
    """Jaccard of the sets of 3-grams as Python sets of tuples: no hash, no numpy."""

    def runs(text: list[str]) -> set[tuple[str, ...]]:
        n = min(overlap.SHINGLE, len(text))
        return {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}

    a, b = runs(left), runs(right)
    return len(a & b) / len(a | b)


def set_of(text: list[str]) -> overlap.Hashes:
    return overlap.shingles(overlap.token_hashes(text))


@given(words, words)
def test_jaccard_is_the_brute_force_one(left: list[str], right: list[str]) -> None:
    assert overlap.jaccard(set_of(left), set_of(right)) == brute_jaccard(left, right)


@given(words, st.integers(1, 13))
def test_equal_grams_are_equal_runs(text: list[str], n: int) -> None:
    hashes = overlap.grams(overlap.token_hashes(text), n)
    runs = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    assert len(hashes) == len(runs)
    assert len(set(hashes.tolist())) == len(set(runs))


def mutated(text: list[str], changes: int, rng: random.Random) -> list[str]:
    out = list(text)
    for place in rng.sample(range(len(out)), min(changes, len(out))):
        out[place] = f"new{rng.randrange(1000)}"
    return out


def pairs(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    """Texts and copies with 0 to 12 changed words: Jaccard over the whole range."""
    rng = random.Random(seed)
    texts = [[f"v{rng.randrange(500)}" for _ in range(rng.randrange(20, 90))] for _ in range(count)]
    return [(text, mutated(text, rng.randrange(13), rng)) for text in texts]


def test_estimate_against_brute_force() -> None:
    """Unbiased, and as precise as a mean of 128 coin flips is."""
    errors = [
        overlap.estimate(overlap.minhash(set_of(a)), overlap.minhash(set_of(b))) - brute_jaccard(a, b)
        for a, b in pairs(400, seed=1)
    ]
    assert abs(float(np.mean(errors))) <= TOLERANCES["decontaminate/minhash_bias"].limit
    assert float(np.sqrt(np.mean(np.square(errors)))) <= TOLERANCES["decontaminate/minhash_rms"].limit


def test_index_finds_what_brute_force_finds() -> None:
    """All pairs of 300 texts and 300 copies: same pairs at 0.7, same scores, nothing else."""
    both = pairs(300, seed=2)
    index = overlap.Index(set_of(text) for text, _ in both)
    expected = {
        (j, i): score
        for j, (_, copy) in enumerate(both)
        for i, (text, _) in enumerate(both)
        if (set(text) & set(copy)) and (score := brute_jaccard(text, copy)) >= 0.7
    }
    found = {(j, i): score for j, (_, copy) in enumerate(both) for i, score in index.similar(set_of(copy), 0.7)}
    assert len(expected) > 60 and found == expected


@settings(max_examples=30)
@given(st.lists(words, min_size=1, max_size=8), words)
def test_similar_is_sound_and_sorted(texts: list[list[str]], query: list[str]) -> None:
    found = overlap.Index(set_of(text) for text in texts).similar(set_of(query), 0.5)
    assert all(score == brute_jaccard(texts[i], query) >= 0.5 for i, score in found)
    assert [s for _, s in found] == sorted((s for _, s in found), reverse=True)


def test_equal_sets_are_always_candidates() -> None:
    text = ["a", "b", "c", "d"]
    assert overlap.Index([set_of(text)]).similar(set_of(text), 1.0) == [(0, 1.0)]


def test_minhash_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty set"):
        overlap.minhash(np.empty(0, dtype=np.uint64))
    assert overlap.Index([np.empty(0, dtype=np.uint64)]).similar(np.empty(0, dtype=np.uint64), 0.0) == []


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Find $\\dfrac{1}{2}$.", "find \\frac{1}{2}"),
        ("Let $\\left( a, b \\right)$ be", "let (a,b) be"),
        ("a circle [asy] draw((0,0)--(1,1)); [/asy] with", "A circle with"),
        ("so $x \\leq 3$", "so x \\le 3"),
        ("the \\textbf{large} set\nof", "the large set of"),
        ("\uff12\uff10\uff12\uff15", "2025"),
    ],
)
def test_spellings_of_mirrors_have_the_same_tokens(left: str, right: str) -> None:
    assert overlap.tokens(left) == overlap.tokens(right) != ()


def test_different_problems_have_different_tokens() -> None:
    assert overlap.tokens("sum to 12") != overlap.tokens("sum to 13")
    assert overlap.tokens("\u6c42x\u7684\u503c") == ("\u6c42", "x", "\u7684", "\u503c")


def test_signatures_do_not_depend_on_the_process() -> None:
    """Python salts hash() per process; nothing here may use it."""
    code = "from quads.data import overlap as o; print(o.minhash(o.shingles(o.token_hashes('a b c d e'.split())))[:3])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(overlap.minhash(set_of("a b c d e".split()))[:3])
