"""How ranks that were started again meet: under keys that no earlier attempt has written."""

# [Note: a store that outlives its ranks]
# torchrun keeps one key-value store for all its restarts (torch 2.11 to 2.13), and its ranks name
# their keys alike each time: a new rank may read the address of a dead one and wait for it in vain.
# So the ranks agree on a prefix first. Each asks under its own name with a word never used before;
# rank 0 answers what it reads, old questions too, until every rank has said that it heard this
# rank 0. A number of attempts would not do: nodes count their restarts differently. No rank of an
# earlier attempt is left to answer, as torchrun ends them before it starts new ones.

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.005


def fresh_store(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of `store` that belongs to the ranks that call this together.

    `RuntimeError` when they do not come together in time.
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
            raise RuntimeError(f"ranks {sorted(silent)} did not come within {timeout}")
        time.sleep(_POLL_SECONDS)
