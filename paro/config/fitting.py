"""Batch sizes that would fit the ranks, for a line about those that do not."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from math import gcd

_MOST = 10**6  # samples in a batch, for which others are looked for


def with_values(args: Namespace, values: Mapping[str, object]) -> Namespace:
    """Return the arguments with some values changed."""
    return Namespace(**vars(args) | dict(values))


def better_values(args: Namespace, data_parallel_size: int) -> dict[str, object]:
    """What to give instead of batch sizes that do not divide into micro-batches on all ranks.

    The micro-batch becomes smaller where that is enough; else sizes become larger. Negative
    iterations of evaluation are none, as in Megatron-LM. None: the flag is to be left out.
    """
    found = {**fitting_batches(args, data_parallel_size), "eval_iters": max(args.eval_iters, 0)}
    return {name: value for name, value in found.items() if value != getattr(args, name)}


def fitting_batches(args: Namespace, data_parallel_size: int) -> dict[str, object]:
    """Return the arguments of batch sizes with multiples of what the ranks take at once."""
    micro, whole, steps = (
        args.micro_batch_size,
        args.global_batch_size,
        args.step_batch_size_schedule,
    )
    if micro < 1 or (whole is not None and not 0 < whole < _MOST):
        return {}
    if whole is not None and whole % data_parallel_size == 0:
        micro = gcd(micro, whole // data_parallel_size)
    unit = micro * data_parallel_size
    found: dict[str, object] = {"micro_batch_size": micro}
    if steps is not None:
        found |= {"global_batch_size": None, "step_batch_size_schedule": _steps(steps, unit)}
    elif whole is not None:
        found["global_batch_size"] = whole = _multiple(whole, unit)
        if args.rampup_batch_size is not None:
            start, increment, samples = args.rampup_batch_size
            found["rampup_batch_size"] = [*_ramp(start, increment, whole, unit), samples]
    return found


def _multiple(size: int, unit: int) -> int:
    """Return the size, or the next larger one that is a multiple of the unit."""
    return -(-size // unit) * unit


def _ramp(start: int, increment: int, whole: int, unit: int) -> tuple[int, int]:
    """Return a start and an increment of multiples of the unit that lead to the whole batch."""
    start = min(_multiple(max(start, 1), unit), whole)
    increment = min(_multiple(max(increment, 1), unit), max(whole - start, unit))
    while start < whole and (whole - start) % increment:
        increment += unit
    return start, increment


def _steps(text: str, unit: int) -> str:
    """Return a step schedule with sizes that are multiples of the unit; as it is if it is none."""
    steps = [entry.partition(":") for entry in text.replace(",", " ").split()]
    if not all(size.isdecimal() for *_, size in steps):
        return text
    return " ".join(f"{begin}:{_multiple(int(size), unit)}" for begin, _, size in steps)
