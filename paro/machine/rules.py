"""Rules for the fields of a machine; all broken rules are reported together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from paro.errors import UserError
from paro.topology import MOST_RANKS
from paro.untrusted.schema import Between

# (number of busy thread blocks (CTAs), factor of compute time), in increasing order of numbers.
Slowed = tuple[tuple[Annotated[int, range(2**20)], Annotated[float, Between(1.0, 1e3)]], ...]

_MAX = 1e30  # largest time, size or rate; sums and products stay finite


def refuse(mistakes: Sequence[str]) -> None:
    """Raise `UserError` with all mistakes, if there are any."""
    if mistakes:
        raise UserError(*mistakes)


def rule(field: str, value: object, holds: bool, allowed: str) -> list[str]:
    """Say what is wrong with the value of a field; return nothing if the rule holds."""
    return [] if holds else [f"{field}: {value} is not allowed, it must be {allowed}"]


def numbers(given: Mapping[str, Any], *fields: str, or_zero: bool = False) -> list[str]:
    """Say which numbers among `fields` are not positive (or, with `or_zero`, 0) and finite."""
    least = "a number of 0 or more" if or_zero else "a positive number"
    wrong = []
    for field in fields:
        value = given.get(field)
        if value is not None:
            holds = 0 < value <= _MAX or (or_zero and value == 0)
            wrong += rule(field, value, holds, f"{least} and at most {_MAX:g}")
    return wrong


def ranks_mistakes(given: Mapping[str, Any]) -> list[str]:
    """Say what is wrong with `world_size` and `group_size`, of which one may be missing."""
    ranks, group = given.get("world_size", MOST_RANKS), given.get("group_size", 1)
    wrong = rule("world_size", ranks, 0 < ranks <= MOST_RANKS, f"1 to {MOST_RANKS}")
    divides = group > 0 and (ranks % group == 0 or "world_size" not in given)
    return wrong + rule("group_size", group, divides, f"a divisor of world_size ({ranks})")
