"""The contenders by name; those whose ranks share samples are NAME+KIND/C, or NAME+KIND/U/R."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from paro.distributed.control import Control
from paro.errors import UserError, about
from tools.bench.peers import deepspeed_zero, own
from tools.bench.peers.deepspeed_zero import Zero
from tools.bench.peers.fsdp import FSDP2
from tools.bench.peers.replicated import Replicated
from tools.bench.peers.task import Contender, Task
from tools.bench.peers.torch_ring import ROTATIONS

PEERS: dict[str, Callable[[Task, Control], Contender]] = {
    "ddp": partial(Replicated, zero_redundancy=False),
    "zero-redundancy": partial(Replicated, zero_redundancy=True),
    **FSDP2,
    **{name: partial(Zero, mode=mode) for name, mode in deepspeed_zero.MODES.items()},
}
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


def flags_of(name: str) -> list[str]:
    """Return the trainer's flags that a contender's name stands for; else `UserError`."""
    sharing = Sharing.of(name)
    if is_own(name):
        with about(f"--contenders {own.PREFIX}"):
            setting = own.parse_setting(sharing.base.removeprefix(own.PREFIX))
        return [*setting.flags, *sharing.flags]
    if sharing.base not in PEERS:
        raise UserError(
            f"--contenders knows {', '.join(PEERS)} and "
            f"{own.PREFIX}STRATEGY[@COLLECTIVE][+WAY], not {sharing.base!r}"
        )
    by_torch = sharing.base in FSDP2 and sharing.kind in ROTATIONS and len(sharing.sizes) == 1
    if sharing.kind and not by_torch:
        raise UserError(
            f"--contenders {name}: of the peers FSDP2's share samples, by "
            f"{' or '.join(ROTATIONS)}, such as fsdp2+p2p/2"
        )
    return ["--paro-strategy", "NNN", *sharing.flags]


def is_own(name: str) -> bool:
    return name.startswith(own.PREFIX)


def build(task: Task, name: str, control: Control) -> Contender:
    """Build the contender; collective over all ranks."""
    if is_own(name):
        return own.Own(task, control)
    return PEERS[Sharing.of(name).base](task, control)
