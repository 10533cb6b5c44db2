"""Claims --save for a run: one rank per folder holds its lease; all ranks start or none does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paro.checkpoint.folders import ranks_by_folder
from paro.checkpoint.lease import STILL_SECONDS, Contender, Lease
from paro.checkpoint.owner import Owner
from paro.distributed.control import Control
from paro.errors import writing

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Claim:
    """The ranks by the folder that they see, and on the first rank of a folder its lease."""

    folders: tuple[tuple[int, ...], ...]
    lease: Lease | None

    def is_ours(self) -> bool:
        """Whether no other run may own this rank's folder yet, as far as its lease says."""
        return self.lease is None or self.lease.is_ours()

    @classmethod
    def without_lease(cls, root: Path, control: Control) -> Self:
        """For a folder that no other run can know; collective."""
        return cls(ranks_by_folder(root, control), None)


@contextmanager
def claimed(
    root: Path,
    control: Control,
    say: Callable[[str], None],
    *,
    progressed: Callable[[], None] = lambda: None,
) -> Iterator[Claim]:
    """Holds the lease of every folder in the block; collective.

    Raises `UserError` on all ranks if another run holds one of the folders. `say` gets a line
    on every rank where the start has to wait; `progressed` is called in every turn of the wait.
    """
    folders = ranks_by_folder(root, control)
    is_first = any(control.world.rank == ranks[0] for ranks in folders)
    contender = Contender(root, Owner.this_process()) if is_first else None
    lease: Lease | None = None
    said = False
    try:
        # In short turns: a collective must not wait for a minute.
        while True:
            progressed()
            holder = ""
            with control.raise_on_all_ranks(), writing(f"--save {root}"):
                if contender is not None and lease is None:
                    outcome = contender.attempt()
                    if isinstance(outcome, Lease):
                        lease = outcome
                    else:
                        holder = outcome
            holders = [name for name in control.gather(holder) if name]
            if not holders:
                break
            if not said:
                say(
                    f"--save {root} belongs to {holders[0]}: waiting for a heartbeat; after "
                    f"{STILL_SECONDS:.0f} s without one this run takes it over"
                )
                said = True
            time.sleep(_LOOK_SECONDS)
        yield Claim(folders, lease)
    finally:
        if lease is not None:
            lease.release()
