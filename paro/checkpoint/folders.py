"""Which ranks see one and the same folder: all of a cluster's, or those of a node each."""

from __future__ import annotations

import secrets
from pathlib import Path

from paro.checkpoint.directory import RANK_MARK
from paro.distributed.control import Control


def ranks_by_folder(root: Path, control: Control) -> tuple[tuple[int, ...], ...]:
    """The ranks, grouped by the folder that they find under this path; collective.

    Every rank leaves a mark for a moment and looks for those of the others.
    """
    rank, size = control.world.rank, control.world.size
    if size == 1:
        return ((0,),)
    token = control.gather(secrets.token_hex(8))[0]

    def mark_of(other: int) -> str:
        return f"{RANK_MARK}{other}_{token}"

    mark = root / mark_of(rank)
    try:
        with control.raise_on_all_ranks():
            root.mkdir(parents=True, exist_ok=True)
            mark.touch()
        with control.raise_on_all_ranks():
            names = {path.name for path in root.iterdir()}
        seen = tuple(other for other in range(size) if mark_of(other) in names)
        folders = control.gather(seen)
    finally:
        mark.unlink(missing_ok=True)
    with control.raise_on_all_ranks():
        for other in seen:
            if folders[other] != seen:
                raise ValueError(
                    f"{root}: ranks {rank} and {other} do not see each other's files alike: give "
                    "a folder that all share, or that every node has for itself"
                )
    return tuple(sorted(set(folders)))
