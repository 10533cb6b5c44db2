"""Checkpoint flags that contradict each other."""

from __future__ import annotations

import pytest

from paro.checkpoint.config import CheckpointConfig
from paro.errors import UserError


@pytest.mark.parametrize(
    ("interval", "told"),
    [
        (None, "5 needs --save-interval, of which it is a multiple"),
        (0, "5 needs --save-interval, of which it is a multiple"),
        (3, "5 must be a multiple of --save-interval 3"),
    ],
)
def test_what_is_retained_is_a_multiple_of_what_is_saved(interval: int | None, told: str) -> None:
    with pytest.raises(UserError, match=f"^--save-retain-interval {told}$"):
        CheckpointConfig(save_interval=interval, save_retain_interval=5)
