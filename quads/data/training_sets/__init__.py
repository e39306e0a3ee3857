"""Training sets: pins in sets/*.yaml (same mechanism as benchmarks), and the one rule that is theirs.

LiveCodeBench rule (`livecodebench_reason`). Some code sets ARE LiveCodeBench in part: the lcbv5 config of
DeepCoder-Preview is its release 5. A row of such a set (`is_livecodebench`) may be trained on only with a contest date
before the first date of every window that is reported; a row without a date never. Any other row with a date inside or
after a reported window is dropped too. Text matches (quads.data.decontaminate) come on top.
No torch.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any


def livecodebench_reason(row: dict[str, Any], is_livecodebench: bool, start: datetime | None) -> str | None:
    """ "livecodebench" or "date" where the rule forbids training on a row, else None.

    `start`: first contest date of the earliest reported window, None when no code benchmark is reported.
    """
    date = datetime.fromisoformat(row["date"]).replace(tzinfo=None) if row.get("date") else None
    if date is None:
        return "livecodebench" if is_livecodebench else None
    if start is not None and date >= start:
        return "livecodebench" if is_livecodebench else "date"
    return None
