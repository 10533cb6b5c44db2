"""Checks of the bits that cross groups: what has no effect under a strategy, and what would."""

from __future__ import annotations

from paro.errors import UserError
from paro.precision import PrecisionConfig
from paro.quantization.formats import EXACT_BITS
from paro.strategy import Strategy, effective_letters


def inter_bits_notices(
    precision: PrecisionConfig, group_size: int, strategy: Strategy, world_size: int
) -> tuple[str, ...]:
    """Log lines for bits without effect; `UserError` where nothing crosses groups at all."""
    bits = precision.inter_param_bits
    if bits == EXACT_BITS:
        return ()
    flag = f"--paro-inter-param-bits {bits}"
    if group_size == world_size:
        raise UserError(
            f"{flag}: all {world_size} ranks are one group, so nothing crosses groups: leave it "
            "out, or give a smaller --paro-group-size"
        )
    if strategy.params > group_size:
        grads = min(strategy.grads, group_size)
        other = Strategy(name="", params=group_size, grads=grads, optim=strategy.optim)
        letters = effective_letters(other, world_size=world_size, group_size=group_size)
        better = letters or ",".join(map(str, other.degrees))
        return (
            f"{flag}: under {strategy.name} parameters cross groups in every micro-batch, in 16 "
            f"bits; {better} sends them between groups once a step and would gain",
        )
    if strategy.optim <= group_size:
        return (
            f"{flag} has no effect under {strategy.name}: its updated parameters are gathered "
            "inside groups",
        )
    return ()
