"""The table of the page of faults, from the record of all scenarios; as a program, prints it."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.helpers.ranks import ROOT

RECORD = ROOT / "examples" / "measured" / "faults.json"
_HEAD = """\
| fault | tried | end | seconds to the end | to the next step |
|---|---|---|---|---|"""


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """One row for each kind of fault: median and most, where several were tried."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome["fault"]].append(outcome)
    rows = [_HEAD]
    for fault, tried in groups.items():
        ends = sorted({int(n) for one in tried for n in re.findall(r"-?\d+", one["end"][:14])})
        cells = [
            fault,
            str(len(tried)),
            f"status {', '.join(map(str, ends))}" if ends else "",
            _seconds([one["seconds_to_end"] for one in tried]),
            _seconds([s for one in tried if (s := one["seconds_to_step"]) is not None]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return ""
    median, most = f"{statistics.median(values):.1f}", f"{max(values):.1f}"
    return median if median == most else f"{median}, at most {most}"


if __name__ == "__main__":
    print(table(json.loads(RECORD.read_text(encoding="utf-8"))))
