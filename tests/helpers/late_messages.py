"""Messages between two ranks that complete as late as waits allow: finds missing waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives.wire import Pending, Wire
from paro.topology import Link


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
