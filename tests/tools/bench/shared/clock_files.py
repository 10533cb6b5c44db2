"""Files as nvidia-smi records clocks, a sample a second."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

FIRST = datetime(2026, 3, 4, 5, 6, 7, 250_000)
BEGIN = FIRST.timestamp()


def write_clocks(path: Path, *samples: str) -> Path:
    """Writes samples such as "1700, 600.0, 60", one a second from `FIRST` on; the last is cut."""
    times = (FIRST + timedelta(seconds=number) for number in range(len(samples)))
    lines = (
        f"{at:%Y/%m/%d %H:%M:%S}.{at.microsecond // 1000:03d}, {sample}"
        for at, sample in zip(times, samples, strict=True)
    )
    path.write_text("\n".join(lines))
    return path
