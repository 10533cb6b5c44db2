"""The memory study: the memory that rotation saves, in the expected order."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paro.errors import UserError
from tools.bench.study_memory import largest, main


def test_the_largest_that_fits_is_found() -> None:
    assert largest(lambda number: number <= 37) == 37
    assert largest(lambda number: False) == 0
    assert largest(lambda number: number <= 4) == 4


def test_rotation_needs_least_and_trains_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["study_memory.py", "--memory-gb", "40", "--json", str(file)])
    main()
    rows = {row["contender"]: row for row in json.loads(file.read_text())}
    peaks = [
        rows[name]["peak"]
        for name in ("III, rotated in place", "III, rotated", "III, gathered", "DDP (NNN)")
    ]
    assert peaks == sorted(peaks)
    sizes = [
        rows[name]["largest_parameters"]
        for name in ("DDP (NNN)", "III, gathered", "III, rotated", "III, rotated in place")
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert capsys.readouterr().out.startswith("6.74B parameters on 8 ranks in one group")


def test_an_unknown_preset_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["study_memory.py", "--llama-preset", "8T"])
    with pytest.raises(UserError, match=r"--llama-preset 8T: qwen3-0\.6B, "):
        main()
