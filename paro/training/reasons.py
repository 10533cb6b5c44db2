"""The reasons of a rank to end a training early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Reasons(NamedTuple):
    """The reasons of a rank to exit early."""

    signalled: bool = False
    late: bool = False  # True: --exit-duration-in-mins has passed
    unsaved: bool = False  # True: an async save failed
    # The step since groups train alone after which all groups stop, said by the first rank of each.
    stop_after: int = 0

    @property
    def any(self) -> bool:
        """True if this rank has a reason of its own."""
        return self.signalled or self.late or self.unsaved

    @classmethod
    def summed(cls, sums: Mapping[str, float]) -> Reasons:
        """Return the reasons that any rank has, from sums over the ranks by field."""
        signalled, late, unsaved = (sums[name] > 0.0 for name in cls._fields[:3])
        return cls(signalled, late, unsaved, int(sums["stop_after"]))

    def joined(self, other: Reasons) -> Reasons:
        """Return the reasons that either has."""
        return Reasons._make(map(max, self, other))
