"""Late communication, late computing and NaN in new buffers change no bit of a training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from paro.distributed.comm_stream import DONE, CommStreams, Event, Job
from tests.gpu.test_ranks import (
    RANKS,
    NcclRefusedError,
    Record,
    changed_streams,
    on_ranks,
    train_cases,
    train_on_threads,
)
from tests.helpers.late_streams import poisoned_buffers
from tests.helpers.training import Trained

CYCLES = 2_000_000  # of a GPU's clock: about a millisecond, longer than any kernel here
# Several tiles of attention, by the one backend whose backward adds in one order.
LONG = "--seq-length 160 --attention-backend unfused"
CASES = [
    "--paro-strategy IIG",
    "--paro-strategy GGG --bf16",
    "--paro-strategy NIG --paro-collective ho-ring --recompute-granularity full",
    "--paro-strategy IIG --paro-materialize rotate",
    "--paro-strategy IIG --paro-materialize rotate --paro-rotate-in-place",
]


DISTURBANCES = ("communication", "computing")


class LateStreams:
    """Comm streams whose jobs begin late, or after each of whose jobs computing continues late."""

    def __init__(self, late: str, streams: CommStreams, device: torch.device) -> None:
        self._late, self._streams, self._device = late, streams, device
        self.runs_concurrently = streams.runs_concurrently

    def submit(self, stream: Hashable, job: Job, *, after: Event = DONE) -> Event:
        def late() -> None:
            if self._late == "communication":
                pause(self._device)
            job()

        event = self._streams.submit(stream, late, after=after)
        if self._late == "computing":
            pause(self._device)
        return event

    def close(self) -> None:
        self._streams.close()


def pause(device: torch.device) -> None:
    """Delays what comes next in the current CUDA stream, or in this thread."""
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(0.001)


@contextmanager
def disturbed(late: str | None) -> Iterator[None]:
    """With the same bits in every run."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills new tensors with NaN
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, False)
        if late is not None:
            stack.enter_context(poisoned_buffers())
            stack.enter_context(changed_streams(partial(LateStreams, late)))
        yield


def train_disturbed(backend: str, cases: list[str], late: str | None) -> list[Trained]:
    with disturbed(late):
        return train_cases(backend, [f"{LONG} {case}" for case in cases])


def train_threads_disturbed(cases: list[str], late: str | None) -> list[list[Trained]]:
    with disturbed(late):
        return train_on_threads(torch.device("cuda"), [f"{LONG} {case}" for case in cases])


def losses_and_norms(trained: Trained) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in trained.steps]


def check(run: Callable[[str | None], list[list[Trained]]], cases: list[str]) -> None:
    plain = run(None)
    for late in DISTURBANCES:
        for found, wanted in zip(run(late), plain, strict=True):
            for case, one, other in zip(cases, found, wanted, strict=True):
                label = f"late {late}: {case}"
                assert losses_and_norms(one) == losses_and_norms(other), label
                for name, value in other.parameters.items():
                    assert torch.equal(one.parameters[name], value), f"{label}: {name}"


def on_backend(backend: str, cases: list[str]) -> Callable[[str | None], list[list[Trained]]]:
    return lambda late: on_ranks(train_disturbed, RANKS, backend, cases, late, timeout=150.0)


@pytest.mark.gpu
@pytest.mark.timeout(460)
def test_no_race_on_one_gpu(record_property: Record) -> None:
    try:
        check(on_backend("nccl", CASES), CASES)
    except NcclRefusedError as refusal:
        record_property("note", f"{refusal}; {RANKS} threads of one process were the ranks")
        check(lambda late: train_threads_disturbed(CASES, late), CASES)


@pytest.mark.verify
@pytest.mark.ranks
def test_the_same_on_cpu_ranks() -> None:
    check(on_backend("gloo", CASES[:1]), CASES[:1])
