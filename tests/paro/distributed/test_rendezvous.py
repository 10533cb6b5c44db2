"""Ranks meet whatever dead ranks have left in the store; one that fails ends all."""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paro.checkpoint.manifest import DamagedError
from paro.distributed import control
from paro.distributed.control import Control
from paro.distributed.rendezvous import open_store, rendezvous
from paro.distributed.world import World
from paro.errors import PeerError, StorageError, UserError
from tests.end_to_end.test_training import RUN, Ended, run_main
from tests.helpers.ranks import run_ranks

SHORT = timedelta(seconds=20)


def addresses_of(store: dist.Store, world_size: int) -> list[str]:
    """The value that each rank of an attempt reads, written by rank 0."""

    def rank(number: int) -> str:
        mine = rendezvous(store, World(rank=number, size=world_size), SHORT, {"--lr": "1"})
        if number == 0:
            mine.set("address", uuid.uuid4().hex)
        return mine.get("address").decode()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))


@pytest.mark.parametrize("world_size", [1, 5])
def test_all_ranks_of_an_attempt_read_what_this_attempt_wrote(world_size: int) -> None:
    store = dist.HashStore()
    store.set_timeout(SHORT)
    attempts = [addresses_of(store, world_size) for _ in range(4)]
    assert all(len(set(addresses)) == 1 for addresses in attempts)
    assert len({addresses[0] for addresses in attempts}) == 4
    # One rank asked and died; another got an answer and died; a rank 0 came alone and died.
    store.set("asks/1", "a dead rank's question")
    store.set("asks/2", "another's")
    store.set("answer/another's", "a dead rank 0's prefix")
    store.set("heard/a dead rank 0's prefix/2", "")
    store.set("a dead rank 0's prefix/address", "stale")
    (address,) = set(addresses_of(store, 3))
    assert address != "stale"


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("asks/2", "left behind")
    with pytest.raises(PeerError, match=r"^ranks 1, 2 did not come within 0:00:00.2"):
        rendezvous(store, World(size=3), timedelta(seconds=0.2), {})


def ends_of(
    settings: Sequence[Mapping[str, str]],
    refusals: Sequence[UserError | StorageError | PeerError | None] = (),
) -> list[tuple[str, str]]:
    """The kind and text of what each rank raises."""
    store = dist.HashStore()
    store.set_timeout(SHORT)
    refusals = refusals or [None] * len(settings)

    def rank(number: int) -> tuple[str, str]:
        world = World(rank=number, size=len(settings))
        try:
            rendezvous(store, world, SHORT, settings[number], refusals[number])
        except (UserError, StorageError, PeerError) as error:
            return type(error).__name__, str(error)
        return "none", ""

    with ThreadPoolExecutor(len(settings)) as pool:
        return list(pool.map(rank, range(len(settings))))


def test_the_first_setting_that_differs_is_named_on_all_ranks() -> None:
    same = {"torch": "2.13", "--lr": "0.1", "--seed": "1"}
    assert ends_of([same] * 3) == [("none", "")] * 3
    other = same | {"--lr": "0.2", "--seed": "2"}
    message = "--lr must be the same on all ranks, and is 0.1 on ranks 0, 2, 0.2 on rank 1"
    assert ends_of([same, other, same]) == [("UserError", message)] * 3
    message = "--new must be the same on all ranks, and is absent on rank 0, 3 on rank 1"
    assert ends_of([same, same | {"--new": "3"}]) == [("UserError", message)] * 2


def test_a_rank_that_refuses_ends_all() -> None:
    mistake, full = UserError("a", "b", example="run\n  this"), StorageError("full: /data")
    every = [{}, {"--lr": "1"}, {}]
    assert ends_of(every, [None, UserError("bad"), None]) == [("UserError", "rank 1: bad")] * 3
    assert ends_of(every, [UserError("bad"), None, None]) == [("UserError", "rank 0: bad")] * 3
    assert ends_of(every, [mistake] * 3) == [("UserError", str(mistake))] * 3
    assert ends_of(every, [None, None, full]) == [("StorageError", "rank 2: full: /data")] * 3
    bug = PeerError("rank 2 failed: KeyError: 'x'")
    assert ends_of(every, [None, None, bug]) == [("PeerError", str(bug))] * 3


def test_without_an_agent_rank_0_opens_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(PeerError, match=r"rank 1 found no rank 0 at MASTER_ADDR 127.0.0.1"):
            open_store(World(rank=1, size=2), timedelta(seconds=0.2))
        taken.listen()
        with pytest.raises(UserError, match=r"cannot listen on MASTER_PORT \d+.*a free port"):
            open_store(World(rank=0, size=2), SHORT)
    store = open_store(World(rank=0, size=2), SHORT)
    open_store(World(rank=1, size=2), SHORT).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["node[1-4]", "no.such.host.invalid", 64 * "x" + ".invalid"])
def test_a_name_that_does_not_resolve_is_named(
    host: str, rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", "29500")
    message = rf"^rank {rank} cannot resolve MASTER_ADDR {re.escape(host)} \("
    with pytest.raises(UserError, match=message) as error:
        open_store(World(rank=rank, size=2), timedelta(seconds=0))
    assert error.value.on_this_rank
    assert "frame #" not in capfd.readouterr().err


CASES = {  # the beginning of the line: flags of both ranks
    "--seed must be the same on all ranks, and is 1 on": ("--seed 1", "--seed 2"),
    "rank 1: --micro-batch-size 0 must": ("", "--micro-batch-size 0"),
    "--no-such-flag is unknown": ("--no-such-flag", "--no-such-flag"),
}


def train_all() -> list[Ended]:
    rank = int(os.environ["RANK"])
    runs = [flags[rank].split() for flags in CASES.values()]
    return [run_main([*RUN, "--train-iters", "2", *own]) for own in runs]


@pytest.mark.ranks
def test_ranks_with_different_flags_do_not_train() -> None:
    for of_rank in run_ranks(train_all, 2, init=False):
        for message, ended in zip(CASES, of_rank, strict=True):
            assert (ended.mistake or "").startswith(message)
            assert "iteration" not in ended.printed, message


class Pretended(Control):
    """Rank 0 of several, with what the others tell it."""

    def __init__(self, *others: Exception | None) -> None:
        super().__init__(World(size=1 + len(others)), torch.device("cpu"))
        self.others = others

    def gather(self, value: object) -> list[Any]:
        return [value, *self.others]


def raised(own: Exception | None, *others: Exception | None, name_rank: bool) -> Exception:
    try:
        with Pretended(*others).raise_on_all_ranks("--save ckpt", name_rank=name_rank):
            if own is not None:
                raise own
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_lowest_rank_that_failed_is_named_unless_all_failed_alike() -> None:
    for own, other, kind, line in (
        (DamagedError("bad"), DamagedError("bad"), DamagedError, "--save ckpt: bad"),
        (DamagedError("bad"), DamagedError("worse"), DamagedError, "--save ckpt: rank 0: bad"),
        (DamagedError("bad"), UserError("wrong"), UserError, "--save ckpt: rank 0: bad"),
        (DamagedError("bad"), None, DamagedError, "--save ckpt: rank 0: bad"),
        (None, StorageError("full"), StorageError, "--save ckpt: rank 1: full"),
        (None, PeerError("rank 1 failed: a bug"), PeerError, "rank 1 failed: a bug"),
        (KeyError("a bug"), UserError("wrong"), KeyError, "'a bug'"),
    ):
        error = raised(own, other, name_rank=True)
        assert (type(error), str(error)) == (kind, line)
    error = raised(None, None, UserError("wrong"), name_rank=False)
    assert str(error) == "--save ckpt: wrong"
    several = UserError("one", "two", example="do this")
    with pytest.raises(UserError) as caught, Pretended(several).raise_on_all_ranks():
        pass
    assert caught.value is several
    with Pretended(None, None).raise_on_all_ranks("--save ckpt", name_rank=True):
        pass  # nothing is raised where nothing failed


def sums() -> list[list[list[float]]]:
    """Sums of all ranks, and of each half of them, by a tree and in a ring, and their numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = Control(World(rank=rank, size=size), torch.device("cpu"))
    halves = [[*range(size // 2)], [*range(size // 2, size)]]
    groups = [dist.new_group(ranks) for ranks in halves]
    half = whole.over(groups[rank >= size // 2], halves[rank >= size // 2])
    found = []
    for most_in_ring in (1, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, "_MOST_IN_RING", most_in_ring)
            found.append([each.sum([0.1 * rank, 1.0, float(rank)]) for each in (whole, half)])
    gathered = [each.gather_numbers([0.1 * rank, rank]) for each in (whole, half)]
    return [*found, [list(chain(*numbers)) for numbers in gathered]]


@pytest.mark.ranks
def test_many_ranks_sum_by_a_tree() -> None:
    by_tree, in_ring, gathered = zip(*run_ranks(sums, 4), strict=True)
    for rank, (whole, half) in enumerate(by_tree):
        assert whole == [pytest.approx(0.6), 4.0, 6.0]
        assert half[1:] == [2.0, 1.0 if rank < 2 else 5.0]
        assert whole == by_tree[0][0], "ranks have different bits"
    assert in_ring[0][0][1:] == [4.0, 6.0]
    numbers = [value for rank in range(4) for value in (0.1 * rank, rank)]
    assert gathered == tuple(
        [numbers, numbers[:4] if rank < 2 else numbers[4:]] for rank in range(4)
    )
