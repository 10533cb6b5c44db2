"""The configuration that flags give, as the entry script takes it."""

from __future__ import annotations

from collections.abc import Sequence

from paro.arguments.parser import parse_args
from paro.config.run import RunConfig, configure, take_world
from paro.distributed.world import World


def configured(flags: str | Sequence[str], world: World | None = None) -> RunConfig:
    """A run on the ranks of `world`: by default those of its dry run, or one process."""
    args = parse_args(flags.split() if isinstance(flags, str) else flags)
    return configure(args, world or take_world(args))
