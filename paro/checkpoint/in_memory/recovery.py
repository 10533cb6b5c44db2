"""Recovers the states of all ranks from the in-memory checkpoints of all nodes."""

# Ranks agree on the newest iteration for which the nodes together hold every chunk that any rank
# needs (except `sent` states, which the run that wrote may not have had). A rank copies the chunks
# that its own node holds. Other chunks come point to point from ranks of other nodes, each from the
# holder that sends least. Holders are found by chunk: strategy, number of ranks and nodes may
# differ from the run that wrote. Only snapshots of one start of the run are combined: a node that
# was away may hold the same iteration as other ranks computed it.
#
# Groups that train alone (outer steps) have an iteration each. Those continue that were in the same
# round as the group which is furthest; all other groups begin as it is, with the parameters on
# which groups agreed.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paro.checkpoint.chunks import ChunkedState, begin_without, may_be_missing
from paro.checkpoint.in_memory.folder import SnapshotFolder
from paro.checkpoint.in_memory.snapshot import Snapshot
from paro.errors import RunError, UserError
from paro.files.checksum import crc32
from paro.layout import Chunk, split
from paro.spec.states import ANCHOR, OUTER_MOMENTUM, PARAM, group_of, of_other_group

_IN_FLIGHT = 4  # most messages of a rank at once, each at most one chunk of about 16 MiB
_SUM_BYTES = 8


class StateChunk(NamedTuple):
    """A chunk of a state, which a rank needs and its own node does not hold."""

    state: str
    chunk: Chunk


# A part that a rank can send of a chunk: the rank that wants it, the chunk's index there, the part.
ChunkOffer = tuple[int, int, Chunk]


class SnapshotChunk(NamedTuple):
    """A part of a chunk that a snapshot holds, inside the snapshot's chunk `number`."""

    chunk: Chunk
    snapshot: Snapshot
    number: int

    def values(self) -> Tensor:
        """Return the values of the part, verified."""
        whole = self.snapshot.record.regions[self.number].chunk
        return self.snapshot.values(self.number)[self.chunk.index_in(whole)]


class ChunkTransfer(NamedTuple):
    """A part of a wanted chunk, which has a number on its target, on its way between two ranks."""

    source: int
    target: int
    number: int
    state: str
    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A recovery: the contents of common.json, and bytes of all ranks by origin."""

    iteration: int
    common: Mapping[str, Any]
    own_node_bytes: int
    other_nodes_bytes: int
    seconds: float = 0.0  # duration of the recovery, until the run can go on
    # Where groups train alone: the iteration of each that continues, what common.json of the group
    # that is furthest has, when all last agreed, and whether this rank's reference is lost.
    groups: Mapping[int, int]
    furthest: Mapping[str, Any]
    met: tuple[int, int]
    lost_reference: bool

    @property
    def furthest_iteration(self) -> int:
        """The iteration of the group that is furthest, or of all ranks."""
        return max(self.groups.values())

    def panel(self) -> dict[str, float]:
        """Return the figures for dashboards."""
        return {
            "recovery/seconds": self.seconds,
            "recovery/bytes-from-own-nodes": float(self.own_node_bytes),
            "recovery/bytes-from-other-nodes": float(self.other_nodes_bytes),
        }


def recover(
    folder: SnapshotFolder,
    states: Mapping[str, ChunkedState],
    flags: Mapping[str, str],
    *,
    newer_than: int,
    log: Callable[[str], None],
    group: int = 0,
) -> Recovery | None:
    """Fill `states` in place from the newest iteration that all ranks together hold; collective.

    Returns None and logs the reasons if there is no iteration after `newer_than`; the states are
    then unchanged. Snapshots of another run, whose `flags` differ, are removed. `log` is called
    on every rank. Of groups that train alone, of which `group` is this rank's, each continues from
    its newest iteration in the newest round. A group without one is filled as the group that is
    furthest; then only the anchor is its own.
    """
    snapshots, held = _held(folder, flags, log)
    newest = held[0].age[0] if held else -1
    while held and held[0].age[0] > newer_than:
        # {group: its newest snapshots in the round of the newest of all}
        used = {each.group: each for each in reversed(held) if each.met == held[0].met}
        of_ages = [each for each in snapshots if _Held.of(each) in used.values()]
        filled = states
        if group not in used:
            filled = {of_other_group(name, held[0].group): states[name] for name in states}
        copies = _VerifiedSnapshots(folder, filled, of_ages, log)
        messages, lost = copies.plan()
        missing = [want for want in chain(*lost) if not _is_outer(want.state, states)]
        fatal = [want for want in missing if not may_be_missing(want.state)]
        if fatal:
            gone = {used.get(group_of(want.state), held[0]) for want in fatal}
            log(
                f"  passing over iteration {max(gone).age[0]} of the local copies: no node that is "
                f"left holds {fatal[0].state} at {list(fatal[0].chunk.offsets)}"
            )
            held = [each for each in held if each not in gone]
            continue
        # On all ranks: a lost or damaged file held the masters of these chunks too.
        commons, num_bytes = copies.commons(), copies.fill(messages)
        begin_without(filled, filled.keys() & {want.state for want in missing})
        folder.keep_only(copies.of_node)
        furthest = commons[held[0].group]
        return Recovery(
            iteration=used.get(group, held[0]).age[0],
            common=commons.get(group, furthest),
            own_node_bytes=num_bytes[0],
            other_nodes_bytes=num_bytes[1],
            groups={number: each.age[0] for number, each in used.items()},
            furthest=furthest,
            met=held[0].met,
            lost_reference=bool(lost[folder.control.world.rank]),
        )
    if held:
        log(f"local copies end at iteration {newest}: the checkpoint is as new")
    if newest > newer_than:
        log("no iteration of the local copies is whole: the run continues from --load")
    folder.control.barrier()  # all ranks have read their chunks
    folder.keep_only(())
    return None


class _Held(NamedTuple):
    """An age of a group's snapshots, and the age at which all groups last agreed."""

    age: tuple[int, int]
    met: tuple[int, int]
    group: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Held:
        return cls(snapshot.age, snapshot.met, snapshot.record.group)


def _held(
    folder: SnapshotFolder, flags: Mapping[str, str], log: Callable[[str], None]
) -> tuple[list[Snapshot], list[_Held]]:
    """Return this node's readable snapshots, and the ages of all nodes', newest first."""
    snapshots, notes = folder.snapshots(flags)
    everyone = folder.control.gather(({_Held.of(snapshot) for snapshot in snapshots}, notes))
    for line in dict.fromkeys(line for _, lines in everyone for line in lines):
        log(line)
    return snapshots, sorted({each for ages, _ in everyone for each in ages}, reverse=True)


def _is_outer(name: str, states: Collection[str]) -> bool:
    """Return whether a state is an outer optimizer's, which the anchor can replace."""
    kind, _, parameter = name.partition(".")
    return kind == OUTER_MOMENTUM or (kind == PARAM and f"{ANCHOR}.{parameter}" in states)


class _VerifiedSnapshots:
    """The verified snapshots of one iteration on this node, to fill `states`; collective to make.

    Each rank of the node verifies, and sends from, an equal share of the snapshots.
    """

    def __init__(
        self,
        folder: SnapshotFolder,
        states: Mapping[str, ChunkedState],
        snapshots: Sequence[Snapshot],
        log: Callable[[str], None],
    ) -> None:
        near, rank = folder.folder_ranks, folder.control.world.rank
        mine, damaged = [], {}
        for snapshot in snapshots[near.index(rank) :: len(near)]:
            try:
                snapshot.check()
            except UserError as error:
                damaged[snapshot.path.name] = str(error)
            else:
                mine.append(snapshot)
        everyone = folder.control.gather(damaged)
        for line in dict.fromkeys(line for each in everyone for line in each.values()):
            log(f"  passing over local copies: {line}")
        bad = {name for other in near for name in everyone[other]}
        self.of_node = [snapshot for snapshot in snapshots if snapshot.path.name not in bad]
        self._control = folder.control
        self._of_this_rank = _by_state(mine)  # snapshots from which this rank sends
        # What this node holds, and what this rank wants of others, each with the tensor to fill.
        self._here: list[tuple[SnapshotChunk, Tensor]] = []
        self._wanted: list[tuple[StateChunk, Tensor]] = []
        on_node = _by_state(self.of_node)
        for name, state in states.items():
            for offsets, values in state.chunks.items():
                whole = Chunk(offsets, tuple(values.shape))
                parts, missing = _parts(on_node, name, whole)
                self._here += [(part, values[part.chunk.index_in(whole)]) for part in parts]
                for chunk in missing:
                    self._wanted.append((StateChunk(name, chunk), values[chunk.index_in(whole)]))

    def plan(self) -> tuple[list[ChunkTransfer], list[list[StateChunk]]]:
        """Agree on the transfers of all ranks, and on the chunks of each that nobody holds."""
        wants = self._control.gather([want for want, _ in self._wanted])
        return assign(wants, self._control.gather(offers_for(wants, self._of_this_rank)))

    def commons(self) -> dict[int, Mapping[str, Any]]:
        """Return the contents of common.json that the snapshots of every group have."""
        mine = {snapshot.record.group: snapshot.record.common for snapshot in self.of_node}
        return {key: of for each in self._control.gather(mine) for key, of in each.items()}

    def fill(self, messages: Sequence[ChunkTransfer]) -> list[int]:
        """Fill the states; return the bytes from ranks' own nodes and from others, of all."""
        num_bytes = 0
        for part, target in self._here:
            values = part.values()
            target.copy_(values)
            num_bytes += values.nbytes
        return [*map(int, self._control.sum([float(num_bytes), self._exchange(messages)]))]

    def _exchange(self, messages: Sequence[ChunkTransfer]) -> int:
        """Send and receive this rank's messages; return the number of bytes received.

        All ranks go through the messages in the same order with at most `_IN_FLIGHT` open. The
        first incomplete message is open on both sender and receiver, so there is no deadlock.
        """
        rank = self._control.world.rank
        under_way: list[Iterator[int]] = []
        received = 0
        for message in messages:
            if rank not in (message.source, message.target):
                continue
            if len(under_way) == _IN_FLIGHT:
                received += sum(under_way.pop(0))
            is_sent = rank == message.source
            under_way.append(self._send(message) if is_sent else self._receive(message))
            next(under_way[-1])  # which begins it
        return received + sum(map(sum, under_way))

    def _send(self, message: ChunkTransfer) -> Iterator[int]:
        """Begin to send a message, yield, and wait until it is sent."""
        (part, *_), _ = _parts(self._of_this_rank, message.state, message.chunk)
        assert part.chunk == message.chunk, f"{message} is {part.chunk} here"
        content = part.values().contiguous().view(-1).view(torch.uint8)
        checksum = crc32(content.numpy()).to_bytes(_SUM_BYTES, "little")
        content = torch.cat([content, torch.frombuffer(bytearray(checksum), dtype=torch.uint8)])
        work: Any = dist.isend(content, message.target, group=self._control.group)
        yield 0
        work.wait()

    def _receive(self, message: ChunkTransfer) -> Iterator[int]:
        """Begin to receive a message, yield, wait for it, and yield its number of bytes."""
        want, values = self._wanted[message.number]
        target = values[message.chunk.index_in(want.chunk)]
        content = torch.empty(target.nbytes + _SUM_BYTES, dtype=torch.uint8)
        work: Any = dist.irecv(content, message.source, group=self._control.group)
        yield 0
        work.wait()
        checksum = int.from_bytes(content[-_SUM_BYTES:].numpy().tobytes(), "little")
        if crc32(content[:-_SUM_BYTES].numpy()) != checksum:
            raise RunError(f"{message.state} from rank {message.source} was changed on its way")
        target.copy_(content[:-_SUM_BYTES].view(target.dtype).view(target.shape))
        yield target.nbytes


_ByState = Mapping[str, Sequence[SnapshotChunk]]


def _by_state(snapshots: Sequence[Snapshot]) -> _ByState:
    held: dict[str, list[SnapshotChunk]] = defaultdict(list)
    for snapshot in snapshots:
        for number, stored in enumerate(snapshot.record.regions):
            held[stored.state].append(SnapshotChunk(stored.chunk, snapshot, number))
    return held


def _parts(held: _ByState, state: str, chunk: Chunk) -> tuple[list[SnapshotChunk], list[Chunk]]:
    """Return the disjoint parts of a chunk that snapshots hold, and the parts that none holds."""
    held_parts, left = [], [chunk]
    for stored in held.get(state, ()):
        parts, left = split(left, stored.chunk)
        held_parts += [stored._replace(chunk=part) for part in parts]
    return held_parts, left


def offers_for(wants: Sequence[Sequence[StateChunk]], held: _ByState) -> list[ChunkOffer]:
    """Return the parts of all ranks' wanted chunks that this rank holds.

    Each rank compares its own chunks with the wants. All chunks of all ranks, compared by every
    rank, would take a time that grows with the square of the number of ranks.
    """
    return [
        (target, number, part.chunk)
        for target, of_target in enumerate(wants)
        for number, (state, chunk) in enumerate(of_target)
        for part in _parts(held, state, chunk)[0]
    ]


def assign(
    wants: Sequence[Sequence[StateChunk]], offers: Sequence[Sequence[ChunkOffer]]
) -> tuple[list[ChunkTransfer], list[list[StateChunk]]]:
    """Assign parts of wanted chunks to the holders that send least.

    Also return the parts that each rank wants and none holds.
    """
    by_want: dict[tuple[int, int], list[tuple[int, Chunk]]] = defaultdict(list)
    for source, of_source in enumerate(offers):
        for wanted_by, number, part in of_source:
            by_want[wanted_by, number].append((source, part))
    load = [0] * len(offers)
    messages = []
    lost: list[list[StateChunk]] = [[] for _ in wants]
    for target, of_target in enumerate(wants):
        for number, (state, want) in enumerate(of_target):
            left = [want]
            for source, chunk in sorted(
                by_want[target, number], key=lambda offer: (load[offer[0]], offer[0])
            ):
                parts, left = split(left, chunk)
                for part in parts:
                    messages.append(ChunkTransfer(source, target, number, state, part))
                    load[source] += part.numel
            lost[target] += [StateChunk(state, chunk) for chunk in left]
    return messages, lost
