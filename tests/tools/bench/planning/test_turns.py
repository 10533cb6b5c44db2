"""Short steps are timed in more turns, and only those of the same turn are compared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.bench.planning import steps
from tools.bench.planning.partial import speeds_over


def test_steps_of_one_micro_batch_take_three_turns_for_each_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_row", lambda _control, one, _timed: {"of": one.num_micro_batches})
    contenders = [
        cast(Any, SimpleNamespace(num_micro_batches=count, take_turn=lambda: None))
        for count in (1, 4)
    ]
    rows = [
        row
        for turn in (1, 2)
        for visit in range(steps.VISITS)
        for row in steps._turn_of_all(cast(Any, None), contenders, turn, visit)
    ]
    turns = {count: [row["turn"] for row in rows if row["of"] == count] for count in (1, 4)}
    assert turns == {1: [1, 2, 3, 4, 5, 6], 4: [1, 2]}


def test_a_turn_that_the_baseline_lacks_does_not_count(tmp_path: Path) -> None:
    rows = [
        {
            "nic": "per-rank",
            "shape": "adapters",
            "setting": f"{name}@native",
            "micro_batches": 4,
            "round": 1,
            "turn": turn,
            "seconds": seconds,
            "cpu_seconds": 1.0,
            "machine_seconds": 8.0,
        }
        for name, turn, seconds in (("GGG", 1, 3.0), ("ING", 1, 2.0), ("ING", 2, 1.0))
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert speeds_over(tmp_path, "adapters", "GGG") == {"GGG": [1.0], "ING": [1.5]}
