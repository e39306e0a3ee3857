"""The one place that says when a claim of the paper counts as reproduced. Computed from intervals, never typed in.

    greater   the claim is "a is larger than b"; here = interval of a - b
                  whole interval above 0            reproduced; partly, if the claim names a size and the interval is
                                                    not above it (`at_least`), or not below it (`at_most`)
                  whole interval below 0            contradicted
                  else                              inconclusive
    level     "a is level with b"; `margin` fixed before the runs
                  whole interval within +- margin   reproduced
                  whole interval outside            contradicted
                  holds 0                           inconclusive (too wide to call it level)
                  else                              partly (differs from 0, perhaps by less than the margin)
    zero      "exactly 0"                           reproduced when it is 0, else contradicted
    jointly   several training seeds: the rule is applied to the interval over problems (or steps) AND to the one over
              seeds (Student's t); inconclusive when either is, the same word when both agree, else partly
    several   a claim of several parts: reproduced when all are; contradicted when at least one is and none is
              reproduced; inconclusive when none is reproduced, partly or contradicted; else partly
    not run   no number: the reason says what is missing or what to run

Contract: a verdict speaks of direction (or level) at this experiment's scale, never of the paper's absolute numbers,
which belong to a 25B model. Differs from comparing two numbers: the paper gives no intervals, so ours decide alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from quads.evaluation.stats import Interval

Word = Literal["reproduced", "partly", "contradicted", "inconclusive", "not run", "reference", "no claim"]
WORDS: tuple[Word, ...] = get_args(Word)
# Words that say that something was measured and a claim was there to be judged.
JUDGED: tuple[Word, ...] = ("reproduced", "partly", "contradicted", "inconclusive")


@dataclass(frozen=True)
class Verdict:
    """A word and the reason for it. `str()` is what tables print."""

    word: Word
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


REFERENCE = Verdict("reference")
NO_CLAIM = Verdict("no claim", "the paper gives no number")


def not_run(why: str) -> Verdict:
    """There is no number here; `why` names what is missing or the command that makes it."""
    return Verdict("not run", why)


def greater(here: Interval, *, at_least: float | None = None, at_most: float | None = None, sign: int = 1) -> Verdict:
    """Claimed: the difference is positive (sign 1) or negative (sign -1); sizes are in its unit, without sign."""
    low, high = sorted((sign * here.low, sign * here.high))
    if low > 0:
        if at_most is not None and high >= at_most:
            return Verdict("partly", f"same direction, not shown to stay below {at_most:g}")
        if at_least is not None and low <= at_least:
            return Verdict("partly", f"same direction, not shown to exceed {at_least:g}")
        return Verdict("reproduced", "same direction")
    if high < 0:
        return Verdict("contradicted", "opposite direction")
    return Verdict("inconclusive", "interval holds 0")


def level(here: Interval, margin: float) -> Verdict:
    """Claimed: no difference. Raises ValueError for a margin that is not positive."""
    if margin <= 0:
        raise ValueError(f"level: margin must be positive, got {margin}")
    if -margin < here.low and here.high < margin:
        return Verdict("reproduced", f"within {margin:g}")
    if here.low > margin or here.high < -margin:
        return Verdict("contradicted", f"differs by more than {margin:g}")
    if not here.excludes(0.0):
        return Verdict("inconclusive", f"interval holds 0 and reaches beyond {margin:g}")
    return Verdict("partly", f"differs, not shown to exceed {margin:g}")


def zero(count: int, of: int) -> Verdict:
    """Claimed: `count` of `of` is 0."""
    return Verdict("reproduced" if count == 0 else "contradicted", f"{count:,} of {of:,}")


def jointly(first: Verdict, seeds: Verdict | None, over: str = "problems") -> Verdict:
    """One verdict from the interval over `over` and the one over training seeds; `seeds` None: one seed ran."""
    if seeds is None:
        return first
    named = {over: first, "seeds": seeds}
    open_ = {name: v for name, v in named.items() if v.word == "inconclusive"}
    if len(open_) == 2:
        return Verdict("inconclusive", f"over {over} and over seeds: {first.why}")
    if open_:
        ((name, verdict),) = open_.items()
        return Verdict("inconclusive", verdict.why.replace("interval", f"interval over {name}", 1))
    if first.word == seeds.word:
        return Verdict(first.word, f"{first.why}, over {over} and over seeds")
    if {first.word, seeds.word} == {"reproduced", "contradicted"}:
        return Verdict("inconclusive", f"intervals over {over} and over seeds lie on opposite sides")
    part = next((name, v) for name, v in named.items() if v.word == "partly")
    return Verdict("partly", f"{part[1].why} over {part[0]}")


def several(parts: Sequence[Verdict]) -> Verdict:
    """One verdict for a claim of several parts (see the module docstring). Parts that were not run make it not run."""
    if not parts:
        raise ValueError("several: a claim needs at least one part")
    missing = [p for p in parts if p.word == "not run"]
    if missing:
        return missing[0]
    count = Counter(p.word for p in parts)
    said = ", ".join(f"{n} {w}" for w in WORDS if (n := count[w]))
    why = f"{len(parts)} parts: {said}"
    if count["reproduced"] == len(parts):
        return Verdict("reproduced", f"all {len(parts)} parts" if len(parts) > 1 else parts[0].why)
    if count["contradicted"] and not count["reproduced"]:
        return Verdict("contradicted", why)
    if not (count["reproduced"] or count["partly"] or count["contradicted"]):
        return Verdict("inconclusive", why)
    return Verdict("partly", why)
