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
    notices: list[str] = []
    for flag, bits, states, degree in (
        ("--paro-inter-param-bits", precision.inter_param_bits, "parameters", strategy.params),
        ("--paro-inter-grad-bits", precision.inter_grad_bits, "gradients", strategy.grads),
    ):
        if bits == EXACT_BITS:
            continue
        if group_size == world_size:
            raise UserError(
                f"{flag} {bits}: all {world_size} ranks are one group, so nothing crosses groups: "
                "leave it out, or give a smaller --paro-group-size"
            )
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
    """The strategy with params and grads sharded inside groups at most."""
    params, grads = (min(degree, group_size) for degree in strategy.degrees[:2])
    other = Strategy(name="", params=params, grads=grads, optim=strategy.optim)
    letters = effective_letters(other, world_size=world_size, group_size=group_size)
    return letters or ",".join(map(str, other.degrees))
