"""The precision of a run, and bits that cross groups: which have no effect, and what would."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from paro.arguments.parser import take
from paro.config.sharding import ShardingConfig
from paro.errors import UserError, contradiction, count_text
from paro.precision import PrecisionConfig
from paro.quantization.formats import FULL_BITS
from paro.schedule.loss_scale import LossScaleConfig
from paro.strategy import Strategy, effective_letters

AUTO = "auto"


def take_precision(args: Namespace) -> PrecisionConfig:
    if args.fp16 and args.bf16:
        raise contradiction("--fp16", "--bf16")
    compute = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    return take(PrecisionConfig, args, compute=compute)


def take_loss_scale(args: Namespace) -> LossScaleConfig:
    return take(LossScaleConfig, args, dynamic=args.fp16 and args.loss_scale is None)


def take_inter_bits(
    sharding: ShardingConfig, precision: PrecisionConfig
) -> tuple[ShardingConfig, PrecisionConfig, tuple[str, ...]]:
    """Return whether bits are to be chosen, and those given; on one group 16, and a log line about
    it.

    `UserError` for bits that contradict other flags.
    """
    given, inter_bits, world = _given(precision), sharding.inter_bits, sharding.world
    if inter_bits == AUTO and given:
        raise UserError(f"--paro-inter-bits auto and {given[0]} contradict each other: give one")
    if inter_bits == AUTO and precision.accumulate_allreduce_grads_in_fp32:
        raise contradiction("--accumulate-allreduce-grads-in-fp32", "--paro-inter-bits auto")
    if inter_bits == AUTO:
        given = ("--paro-inter-bits auto",)
    if world.group_size < world.size or not given:
        return sharding, precision, ()
    line = (
        f"{' and '.join(given)} without effect, 16 bits in use: with one group, of "
        f"{count_text(world.size, 'rank')}, nothing crosses groups (--paro-group-size)"
    )
    return replace(sharding, inter_bits=None), precision.with_inter_bits(FULL_BITS), (line,)


def _given(precision: PrecisionConfig) -> tuple[str, ...]:
    """Return the flags that ask for codes, with their values."""
    flags = {
        "--paro-inter-param-bits": precision.inter_param_bits,
        "--paro-inter-grad-bits": precision.inter_grad_bits,
    }
    return tuple(f"{flag} {bits}" for flag, bits in flags.items() if bits != FULL_BITS)


def inter_bits_notices(
    precision: PrecisionConfig, group_size: int, strategy: Strategy, world_size: int
) -> tuple[str, ...]:
    """Log lines for bits without effect under a strategy."""
    notices: list[str] = []
    for flag, bits, states, degree in (
        ("--paro-inter-param-bits", precision.inter_param_bits, "parameters", strategy.params),
        ("--paro-inter-grad-bits", precision.inter_grad_bits, "gradients", strategy.grads),
    ):
        if bits == FULL_BITS:
            continue
        if degree > group_size:
            better = _inside_groups(strategy, group_size, world_size)
            notices.append(
                f"{flag} {bits}: under {strategy.name} {states} cross groups in every micro-batch, "
                f"in 16 bits; {better} sends them between groups once a step and would gain"
            )
        elif states == "parameters" and strategy.optim <= group_size:
            notices.append(
                f"{flag} {bits} has no effect under {strategy.name}: its updated parameters are "
                "gathered inside groups"
            )
    return tuple(notices)


def _inside_groups(strategy: Strategy, group_size: int, world_size: int) -> str:
    """Return the strategy with params and grads sharded inside groups at most."""
    params, grads = (min(degree, group_size) for degree in strategy.degrees[:2])
    other = Strategy(name="", params=params, grads=grads, optim=strategy.optim)
    letters = effective_letters(other, world_size=world_size, group_size=group_size)
    return letters or ",".join(map(str, other.degrees))
