"""Outer steps from flags: their settings, and whether the groups of a run can train alone."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from paro.arguments.parser import non_default, take
from paro.checkpoint.config import CheckpointConfig
from paro.errors import UserError, contradiction, count_text
from paro.precision import PrecisionConfig
from paro.quantization.formats import FULL_BITS
from paro.spec.outer_steps import OuterConfig
from paro.strategy import Strategy

if TYPE_CHECKING:
    from paro.config.sharding import ShardingConfig


def take_outer(args: Namespace, num_groups: int) -> OuterConfig | None:
    """Build the settings of outer steps between groups, if flags ask for them."""
    if args.paro_outer_steps is None:
        if given := [name for name in non_default(vars(args)) if name.startswith("paro_outer_")]:
            negated = "no-" if given[0] == "paro_outer_nesterov" else ""
            flag = f"--{negated}{given[0].replace('_', '-')}"
            raise UserError(f"{flag} needs --paro-outer-steps")
        return None
    lr, momentum = outer_defaults(num_groups, args.optimizer)
    return take(
        OuterConfig,
        args,
        outer_lr=lr if args.paro_outer_lr is None else args.paro_outer_lr,
        outer_momentum=momentum if args.paro_outer_momentum is None else args.paro_outer_momentum,
    )


def outer_notices(outer: OuterConfig | None, train_iters: int | None) -> tuple[str, ...]:
    """Build a log line for a run that ends before groups train alone."""
    if outer is None or train_iters is None or train_iters > outer.outer_warmup:
        return ()
    return (
        f"--paro-outer-steps {outer.outer_steps} without effect: all ranks train synchronously for "
        f"the {outer.outer_warmup} steps of --paro-outer-warmup; --train-iters is {train_iters}",
    )


def outer_defaults(num_groups: int, optimizer: str) -> tuple[float, float]:
    """Return the outer learning rate and momentum that papers found best for a number of groups.

    AdamW: arXiv 2503.09799, for 335M parameters and more. Muon: arXiv 2505.23725.
    """
    if optimizer == "muon":
        return (0.7, 0.6) if num_groups == 1 else (0.8, 0.9)
    if num_groups == 1:
        return 0.4, 0.9
    return (0.6, 0.9) if num_groups < 8 else (0.8, 0.9)


def check_outer(
    sharding: ShardingConfig,
    strategy: Strategy,
    precision: PrecisionConfig,
    checkpoint: CheckpointConfig,
) -> None:
    """Raise `UserError` if groups cannot train alone under --paro-outer-steps."""
    outer, world = sharding.outer, sharding.world
    if outer is None:
        return
    flag = f"--paro-outer-steps {outer.outer_steps}"
    reason = outer.infeasible_reason(strategy, world_size=world.size, group_size=world.group_size)
    if reason is not None:
        raise UserError(reason)
    if sharding.context.context_parallel_size > world.group_size:
        raise UserError(
            f"{flag}: groups of {count_text(world.group_size, 'rank')} train alone, and "
            f"--context-parallel-size {sharding.context.context_parallel_size} shares a sample "
            "between groups: give at most the ranks of a group"
        )
    if precision.quantizes:
        given = f"--paro-inter-grad-bits {precision.inter_grad_bits}"
        if precision.inter_param_bits != FULL_BITS:
            given = f"--paro-inter-param-bits {precision.inter_param_bits}"
        raise contradiction(
            flag, given, "groups send nothing in a step; --paro-outer-bits is of rounds"
        )
    if sharding.needs_in_memory_checkpoints or checkpoint.non_persistent_ckpt_type is not None:
        raise UserError(
            f"{flag}: local copies of groups that train alone are not made yet: leave "
            "--paro-survive, --paro-elastic and --non-persistent-ckpt-type out"
        )
