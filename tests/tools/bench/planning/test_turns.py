"""Short steps are timed in more turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.bench.planning import steps


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
