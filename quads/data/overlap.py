r"""Overlap of texts: tokens, n-grams and MinHash. Numpy only.

    tokens      NFKC, lower case, figures ([asy], tikz) and LaTeX layout commands out; runs of letters and digits, CJK
                by character. Signs go: "x+1" and "x-1" have the same tokens, an error on the side of removing.
    grams       64-bit hashes of n consecutive tokens: sum_j t_{i+j} P^{n-1-j} mod 2^64, t = BLAKE2b of the token
    Jaccard     |A and B| / |A or B| of the sets of 3-grams of two texts (a text of fewer tokens is one gram)
    MinHash     min over the set of 128 independent hashes; P(two minima agree) = Jaccard, standard error <= 0.045
    Index       32 bands of 4 minima: texts at Jaccard 0.7 are candidates with probability 1 - (1 - 0.7^4)^32 = 0.9998.
                Candidates are then compared exactly, so no pair below the threshold is ever reported.

Everything is a pure function of the texts and fixed constants: same result on every machine. Legend: G grams of a text,
P permutations. Differs from a MinHash-only filter: the estimate proposes, the true Jaccard decides. No torch.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

PERMUTATIONS, BANDS = 128, 32
SHINGLE = 3
_FIGURE = re.compile(r"\[asy\].*?\[/asy\]|\\begin\{tikzpicture\}.*?\\end\{tikzpicture\}", re.DOTALL)
_LAYOUT = re.compile(
    r"\\(?:left|right|middle|big+[lrm]?|display(?:style)?|textstyle|limits|quad|qquad|text|textbf|textit|mathrm|mathbf"
    r"|mathit|operatorname|begin|end|item)(?![a-z])"
)
_SAME = ((re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"), (re.compile(r"\\(?:leq|leqslant)(?![a-z])"), r"\\le"),
         (re.compile(r"\\(?:geq|geqslant)(?![a-z])"), r"\\ge"))  # fmt: skip
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)
# splitmix64 of 1..P: fixed, so that signatures of one machine mean the same on another.
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def tokens(text: str) -> tuple[str, ...]:
    """Tokens of a problem text."""
    text = unicodedata.normalize("NFKC", _FIGURE.sub(" ", text)).lower()
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    return tuple(_TOKEN.findall(_LAYOUT.sub(" ", text)))


@lru_cache(maxsize=1 << 20)
def _token_hash(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=8).digest(), "little")


def token_hashes(words: Iterable[str]) -> Hashes:
    """64-bit hashes of tokens, uint64 [T]."""
    return np.fromiter((_token_hash(word) for word in words), dtype=np.uint64)


def grams(hashes_T: Hashes, n: int) -> Hashes:
    """Hashes of all runs of n tokens, uint64 [T-n+1] (empty for fewer than n tokens). Integer overflow is meant."""
    if len(hashes_T) < n:
        return np.empty(0, dtype=np.uint64)
    total = np.zeros(len(hashes_T) - n + 1, dtype=np.uint64)
    for j in range(n):
        total = total * _PRIME + hashes_T[j : len(hashes_T) - n + 1 + j]
    return _mix(total)


def shingles(hashes_T: Hashes) -> Hashes:
    """The set that Jaccard compares: distinct 3-grams, sorted, uint64 [G]; at least one for a text of any token."""
    return np.unique(grams(hashes_T, min(SHINGLE, max(1, len(hashes_T)))))


def jaccard(left_G: Hashes, right_G: Hashes) -> float:
    """True Jaccard of two sorted distinct sets; 0 where both are empty."""
    common = len(np.intersect1d(left_G, right_G, assume_unique=True))
    union = len(left_G) + len(right_G) - common
    return common / union if union else 0.0


def _mix(x: Hashes) -> Hashes:
    """splitmix64's finaliser: a bijection of 64-bit words without structure."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


_SEEDS_P = _mix(np.arange(1, PERMUTATIONS + 1, dtype=np.uint64) * _PRIME)


def minhash(set_G: Hashes) -> Hashes:
    """Signature of a set that is not empty, uint64 [P]. Raises ValueError on an empty one."""
    if not len(set_G):
        raise ValueError("minhash of an empty set: a text without tokens has no signature; leave it out")
    signature_P: Hashes = _mix(set_G[None, :] ^ _SEEDS_P[:, None]).min(axis=1)
    return signature_P


def estimate(left_P: Hashes, right_P: Hashes) -> float:
    """Jaccard as two signatures estimate it."""
    return float(np.mean(left_P == right_P))


class Index:
    """Sets by number; finds those that may be similar to another set, then compares exactly."""

    def __init__(self, sets: Iterable[Hashes]) -> None:
        self._sets = list(sets)
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        for number, set_G in enumerate(self._sets):
            if len(set_G):
                for key in self._keys(set_G):
                    self._bands.setdefault(key, []).append(number)

    @staticmethod
    def _keys(set_G: Hashes) -> list[tuple[int, bytes]]:
        rows = minhash(set_G).reshape(BANDS, PERMUTATIONS // BANDS)
        return [(band, row.tobytes()) for band, row in enumerate(rows)]

    def similar(self, set_G: Hashes, threshold: float) -> list[tuple[int, float]]:
        """(number, true Jaccard >= threshold) of indexed sets, best first, ties by number."""
        if not len(set_G):
            return []
        candidates = {number for key in self._keys(set_G) for number in self._bands.get(key, ())}
        scored = [(number, jaccard(self._sets[number], set_G)) for number in sorted(candidates)]
        return sorted(((n, s) for n, s in scored if s >= threshold), key=lambda pair: (-pair[1], pair[0]))
