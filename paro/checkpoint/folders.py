"""Finds which ranks see the same folder: all ranks, or the ranks of each node."""

from __future__ import annotations

import secrets
from pathlib import Path

from paro.checkpoint.directory import RANK_MARK
from paro.distributed.control import Control
from paro.errors import UserError, reading, writing


def ranks_by_folder(
    root: Path, control: Control, *, blame: str = ""
) -> tuple[tuple[int, ...], ...]:
    """The ranks, grouped by the folder that they see under this path; collective.

    Every rank creates a temporary marker file and looks for those of the others. Raises
    `UserError` if two ranks see each other's files differently. `blame` names the folder's flag.
    """
    blame = blame or f"--save {root}"
    rank, size = control.world.rank, control.world.size
    if size == 1:
        return ((0,),)
    # Rank 0's token names the markers, so that leftovers of a killed run are not counted.
    token = control.gather(secrets.token_hex(8))[0]

    def mark_of(other: int) -> str:
        return f"{RANK_MARK}{other}_{token}"

    mark = root / mark_of(rank)
    try:
        with control.raise_on_all_ranks(), writing(blame):
            root.mkdir(parents=True, exist_ok=True)
            mark.touch()
        # All markers exist: the block above ends once all ranks have left it.
        with control.raise_on_all_ranks(), reading(blame):
            names = {path.name for path in root.iterdir()}
        seen = tuple(other for other in range(size) if mark_of(other) in names)
        # Also a barrier: no marker is removed before every rank has listed the folder.
        folders = control.gather(seen)
    finally:
        mark.unlink(missing_ok=True)
    with control.raise_on_all_ranks():
        for other in seen:
            if folders[other] != seen:
                raise UserError(
                    f"{root}: ranks {rank} and {other} do not see each other's files in the same "
                    "way: give a folder that all share, or that every node has for itself"
                )
    return tuple(sorted(set(folders)))
