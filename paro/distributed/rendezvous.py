"""Rendezvous after a torchrun restart, with store keys that no earlier attempt has written."""

# [Note: a store that outlives its ranks]
# torchrun keeps one key-value store across restarts (torch 2.11 to 2.13), and ranks use the same
# keys each time: a new rank may read the address of a dead one and wait for it until the timeout.
# So the ranks agree on a prefix first. Each rank writes a unique token under its rank; rank 0
# answers every token that it reads, old ones too, until every rank has acknowledged the prefix of
# this rank 0. The restart count would not work as a prefix: nodes count restarts differently. No
# rank of an earlier attempt can answer, as torchrun stops them all before it starts new ones.

from __future__ import annotations

import errno
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.005


def fresh_store(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """`store` with a prefix that is unique to the ranks that call this together.

    `TimeoutError` or torch's `DistStoreError` if they do not all call it within `timeout`.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        _answer_all(store, own, world_size, timeout)
        prefix = own
    else:
        store.set(f"asks/{rank}", own)
        prefix = store.get(f"answer/{own}").decode()
        store.set(f"heard/{prefix}/{rank}", "")
    return dist.PrefixStore(prefix, store)


def _answer_all(store: dist.Store, prefix: str, world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    silent = set(range(1, world_size))
    answered: set[str] = set()
    while silent:
        for rank in sorted(silent):
            if store.check([f"heard/{prefix}/{rank}"]):
                silent.remove(rank)
            elif store.check([f"asks/{rank}"]):
                question = store.get(f"asks/{rank}").decode()
                if question not in answered:
                    store.set(f"answer/{question}", prefix)
                    answered.add(question)
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"ranks {sorted(silent)} did not come")
        time.sleep(_POLL_SECONDS)
