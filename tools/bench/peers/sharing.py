"""Contenders whose ranks share samples: NAME+KIND/C, or NAME+KIND/U/R with the sizes of both."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_NAMED = re.compile(r"(.+?)\+(p2p|flat|allgather|a2a|a2a\+p2p)/(\d+)(?:/(\d+))?")


class Sharing(NamedTuple):
    """A contender's name, without how its ranks share samples, and how they do; "": not at all."""

    base: str
    kind: str = ""  # a --cp-comm-type, or flat: p2p along one ring, also across groups
    sizes: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str) -> Sharing:
        if (match := _NAMED.fullmatch(name)) is None:
            return cls(name)
        base, kind, *sizes = match.groups()
        return cls(base, kind, tuple(size for size in sizes if size is not None))

    @property
    def flags(self) -> list[str]:
        """The trainer's flags for it."""
        if not self.kind:
            return []
        flags = ["--context-parallel-size", str(math.prod(map(int, self.sizes)))]
        flags += ["--cp-comm-type", "p2p" if self.kind == "flat" else self.kind]
        if self.kind == "flat":
            flags += ["--paro-context-ring", "flat"]
        if len(self.sizes) > 1:
            flags += ["--hierarchical-context-parallel-sizes", *self.sizes]
        return flags
