"""Chooses the fastest measured algorithm for every collective and size."""

from __future__ import annotations

from functools import cache, partial

from paro.collectives.choice import AlgorithmChoice
from paro.collectives.schedule import COLLECTIVES, Op
from paro.errors import UserError
from paro.planning.machine.machine import Machine, fastest_algorithm
from paro.topology import Axes


def choice_by(machine: Machine) -> AlgorithmChoice:
    """The choice of the fastest algorithm, by the measurements of a machine.

    Raises `UserError` if these name unknown algorithms, or lack a collective over some axes.
    """
    names = tuple(dict.fromkeys(row.algorithm for row in machine.measured))
    unknown = sorted(set(names) - set(COLLECTIVES))
    if unknown:
        raise UserError(
            f"machine {machine.name} was measured with {', '.join(unknown)}; the algorithms are "
            f"{', '.join(COLLECTIVES)}: measure it again"
        )
    kinds = [Axes.INTRA] * (machine.group_size > 1) + [Axes.INTER] * (machine.num_groups > 1)
    for axes in [*kinds, Axes.BOTH] if len(kinds) == 2 else kinds:
        for op in Op:
            fastest_algorithm(machine, op, axes, 1)
    return AlgorithmChoice(names=names, best=cache(partial(fastest_algorithm, machine)))
