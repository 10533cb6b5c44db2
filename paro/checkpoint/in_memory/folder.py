"""The folder of a job's snapshots on a node: private, locked, and emptied after a good end."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from paro.arguments.parser import option_of
from paro.checkpoint.agreement import ranks_by_folder
from paro.checkpoint.in_memory.snapshot import DATA, RECORD, Snapshot
from paro.distributed.control import Control
from paro.distributed.world import read_job_id, read_rendezvous_id
from paro.errors import UserError, writing
from paro.files.waits import claimed
from paro.text import size_text

MEMORY = Path("/dev/shm")
FLAG = "--non-persistent-local-ckpt-dir"

# Seconds after the last write for which a job that did not empty its folder may still recover.
_LEFTOVER_SECONDS = 3600.0
_LOCK_SECONDS = 10.0  # longest wait for the lock: a killed process with much memory ends slowly


@dataclass(frozen=True, slots=True)
class SnapshotFolder:
    """A node's open folder of snapshots, and the ranks of the node."""

    path: Path
    control: Control
    folder_ranks: tuple[int, ...]  # all ranks that see this folder, including this rank

    @property
    def is_first(self) -> bool:
        return self.control.world.rank == self.folder_ranks[0]

    def remove_share(self, unwanted: Callable[[str], bool]) -> None:
        """Remove this rank's share of the snapshots whose file names are `unwanted`.

        All ranks of the node call it, at different times: each rank frees memory before it
        allocates as much.
        """
        index = self.folder_ranks.index(self.control.world.rank)
        for path in sorted(self.path.glob("rank-*")):
            written_by = int(path.name.split("-")[1])
            if unwanted(path.name) and written_by % len(self.folder_ranks) == index:
                path.unlink(missing_ok=True)

    def keep_only(self, snapshots: Sequence[Snapshot]) -> None:
        """Remove all other snapshots of this node, after all ranks have agreed on `snapshots`."""
        stems = {snapshot.path.stem for snapshot in snapshots}
        self.remove_share(lambda name: name.rsplit(".", 1)[0] not in stems)

    def snapshots(self, flags: Mapping[str, str]) -> tuple[list[Snapshot], list[str]]:
        """List the readable snapshots of a run with these flags, and lines about the others."""
        snapshots, notes = [], []
        for path in sorted(self.path.glob(f"*{RECORD}")):  # in one order on all ranks of the node
            try:
                snapshot = Snapshot.read(path)
            except UserError as error:
                notes.append(f"  passing over local copies: {error}")
                continue
            there = snapshot.record.flags
            changed = [name for name in {**flags, **there} if flags.get(name) != there.get(name)]
            if changed:
                flag = option_of(changed[0])
                notes.append(f"local copies in {self.path} are of other flags ({flag}): not used")
            else:
                snapshots.append(snapshot)
        return snapshots, notes


@contextmanager
def snapshot_folder(
    base: Path | None, control: Control, log: Callable[[str], None]
) -> Iterator[SnapshotFolder]:
    """Hold this node's folder of the job under `base`, /dev/shm by default; collective.

    Raises `UserError` on all ranks if another job holds the folder or other users could read it.
    Removes old folders of dead jobs of the same user. After an error the folder is kept: the same
    command, or torchrun, starts again and recovers.
    """
    job = read_rendezvous_id() or read_job_id() or "none"
    words = (str(os.getuid()), job, socket.gethostname())
    path = (base or MEMORY) / "-".join(("paro", *map(_as_file_name, words)))
    blame = f"{FLAG} {path.parent}"
    with control.raise_on_all_ranks(name_rank=True), writing(blame):
        _make_private(path)
    near = ranks_by_folder(path, control, blame)
    (mine,) = (ranks for ranks in near if control.world.rank in ranks)
    folder = SnapshotFolder(path, control, mine)
    with ExitStack() as until_end:
        with control.raise_on_all_ranks(), writing(blame):
            if folder.is_first:
                if not until_end.enter_context(claimed(path, _LOCK_SECONDS)):
                    raise UserError(
                        f"{path} holds the local copies of another run with the same job ID on "
                        f"this node: give torchrun a --rdzv-id of its own, or another {FLAG}"
                    )
                _remove_leftovers(path, log)
        if not _is_in_memory(path):
            log(f"local copies are in {path}, which is no memory: they cost time of a disk")
        yield folder


def check_room(folder: SnapshotFolder, num_bytes: int, available: int | None) -> None:
    """Raise `UserError` on all ranks unless the node has room for `num_bytes` of its ranks.

    `available` are the bytes of memory that processes can still allocate; None: unknown. A tmpfs
    may say that more is free, as it counts its own files only.
    """
    with folder.control.raise_on_all_ranks(), writing(f"{FLAG} {folder.path.parent}"):
        free = shutil.disk_usage(folder.path).free
        if available is not None and _is_in_memory(folder.path):
            free = min(free, available)
        # Snapshots of an earlier start are removed once there is one generation of new ones.
        old = sum(path.stat().st_blocks * 512 for path in folder.path.glob(f"*{DATA}"))
        free = min(free + old, 2 * free)
        if num_bytes > free:
            raise UserError(
                f"two generations of local copies take {size_text(num_bytes)} of a node and "
                f"{folder.path.parent} has {size_text(free)}: mount it larger, give another "
                f"{FLAG}, or spread the optimizer state over more ranks with --paro-strategy"
            )


def _as_file_name(word: str) -> str:
    """Replace characters that file names lack; append a digest to a changed word."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", word)[:64]
    return plain if plain == word else f"{plain}_{sha256(word.encode()).hexdigest()[:8]}"


def _make_private(path: Path) -> None:
    """Make the folder, or check that it is the user's and closed to all others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"{path} is no folder of yours: remove it, or give another {FLAG}")
    if status.st_mode & 0o077:
        raise UserError(f"{path} is open to other users: chmod 700 it, or remove it")


def _remove_leftovers(folder: Path, log: Callable[[str], None]) -> None:
    """Remove folders of this user's jobs on this node that ended long ago; log a line each."""
    for path in folder.parent.glob(f"paro-{os.getuid()}-*-{_as_file_name(socket.gethostname())}"):
        if path == folder:
            continue
        with suppress(OSError), claimed(path) as has_ended:
            written = max(file.stat().st_mtime for file in (path, *path.iterdir()))
            if has_ended and time.time() - written > _LEFTOVER_SECONDS:
                shutil.rmtree(path)
                log(f"removed the local copies in {path}: their job has ended")


def _is_in_memory(path: Path) -> bool:
    """Return whether the folder is in a tmpfs or ramfs."""
    import psutil

    mounts = [m for m in psutil.disk_partitions(all=True) if path.is_relative_to(m.mountpoint)]
    innermost = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return innermost is not None and innermost.fstype in ("tmpfs", "ramfs")
