"""Sharding strategies: degrees of each state, parsing, legality, and the communication plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from paro.errors import UserError, count_text
from paro.topology import AxisSpan, divisors

LETTERS = "NIG"  # replicated on every rank, sharded inside a group, sharded over all ranks

# Common names of strategies.
NAMED_STRATEGIES = {
    "ddp": "NNN",
    "zero1": "NNG",
    "zero2": "NGG",
    "zero3": "GGG",
    "mics": "III",
    "hsdp": "III",
}

FLAG = "--paro-strategy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The sharding degree of each state: the number of ranks that hold one full copy together.

    `name` is the canonical spelling: letters (`IIG`) or degrees (`4,8,32`).
    """

    name: str
    params: int
    grads: int
    optim: int

    @property
    def degrees(self) -> tuple[int, int, int]:
        return self.params, self.grads, self.optim


class ActionSpans(NamedTuple):
    """The axes along which ranks communicate in each action, under a strategy."""

    gather: AxisSpan  # of parameters, for computation
    reduce: AxisSpan  # of gradients, in a micro-batch
    grad_shards: AxisSpan  # of gradients once a step, down to optimizer shards
    replicas: AxisSpan  # of optimizer shards, whose gradients are then summed
    param_all_gather: AxisSpan  # of updated parameters


def is_legal(letters: str) -> bool:
    """Say whether optimizer state is at least as sharded as params and grads (PaRO 3.1.1)."""
    params, grads, optim = (LETTERS.index(letter) for letter in letters)
    return optim >= max(params, grads)


def legal_letters() -> tuple[str, ...]:
    """Return the 14 legal letter strategies, ordered from coarse to fine params."""
    return tuple(name for name in map("".join, product(LETTERS, repeat=3)) if is_legal(name))


def check_group_size(world_size: int, group_size: int) -> None:
    """Raise `UserError` unless `group_size` divides `world_size`."""
    if group_size < 1 or world_size % group_size != 0:
        raise UserError(
            f"--paro-group-size {group_size} does not divide the {count_text(world_size, 'rank')}; "
            f"choose one of {_divisors(world_size)}"
        )


def fitting_group_size(group_size: int, world_size: int) -> int:
    """Return the largest group size that divides both sizes; all ranks if one group has them."""
    return world_size if group_size >= world_size else math.gcd(group_size, world_size)


def parse_strategy(text: str, *, world_size: int, group_size: int) -> Strategy:
    """Return the legal strategy of letters, degrees or a common name; else raise `UserError`."""
    check_group_size(world_size, group_size)
    spelled = NAMED_STRATEGIES.get(text.lower(), text)
    degrees = degrees_of(spelled)
    if degrees is not None:
        return _from_degrees(spelled, degrees, world_size, group_size)
    letters = spelled.upper()
    if len(letters) != 3 or any(letter not in LETTERS for letter in letters):
        raise UserError(
            f"{FLAG} {text!r} is unknown: give three of the letters N, I, G (such as IIG), three "
            f"degrees (such as 4,8,32) or one of {', '.join(NAMED_STRATEGIES)}"
        )
    if not is_legal(letters):
        raise _illegal(letters, letters[:2] + max(letters[:2], key=LETTERS.index))
    degree_of = {"N": 1, "I": group_size, "G": world_size}
    params, grads, optim = (degree_of[letter] for letter in letters)
    return Strategy(name=letters, params=params, grads=grads, optim=optim)


def degrees_of(text: str) -> tuple[int, int, int] | None:
    """Return the degrees that a text such as 4,8,32 gives; None for letters and names."""
    if "," not in text:
        return None
    try:
        degrees = [int(part) for part in text.split(",")]
    except ValueError:
        degrees = []
    if len(degrees) != 3 or min(degrees) < 1:
        raise UserError(
            f"{FLAG} {text!r} is unknown: degrees are three positive numbers, params,grads,optim"
        )
    params, grads, optim = degrees
    return params, grads, optim


def _from_degrees(
    text: str, degrees: tuple[int, int, int], world_size: int, group_size: int
) -> Strategy:
    params, grads, optim = degrees
    for state, degree in zip(("params", "grads", "optim"), degrees, strict=True):
        if world_size % degree != 0:
            raise UserError(
                f"{FLAG} {text}: the {state} degree {degree} does not divide the "
                f"{count_text(world_size, 'rank')}; choose one of {_divisors(world_size)}"
            )
    for low, high in pairwise(sorted({*degrees, group_size})):
        if high % low != 0:
            raise UserError(
                f"{FLAG} {text} with --paro-group-size {group_size}: {low} does not divide {high}, "
                "so shards cannot nest; choose degrees that divide one another"
            )
    if optim < max(params, grads):
        raise _illegal(text, f"{params},{grads},{max(params, grads)}")
    return Strategy(name=text.replace(" ", ""), params=params, grads=grads, optim=optim)


def _illegal(text: str, better: str) -> UserError:
    return UserError(
        f"{FLAG} {text} is not legal: optimizer state must be sharded at least as finely as params "
        f"and grads; {better} sends no more and stores less, use it instead"
    )


def effective_letters(strategy: Strategy, *, world_size: int, group_size: int) -> str | None:
    """Return the letters for the strategy's degrees; None if a degree has no letter.

    Equal degrees get one letter: G with a single group, N with groups of one rank.
    """
    names = {group_size: "I"} | {1: "N"} | {world_size: "G"}  # the later one names a shared degree
    letters = [names.get(degree) for degree in strategy.degrees]
    return "".join(letter for letter in letters if letter) if all(letters) else None


def strategy_of(
    params: int, grads: int, optim: int, *, world_size: int, group_size: int
) -> Strategy:
    """Return the strategy of three degrees, named by its letters if each degree has one."""
    strategy = Strategy(name=f"{params},{grads},{optim}", params=params, grads=grads, optim=optim)
    letters = effective_letters(strategy, world_size=world_size, group_size=group_size)
    return replace(strategy, name=letters or strategy.name)


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
