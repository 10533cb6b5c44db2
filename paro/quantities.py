"""Formats counts, bytes and ranks for messages, and checks batch sizes."""

from __future__ import annotations

from paro.errors import UserError

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def count_text(number: int, what: str) -> str:
    """The number and a noun, in the plural unless the number is 1."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def ranks_text(world_size: int, group_size: int) -> str:
    """The number of ranks and the group size; no groups for a single rank."""
    ranks = count_text(world_size, "rank")
    if world_size == 1:
        return ranks
    return f"{ranks} in {'one group' if group_size == world_size else f'groups of {group_size}'}"


def size_text(num_bytes: int, *, like: int | None = None) -> str:
    """The bytes in a unit in which they are at least 1, or in which `like` is at least 1."""
    least = num_bytes if like is None else like
    for name, size in _UNITS:
        if least >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes} bytes"


def check_multiple(what: str, size: int, micro_batch_size: int, data_parallel_size: int) -> None:
    """`UserError` with the nearest valid sizes unless all ranks get equal whole micro-batches."""
    at_once = micro_batch_size * data_parallel_size
    if size > 0 and size % at_once == 0:
        return
    below = size // at_once * at_once
    raise UserError(
        f"{what} {size} is no multiple of --micro-batch-size {micro_batch_size} times "
        f"{count_text(data_parallel_size, 'data-parallel rank')} (= {at_once}): choose "
        + (f"{below} or {below + at_once}" if below > 0 else f"{at_once}")
    )
