"""Rendezvous: ranks meet in a store and compare settings; any difference or refusal ends all."""

# [Note: a store that outlives its ranks]
# torchrun keeps one key-value store across restarts (torch 2.11 to 2.13), and ranks use the same
# keys each time: a new rank may read the address of a dead rank and wait for it until the timeout.
# So the ranks agree on a prefix first:
#
#     every rank   writes a unique token, waits for an answer with a prefix, acknowledges it with
#                  its settings, or with the reason why it refuses to run
#     rank 0       answers every token, old tokens too, until all ranks have acknowledged its own
#                  prefix; compares the settings and writes the verdict, which all ranks read
#
# A restart count is no prefix, as nodes count restarts differently. Ranks of an earlier attempt
# cannot answer: torchrun stops them first. Texts are JSON, as anyone can write to the store.

from __future__ import annotations

import ipaddress
import json
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paro.distributed.control import SharedError, error_of_all
from paro.distributed.world import World, has_agent_store, read_address, world_or_alone
from paro.errors import PeerError, RunError, StorageError, UserError, for_all_ranks

_POLL_SECONDS = 0.005
_BACKLOG = 2048  # connections that wait to be accepted: all ranks come at once
# How long other ranks may take to arrive and to read the verdict, once any rank refuses or differs.
_REFUSAL_TIMEOUT = timedelta(seconds=20)
_RESOLVING_TIMEOUT = timedelta(seconds=20)
_RESOLVING_SECONDS = 1.0  # between two tries
_KINDS: dict[str, type[SharedError]] = {
    kind.__name__: kind for kind in (UserError, StorageError, RunError, PeerError)
}


def open_store(world: World, timeout: timedelta) -> dist.Store:
    """Open torchrun's store, or a store of rank 0 at MASTER_ADDR; operations take `timeout`.

    `UserError` on a rank that cannot resolve the address and on a rank 0 that cannot open the
    store, `PeerError` on ranks that do not find the store.
    """
    host, port = read_address()
    _resolve(world.rank, host, port, min(timeout, _RESOLVING_TIMEOUT))
    is_master = world.rank == 0 and not has_agent_store()
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=_loopback_listener(world, host, port) if is_master else None,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        if is_master:
            raise UserError(
                f"rank 0 cannot listen on MASTER_PORT {port} at MASTER_ADDR {host} "
                f"({_first_words(error)}): choose a free port, and an address of rank 0's host",
                on_this_rank=True,
            ) from error
        raise PeerError(
            f"rank {world.rank} found no rank 0 at MASTER_ADDR {host}, MASTER_PORT {port} within "
            f"{timeout}"
        ) from error


def _resolve(rank: int, host: str, port: int, timeout: timedelta) -> None:
    """Wait until the name of rank 0's host can be resolved: a new container's name may come late.

    torch would try for the entire timeout and then print a page of stack frames.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:  # an invalid name, such as 64 characters
            if time.monotonic() >= deadline:
                raise UserError(
                    f"rank {rank} cannot resolve MASTER_ADDR {host} ({_first_words(error)}): give "
                    "one name or address of rank 0's host, which all nodes know",
                    on_this_rank=True,
                ) from error
        time.sleep(_RESOLVING_SECONDS)


def _loopback_listener(world: World, host: str, port: int) -> int | None:
    """Return a socket that only this machine can reach, if one node trains at a loopback address.

    None otherwise, as several nodes may see one name as different addresses: torch then listens on
    all interfaces, and anyone who reaches the port can change the values that ranks read.
    """
    if world.size > world.ranks_per_node:
        return None
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if not ipaddress.ip_address(address[0]).is_loopback:
        return None
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG).detach()


def rendezvous(
    store: dist.Store,
    world: World,
    timeout: timedelta,
    settings: Mapping[str, str],
    refusal: SharedError | None = None,
) -> dist.Store:
    """Agree on a prefix of `store` that is unique to the ranks that call this together.

    Settings that differ between ranks, or the `refusal` of a rank, raise the same error on all
    ranks. `PeerError` if a rank does not call within `timeout`.
    """
    token = uuid.uuid4().hex
    answer: dict[str, Any] = {"settings": dict(settings), "refusal": _written(refusal)}
    try:
        if world.rank == 0:
            prefix = token
            verdict = _Meeting(store, token, world.size, timeout).lead(answer)
        else:
            store.set(f"asks/{world.rank}", token)
            prefix = store.get(f"answer/{token}").decode()
            store.set(f"heard/{prefix}/{world.rank}", json.dumps(answer))
            verdict = _read(json.loads(store.get(f"verdict/{prefix}")))
            store.set(f"knows/{prefix}/{world.rank}", "")
    except dist.DistError as error:
        raise PeerError(
            f"rank 0 ended, or said nothing within {timeout} ({_first_words(error)})"
        ) from error
    if verdict is not None:
        raise verdict
    return dist.PrefixStore(prefix, store)


@contextmanager
def refusals_are_shared() -> Iterator[None]:
    """Share a failure of the block, which runs before the ranks meet: all ranks raise it."""
    try:
        yield
    except Exception as error:
        world = world_or_alone()
        shared = for_all_ranks(error, world.rank)
        if world.size == 1 or isinstance(error, PeerError):
            raise
        try:
            rendezvous(open_store(world, _REFUSAL_TIMEOUT), world, _REFUSAL_TIMEOUT, {}, shared)
        except (UserError, RunError, PeerError) as agreed:
            # No other rank answered, or this rank has a bug, whose traceback is shown here.
            if isinstance(shared, PeerError) or isinstance(agreed, PeerError):
                raise error from None
            if isinstance(agreed, UserError) and agreed.on_this_rank:  # no store could be opened
                raise error from None
            raise agreed from error


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Rank 0's part of the rendezvous: read the texts of all ranks and write the verdict."""

    store: dist.Store
    prefix: str
    world_size: int
    timeout: timedelta

    def lead(self, answer: dict[str, Any]) -> SharedError | None:
        """Write and return the verdict; `answer` is rank 0's own text."""
        answers = self._listen(answer)
        verdict = self._verdict(answers)
        self.store.set(f"verdict/{self.prefix}", json.dumps(_written(verdict)))
        if verdict is not None:  # the store may end with this process
            deadline = time.monotonic() + _REFUSAL_TIMEOUT.total_seconds()
            keys = [f"knows/{self.prefix}/{rank}" for rank in answers if rank]
            while keys and not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        return verdict

    def _listen(self, answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Collect the texts of ranks until the timeout, a short one once a rank differs."""
        store, begin = self.store, time.monotonic()
        deadline = begin + self.timeout.total_seconds()
        soon = begin + _REFUSAL_TIMEOUT.total_seconds() if answer["refusal"] else deadline
        answers = {0: answer}
        silent = set(range(1, self.world_size))
        answered: set[str] = set()
        while silent and time.monotonic() <= min(soon, deadline):
            for rank in sorted(silent):
                if store.check([f"heard/{self.prefix}/{rank}"]):
                    silent.remove(rank)
                    answers[rank] = json.loads(store.get(f"heard/{self.prefix}/{rank}"))
                    if answers[rank] != answer:
                        soon = min(soon, time.monotonic() + _REFUSAL_TIMEOUT.total_seconds())
                elif store.check([f"asks/{rank}"]):
                    question = store.get(f"asks/{rank}").decode()
                    if question not in answered:
                        store.set(f"answer/{question}", self.prefix)
                        answered.add(question)
            time.sleep(_POLL_SECONDS)
        return answers

    def _verdict(self, answers: Mapping[int, dict[str, Any]]) -> SharedError | None:
        ranks = range(self.world_size)
        refusals = [_read(answers[rank]["refusal"]) if rank in answers else None for rank in ranks]
        if any(refusal is not None for refusal in refusals):
            return error_of_all(refusals, name_rank=True)
        everyone = {rank: answers[rank]["settings"] for rank in sorted(answers)}
        if any(settings != everyone[0] for settings in everyone.values()):
            return UserError(first_difference(everyone))
        silent = [rank for rank in ranks if rank not in answers]
        if silent:
            return PeerError(
                f"{_ranks(silent)} did not come within {self.timeout}: are all started?"
            )
        return None


def first_difference(everyone: Mapping[int, Mapping[str, str]]) -> str:
    """Describe the first setting that differs between ranks: its values and their ranks."""
    names = dict.fromkeys(name for settings in everyone.values() for name in settings)
    for name in names:
        values = {rank: settings.get(name, "absent")[:80] for rank, settings in everyone.items()}
        if len(set(values.values())) > 1:
            return f"{name} must be the same on all ranks, and is {by_value(values)}"
    raise AssertionError("nothing differs")


def by_value(values: Mapping[int, str]) -> str:
    """Return each different value once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value or "nothing", []).append(rank)
    return ", ".join(f"{value} on {_ranks(of)}" for value, of in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def _written(error: SharedError | None) -> dict[str, object] | None:
    """Return an error as JSON."""
    if error is None:
        return None
    kind = next(name for name, of in _KINDS.items() if isinstance(error, of))
    example = error.example if isinstance(error, UserError) else ""
    return {"kind": kind, "lines": [str(line) for line in error.args], "example": example}


def _read(text: object) -> SharedError | None:
    if not isinstance(text, dict):
        return None
    kind = _KINDS[text["kind"]]
    if kind is UserError:
        return UserError(*text["lines"], example=text["example"])
    return kind(*text["lines"])


def _first_words(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
