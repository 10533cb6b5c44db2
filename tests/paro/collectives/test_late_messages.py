"""Every wait for a message, and for what comes before one, is seen when it is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives.wire import Pending, Wire
from paro.distributed.comm_stream import Stage
from paro.topology import Link, make_topology, nested_range
from tests.helpers.ranks import run_ranks
from tests.helpers.requests import all_gather
from tests.paro.collectives.test_collectives import make
from tests.paro.collectives.test_scheduled import rotate, run_in_chunks
from tests.paro.late_mutations import changed


@dataclass(frozen=True, slots=True)
class FilledLate:
    """An event whose wait does, after a while, what the event stands for."""

    fill: Callable[[], object]

    def wait(self) -> None:
        time.sleep(0.2)
        self.fill()

    def stages(self) -> Iterator[Stage]:
        return iter(())


def gather_late_shards(name: str) -> list[str]:
    """Gathers shards that an event fills: in their place, and elsewhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology, wrong = make_topology(world_size=size, group_size=2, degrees=()), []
    wanted = torch.arange(31.0 * size)
    own = slice(*nested_range(topology.axes, rank, wanted.numel()))
    for elsewhere in (False, True):
        collectives, _ = make(name, topology)
        whole = torch.zeros_like(wanted)
        late = torch.zeros_like(wanted[own]) if elsewhere else whole[own]
        event = FilledLate(lambda late=late: late.copy_(wanted[own]))
        shard = late if elsewhere else None
        all_gather(collectives, whole, topology.axes, shard=shard, after=event).wait()
        collectives.close()
        if not torch.equal(whole, wanted):
            wrong.append(f"{name}: a shard was gathered before it was filled")
    return wrong


def gather_and_reduce(name: str) -> list[str]:
    try:
        run_in_chunks(name, 2, 31 * dist.get_world_size(), overlap=True)
    except AssertionError as error:
        return [str(error) or "other values were gathered"]
    return []


def complaints_of(module: str) -> list[str]:
    """Returns what is wrong after the runs of a module in which all messages are late."""
    wrong = []
    if module == "shifts":
        with late_messages(may_change=False) as complaints:
            for in_place in (False, True):
                wrong += rotate(dist.get_world_size(), in_place=in_place, overlap=True)[0]
        return wrong + complaints
    for slow in Link:
        with late_messages(may_change=True, slow=slow) as complaints:
            wrong += gather_and_reduce("ho-ring") + gather_late_shards("ho-ring")
        wrong += complaints
    return wrong


def complaints_without(module: str, function: str, old: str, new: str) -> list[str]:
    """Returns what is wrong without a wait, or an order: a text of a function, replaced."""
    with changed(f"paro.collectives.{module}", function, old, new):
        return complaints_of(module)


_RING = ("shifts", "Ring._shift")
_LEVEL = ("scheduled", "Transfer._run_level")
_RUN = ("scheduled", "ScheduledCollectives.run")
_OLD_SENDS = "> MESSAGES_UNDER_WAY:\n                self._sends[level].popleft()"
_LAST_SENDS = "while self._sends[level]:\n            self._sends[level].popleft()"
OF_RINGS = (
    (*_RING, "arriving.popleft().wait()", "arriving.popleft()"),
    (*_RING, "sent.wait()", "pass"),
)
OTHERS = (
    (*_LEVEL, "pending.wait()", "pass"),
    (*_LEVEL, "self._await(partial(self._all_arrived, self._steps[index].receive.after))", "pass"),
    (*_LEVEL, f"{_OLD_SENDS}.wait()", _OLD_SENDS),
    (*_LEVEL, "self._await(lambda: self._unsent[level] == 0)", "pass"),
    (*_LEVEL, f"{_LAST_SENDS}.wait()", _LAST_SENDS),
    (*_RUN, "partial(own.copy_, shard), after=after", "partial(own.copy_, shard)"),
    (*_RUN, "request._replace(after=after)", "request._replace(after=DONE)"),
    (*_RUN, "own.to(comm_dtype)), after=event)", "own.to(comm_dtype)), after=DONE)"),
    (
        *("scheduled", "ScheduledCollectives._start"),
        *("self._submit(kind, part, job, after=after)", "self._submit(kind, part, job)"),
    ),
)


@pytest.mark.ranks
@pytest.mark.parametrize("module", ["shifts", "scheduled"])
def test_late_messages_change_nothing(module: str) -> None:
    assert run_ranks(complaints_of, 4, module) == 4 * [[]]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "removal", [*OF_RINGS, *(pytest.param(one, marks=pytest.mark.verify) for one in OTHERS)]
)
def test_a_missing_wait_is_seen(removal: tuple[str, str, str, str]) -> None:
    assert any(run_ranks(complaints_without, 4, *removal))


@dataclass(slots=True)
class _LateMessage:
    """A message in flight: the wait for it writes what arrives, or compares what was sent."""

    pending: Pending
    tensor: Tensor
    moved: Tensor  # its values: received here, or copied when the message was sent
    is_sent: bool
    seconds: float  # that it takes to arrive
    waited: bool = False
    changed: bool = False

    def wait(self) -> None:
        self.pending.wait()
        self.waited = True
        if self.is_sent:
            self.changed = not torch.equal(self.tensor, self.moved)
        else:
            time.sleep(self.seconds)
            self.tensor.copy_(self.moved)


@contextmanager
def late_messages(*, may_change: bool, slow: Link | None = None) -> Iterator[list[str]]:
    """Makes all messages late, those over slow links later; the list says at the end what is wrong.

    Every message must be waited for. With `may_change` a tensor may change before the wait of the
    message that sends it, as where a ring adds to it what its peer sends back.
    """
    start, messages, complaints = Wire._start, list[_LateMessage](), list[str]()

    def late_start(
        self: Wire,
        how: object,
        direction: str,
        tensor: Tensor,
        *to: int,
    ) -> _LateMessage:
        moved = tensor.clone()
        pending = start(self, how, direction, moved, *to)  # type: ignore[arg-type]
        seconds = 0.01 if self.span[0].link is slow else 0.0
        messages.append(_LateMessage(pending, tensor, moved, how is dist.isend, seconds))
        return messages[-1]

    with patch.object(Wire, "_start", late_start):
        yield complaints
    for message in messages:
        if not message.waited:
            complaints.append("nobody waited for a message")
            message.pending.wait()  # a peer may still need it
        elif message.changed and not may_change:
            complaints.append("a tensor changed while it was being sent")
