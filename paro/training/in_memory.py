"""In-memory checkpoints of a run: written to the node's memory during training, and read again."""

# [Note: snapshots]
# The snapshot of iteration i is written while iteration i + 1 computes. A rank completes the
# snapshot before it joins the all-reduce that decides the update of iteration i + 1. So when any
# rank updates its states for i + 1, every rank has a complete snapshot of i. Each rank keeps two
# snapshots, so at any instant all ranks have one iteration in common.

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paro.arguments.parser import names_in
from paro.checkpoint.background import Background
from paro.checkpoint.chunks import chunked_states, chunks_of
from paro.checkpoint.config import find_saved
from paro.checkpoint.in_memory.folder import SnapshotFolder, check_room, snapshot_folder
from paro.checkpoint.in_memory.recovery import recover
from paro.checkpoint.in_memory.snapshot import NUM_SLOTS, SnapshotWriter
from paro.distributed.control import Control
from paro.errors import StorageError
from paro.files.object_store import path_of
from paro.report.log import Log
from paro.report.memory import available_host_bytes
from paro.text import size_text
from paro.training.groups_alone import record_of_groups, restore_group
from paro.training.resume import Resumed, common_record, state_of
from paro.training.step import Training, TrainState

if TYPE_CHECKING:
    from paro.config.run import RunConfig

# Groups of flags, and flags, that may differ after a restart since they change no model state.
_FREE_GROUPS = ("dry run", "logging", "profiling")
_FREE = ("exit_interval", "exit_duration_in_mins", "exit_signal", "exit_signal_handler")


@dataclass(eq=False)
class InMemoryCheckpointer:
    """The in-memory checkpoints of this rank; every method but `start` and `wait` is collective."""

    config: RunConfig
    folder: SnapshotFolder
    log: Log

    def __post_init__(self) -> None:
        assert self.config.in_memory_interval is not None, "local copies are off"
        self._interval = self.config.in_memory_interval
        self.background = Background()
        self._start: int = self.folder.control.gather(time.time_ns())[0]
        self._met = (-1, self._start)  # when all groups last agreed, see `Snapshot.met`
        self._copy = _Copier(self.folder.control.device)

    def recover(self, training: Training) -> Resumed | None:
        """Load the newest iteration that the nodes hold; return None to load from --load instead.

        Snapshots that are no newer than the checkpoint of --load are not used.
        """
        begin, flags, control = time.monotonic(), self.config.checkpoint, self.folder.control
        saved, is_first = None, control.world.rank == 0
        with control.raise_on_all_ranks():
            if is_first and flags.load and flags.continues and flags.ckpt_step is None:
                saved = find_saved(path_of(flags.load))
        newest = control.gather(-1 if saved is None else saved.manifest.iteration)[0]
        recovery = recover(
            self.folder,
            chunked_states(training.optimizer.flat_shards()),
            identifying_flags(self.config.command_line, training.groups_alone),
            newer_than=newest,
            log=self.log.log0,
            group=training.optimizer.outer.group,
        )
        if recovery is None:
            return None
        self._met = recovery.met
        with training.traffic.paused():
            for line in restore_group(recovery, training):
                self.log.log0(line)
            training.optimizer.loaded(
                num_steps=int(recovery.common["num_optimizer_steps"]),
                num_averaged=int(recovery.common.get("num_averaged", 0)),
            )
        training.exposed_timer.take()  # discard waits during loading: they belong to no step
        recovery = replace(recovery, seconds=time.monotonic() - begin)
        self.log.log0(
            f"  recovered iteration {recovery.iteration} from local copies: "
            f"{size_text(recovery.own_node_bytes)} from the ranks' own nodes, "
            f"{size_text(recovery.other_nodes_bytes)} from other nodes, in {recovery.seconds:.2f} s"
        )
        state = state_of(recovery.common, self.config, self.log, "local copies")
        # Groups that are not as far as another do not evaluate again.
        state.consumed_valid_samples = recovery.furthest["state"]["consumed_valid_samples"]
        return Resumed(state, recovery.common["base"], recovery, recovery.common)

    def begin(self, training: Training, resumed: Resumed) -> None:
        """Prepare the files; raise `UserError` on all ranks unless their nodes have room.

        After a recovery also write the first snapshot, and remove those of earlier starts.
        """
        control, near = self.folder.control, self.folder.folder_ranks
        optimizer, self._training = training.optimizer, training
        states = chunked_states(optimizer.flat_shards(), writers=writers_of(training, near))
        rank = control.world.rank
        self._name = f"rank-{rank:05d}-{self._start:x}"
        self._writer = SnapshotWriter(
            self.folder.path,
            name=self._name,
            rank=rank,
            states=states,
            flags=identifying_flags(self.config.command_line, training.groups_alone),
            constant=states.keys() - chunked_states(optimizer.flat_shards(frozen=False)).keys(),
            group=optimizer.outer.group,
        )
        everywhere = control.gather(NUM_SLOTS * self._writer.num_bytes)
        num_bytes = sum(everywhere[each] for each in near)
        check_room(self.folder, num_bytes, available_host_bytes())
        self._record = partial(common_record, self.config, training, resumed)
        self.log.log0(
            f"> local copies: {every_text(self._interval)}, two generations, "
            f"{size_text(num_bytes)} of memory on this node, in {self.folder.path}"
        )
        if resumed.recovery is not None and resumed.state is not None:
            with control.raise_on_all_ranks(name_rank=True):
                self._begin_copy(resumed.state)
                self.wait()
            self.folder.remove_share(lambda name: f"-{self._start:x}." not in name)

    def start(self, state: TrainState) -> None:
        """Start to copy the states of an iteration if a copy is due.

        None is while the messages of a round travel, which change the states that groups share.
        """
        is_due = state.iteration % self._interval == 0
        if is_due and self._training.optimizer.outer.in_flight is None:
            self._begin_copy(state)

    def _begin_copy(self, state: TrainState) -> None:
        met = self._training.optimizer.outer.config.met(state.iteration)
        if met > self._met[0]:
            self._met = met, self._start
        self._copy.updated()
        record = self._record(state, record_of_groups(self._training, state, of_one=True))
        job = partial(self._writer.write, state.iteration, record, self._copy, self._met)
        self.background.start(job)

    def wait(self) -> None:
        """Wait until the last copy is complete; raise the copy's failure, on this rank alone."""
        failure = self.background.wait()
        if isinstance(failure, OSError):
            raise StorageError(f"local copies in {self.folder.path}: {failure}") from failure
        if failure is not None:
            raise failure

    def forget(self) -> None:
        """Remove this rank's in-memory checkpoints, which hold the diverged state of its group."""
        self.wait()
        for path in self.folder.path.glob(f"{self._name}.*"):
            path.unlink()

    def discard(self) -> None:
        """Remove the in-memory checkpoints, at the run's end or if they hold a diverged state."""
        self.wait()
        self.folder.control.barrier()
        if self.folder.is_first:
            shutil.rmtree(self.folder.path, ignore_errors=True)


def in_memory_bytes(ranks_per_node: int, training: Training) -> int:
    """Count the memory of a node for in-memory checkpoints, if its ranks hold equal shards."""
    near = range(ranks_per_node)
    states = chunked_states(training.optimizer.flat_shards(), writers=writers_of(training, near))
    of_rank = sum(values.nbytes for values in chunks_of(states).values())
    return NUM_SLOTS * len(near) * of_rank


@contextmanager
def in_memory_checkpoints(
    config: RunConfig, control: Control, log: Log
) -> Iterator[InMemoryCheckpointer | None]:
    """Give the in-memory checkpointer to the block, or None if it is off; collective."""
    if config.in_memory_interval is None or config.train.skip_train:
        yield None
        return
    base = config.checkpoint.non_persistent_local_ckpt_dir
    with snapshot_folder(None if base is None else Path(base), control, log.log0) as folder:
        copies = InMemoryCheckpointer(config, folder, log)
        try:
            yield copies
        finally:
            copies.background.wait()  # end the last copy before the folder's lock is released


def every_text(interval: int) -> str:
    """Say how often in-memory checkpoints are made."""
    return "every iteration" if interval == 1 else f"every {interval} iterations"


def identifying_flags(
    command_line: Mapping[str, object], groups_alone: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Select the flags of the command line that identify the run of in-memory checkpoints.

    A flag that says auto counts as auto: the strategy may be chosen only after a first start, and
    recovery does not need the strategy, the groups or the bits under which they were written, but
    for groups that train alone: each needs what itself has written.
    """
    free = names_in(*_FREE_GROUPS).union(_FREE)
    flags = {name: str(value) for name, value in command_line.items() if name not in free}
    return flags if groups_alone is None else flags | {"paro_group_size": str(groups_alone)}


def writers_of(training: Training, near: Iterable[int]) -> list[int]:
    """Return the ranks of a node that share the writing of a state: of one group that is alone."""
    return [rank for rank in near if rank in training.optimizer.outer.ranks]


class _Copier:
    """The copying of shards to the host, on the writer thread; under CUDA on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def updated(self) -> None:
        """Make later copies wait for the update that the training thread has queued."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, target: Tensor, source: Tensor) -> None:
        if self._stream is not None:
            # A new thread's device is GPU 0, where every rank of the node would get a context.
            torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):  # nothing without one
            target.copy_(source, non_blocking=self._stream is not None)
        if self._stream is not None:
            self._stream.synchronize()
