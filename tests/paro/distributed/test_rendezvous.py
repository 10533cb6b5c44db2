"""Restarted ranks meet each other, whatever dead ranks have left in the store."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from paro.distributed.rendezvous import fresh_store

SHORT = timedelta(seconds=20)


def meet(store: dist.Store, world_size: int) -> list[str]:
    """The value that each rank of an attempt reads, written by rank 0."""

    def rank(number: int) -> str:
        mine = fresh_store(store, rank=number, world_size=world_size, timeout=SHORT)
        if number == 0:
            mine.set("address", uuid.uuid4().hex)
        return mine.get("address").decode()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_of_an_attempt_read_what_this_attempt_wrote(world_size: int) -> None:
    store = dist.HashStore()
    store.set_timeout(SHORT)
    attempts = [meet(store, world_size) for _ in range(4)]
    assert all(len(set(addresses)) == 1 for addresses in attempts)
    assert len({addresses[0] for addresses in attempts}) == 4


def test_what_an_attempt_that_never_met_has_left_does_no_harm() -> None:
    """One rank asked and died; another got an answer and died; a rank 0 came alone and died."""
    store = dist.HashStore()
    store.set_timeout(SHORT)
    store.set("asks/1", "a dead rank's question")
    store.set("asks/2", "another's")
    store.set("answer/another's", "a dead rank 0's prefix")
    store.set("heard/a dead rank 0's prefix/2", "")
    store.set("a dead rank 0's prefix/address", "stale")
    (address,) = set(meet(store, 3))
    assert address != "stale"


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("asks/2", "left behind")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come$"):
        fresh_store(store, rank=0, world_size=3, timeout=timedelta(seconds=0.2))
