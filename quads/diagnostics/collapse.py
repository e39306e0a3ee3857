"""Collapse of a training run: the definition, and the detector that applies it step by step. No torch.

    R_t   trailing median of the reward over `window` steps
    P_t   highest trailing median of the reward over 2 x `window` steps so far (none before step 2 x `window`)
    G_t   trailing median of the gap over `window` steps           B = median gap of the first `baseline` steps
    sigma robust standard deviation of the step-to-step noise of the reward: 1.4826 median |r_t - r_(t-1)| / sqrt(2)

    M_t   trailing mean of the reward over 2 x `window` steps       Q_t   highest trailing mean over 3 x `window` steps
    e     standard error of M - Q: sigma sqrt(1 / (2 window) + 1 / (3 window))

    fallen_t   R_t < drop P_t  and  P_t - R_t > noise sigma         grown_t   G_t > growth B
    sunk_t     M_t < drop Q_t  and  Q_t - M_t > 2 noise e  and  R_t < recover P_t
    collapsed    fallen, or sunk, in `patience` steps in a row      gap alarm  grown in `patience` steps in a row
    recovered    after a collapse, R_t >= recover P_t in `patience` steps in a row (a later fall may collapse again)
    diverged     reward or gap is NaN or infinite: at once, for good

Verdict of a run: diverged > collapsed > recovered > gap_growing > healthy; `gap_growing` means that the gap alarm was
on at the last step. The gap alone never makes a collapse: a run may learn well at a large gap.

The peak is read from a longer median than the level, because a maximum over many steps picks up noise: with defaults,
2 of 100 flat runs of 150 steps with noise of a sixth of the reward alarm; with equal windows it was 16.
`fallen` is quick and robust to bad batches, but asks of a short median a fall of 1.5 sigma of a single step, which a
run whose noise is a third of its reward may never show. `sunk` sees a lasting fall in longer means, by their own error.
Lowering `noise` instead would alarm in a third of such runs that are flat (docs/diagnostics.md has the numbers).
Differs from thresholds on single steps (one bad batch is no collapse: medians and patience) and from moving
baselines (they follow a gap that grows slowly and never alarm: B is fixed after `baseline` steps). Reward and gap are
any per-step series; the gap is non-negative, for example gap_mean or k3 in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from quads.config import Collapse

MAD_TO_SIGMA = 1.4826  # of a normal distribution
PEAK_WINDOWS = 2  # the peak's median is over this many windows
MEAN_WINDOWS, MEAN_PEAK_WINDOWS = 2, 3  # the same for the means of `sunk`
MEAN_ERRORS = 2.0  # times `noise`: standard errors by which the means must differ; more than 2, because Q is a maximum
STOPPING = ("collapsed", "diverged")  # alarms that end a run under grpo.stop_on_collapse
MIN_DIFFERENCES = 4  # fewer say nothing about the noise: then sigma is infinite and nothing counts as fallen


@dataclass(frozen=True)
class Alarm:
    """What started at `step`: collapse, recovery, gap or divergence; `since` is the first step of the row."""

    step: int
    since: int
    kind: str
    why: str


@dataclass
class Detector:
    """Feed steps in order with `update`; read `verdict`, `words` and `alarms` at any time."""

    settings: Collapse = field(default_factory=Collapse)
    alarms: list[Alarm] = field(default_factory=list)
    _rewards: list[float] = field(default_factory=list)
    _gaps: list[float] = field(default_factory=list)
    _peak: float = -math.inf
    _mean_peak: float = -math.inf
    _state: str = "healthy"  # healthy, collapsed, recovered, diverged
    _gap_alarm: bool = False
    _rows: dict[str, tuple[int, int]] = field(default_factory=dict)  # condition -> (length, first step)

    def update(self, step: int, reward: float, gap: float) -> Alarm | None:
        """One training step; the alarm it raises (the most serious of several), or None."""
        if self._state == "diverged":
            return None
        if not (math.isfinite(reward) and math.isfinite(gap)):
            return self._raise(step, step, "diverged", f"reward {reward}, gap {gap}")
        s = self.settings
        self._rewards.append(reward)
        self._gaps.append(gap)
        level, grown = self.level(), self.gap_level()
        if len(self._rewards) >= PEAK_WINDOWS * s.window:
            self._peak = max(self._peak, median(self._rewards[-PEAK_WINDOWS * s.window :]))
        raised = self._gap(step, grown)
        sigma = self.sigma()
        fallen = level < s.drop * self._peak and self._peak - level > s.noise * sigma
        long = self._row("fallen", step, fallen) == s.patience
        mean, sunk = self._sunk(level, sigma)
        longer = self._row("sunk", step, sunk) == s.patience
        if (long or longer) and self._state != "collapsed":
            row, value, peak = ("fallen", level, self._peak) if long else ("sunk", mean, self._mean_peak)
            why = f"reward {value:.3f} below {s.drop:g} x {peak:.3f} for {s.patience} steps"
            return self._raise(step, self._rows[row][1], "collapsed", why)
        back = self._state == "collapsed" and level >= s.recover * self._peak
        if self._row("back", step, back) == s.patience:
            why = f"reward {level:.3f} again above {s.recover:g} x {self._peak:.3f} for {s.patience} steps"
            return self._raise(step, self._rows["back"][1], "recovered", why)
        return raised

    def _sunk(self, level: float, sigma: float) -> tuple[float, bool]:
        """M_t (NaN while there are too few steps for a peak Q_t), and whether it lies below Q_t by more than error."""
        s, longest = self.settings, MEAN_PEAK_WINDOWS * self.settings.window
        if len(self._rewards) < longest:
            return math.nan, False
        self._mean_peak = max(self._mean_peak, fmean(self._rewards[-longest:]))
        mean = fmean(self._rewards[-MEAN_WINDOWS * s.window :])
        error = sigma * math.sqrt(1 / (MEAN_WINDOWS * s.window) + 1 / longest)
        low = mean < s.drop * self._mean_peak and self._mean_peak - mean > MEAN_ERRORS * s.noise * error
        # what is back at its peak has no fall left to report, although the longer mean still holds the dip
        return mean, low and level < s.recover * self._peak

    def _gap(self, step: int, level: float) -> Alarm | None:
        s = self.settings
        if len(self._gaps) <= s.baseline:
            return None
        baseline = median(self._gaps[: s.baseline])
        on = self._row("grown", step, level > s.growth * baseline) >= s.patience
        started, self._gap_alarm = on and not self._gap_alarm, on
        if not started:
            return None
        alarm = Alarm(
            step, self._rows["grown"][1], "gap_growing", f"gap {level:.3g} above {s.growth:g} x {baseline:.3g}"
        )
        self.alarms.append(alarm)
        return alarm

    def _row(self, name: str, step: int, condition: bool) -> int:
        length, first = self._rows.get(name, (0, step))
        self._rows[name] = (length + 1, first if length else step) if condition else (0, step)
        return self._rows[name][0]

    def _raise(self, step: int, since: int, kind: str, why: str) -> Alarm:
        self._state = kind
        alarm = Alarm(step, since, kind, why)
        self.alarms.append(alarm)
        return alarm

    def level(self) -> float:
        """R_t of the last step."""
        return median(self._rewards[-self.settings.window :])

    def gap_level(self) -> float:
        """G_t of the last step."""
        return median(self._gaps[-self.settings.window :])

    def sigma(self) -> float:
        """Noise of one step's reward; infinite while there are too few steps to tell."""
        differences = [abs(b - a) for a, b in zip(self._rewards, self._rewards[1:], strict=False)]
        if len(differences) < MIN_DIFFERENCES:
            return math.inf
        return MAD_TO_SIGMA * median(differences) / math.sqrt(2)

    @property
    def verdict(self) -> str:
        """healthy, gap_growing, recovered, collapsed or diverged."""
        if self._state == "healthy" and self._gap_alarm:
            return "gap_growing"
        return self._state

    def first(self, *kinds: str) -> int | None:
        """Step of the first alarm of any of these kinds, or None."""
        return next((a.step for a in self.alarms if a.kind in kinds), None)

    def kind_at(self, step: int) -> str:
        """Kind of the last alarm raised at a step. Raises ValueError when there is none."""
        found = [a.kind for a in self.alarms if a.step == step]
        if not found:
            raise ValueError(f"no alarm at step {step}; alarms at {[a.step for a in self.alarms]}")
        return found[-1]

    @property
    def words(self) -> str:
        """The verdict with its steps, for a table: `collapsed at step 33`, `healthy`."""
        started = [a.step for a in self.alarms if a.kind == self.verdict]
        if self.verdict == "recovered":
            return f"recovered at step {started[-1]} from a collapse at step {self.first('collapsed')}"
        if self.verdict == "gap_growing":
            return f"gap alarm since step {started[-1]}"
        return f"{self.verdict} at step {started[0]}" if started else self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        return {
            "verdict": self.verdict,
            "alarm_step": self.first(*STOPPING),
            "gap_alarm_step": self.first("gap_growing"),
            "steps": len(self._rewards),
            "alarms": [vars(a) for a in self.alarms],
            "settings": self.settings.model_dump(mode="json"),
        }


def judge(history: Iterable[Mapping[str, Any]], settings: Collapse | None = None, *, gap: str = "gap_mean") -> Detector:
    """The detector after every step of a history.jsonl (rows with `step`, `reward` and the key named by `gap`).

    Rows without a reward (step 0 holds only an evaluation) are passed over; a missing or null gap beside a reward
    counts as not finite.
    """
    detector = Detector(settings or Collapse())
    for row in history:
        if row.get("reward") is None:
            continue
        value = row.get(gap)
        detector.update(int(row["step"]), float(row["reward"]), math.nan if value is None else float(value))
    return detector


def judge_series(rewards: Sequence[float], gaps: Sequence[float], settings: Collapse | None = None) -> Detector:
    """The same for two plain series of equal length; steps count from 1."""
    rows = [{"step": i, "reward": r, "gap_mean": g} for i, (r, g) in enumerate(zip(rewards, gaps, strict=True), 1)]
    return judge(rows, settings)
