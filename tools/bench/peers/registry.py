"""The contenders by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError
from tools.bench.peers import deepspeed_zero, fsdp, own
from tools.bench.peers.deepspeed_zero import Zero
from tools.bench.peers.fsdp import FullySharded
from tools.bench.peers.replicated import Replicated
from tools.bench.peers.task import Contender, Task

PEERS: dict[str, Callable[[Task, Control], Contender]] = {
    "ddp": partial(Replicated, zero_redundancy=False),
    "zero-redundancy": partial(Replicated, zero_redundancy=True),
    **{name: partial(FullySharded, mode=mode) for name, mode in fsdp.MODES.items()},
    **{name: partial(Zero, mode=mode) for name, mode in deepspeed_zero.MODES.items()},
}


def check_name(task: Task, name: str, world: World) -> None:
    """Raises `UserError` unless a contender of this name could be built for `world`."""
    if name.startswith(own.PREFIX):
        own.own_config(task, name, world)
    elif name not in PEERS:
        raise UserError(
            f"--contenders knows {', '.join(PEERS)} and "
            f"{own.PREFIX}STRATEGY[@COLLECTIVE][+WAY], not {name!r}"
        )


def optimizer_of(task: Task, name: str, world: World) -> str:
    """The contender's optimizer; those of the same one train equally."""
    if name.startswith(own.PREFIX):
        return own.own_config(task, name, world).precision.optimizer
    return "adam"


def reason_to_leave_out(name: str) -> str | None:
    """What this machine lacks for a contender, or None."""
    return deepspeed_zero.lacks_deepspeed() if name in deepspeed_zero.MODES else None


def build(task: Task, name: str, control: Control) -> Contender:
    """Builds the contender; collective over all ranks."""
    if name.startswith(own.PREFIX):
        return own.Own(task, name, control)
    return PEERS[name](task, control)
