"""Indices of 2 billion tokens in 3 million documents: megatron-core's, with time and memory."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from data.sample_order import OrderPlan, build_order
from tests.data.megatron import megatron_datasets
from tests.helpers.ranks import HANGS_AFTER
from tests.helpers.refusals import refused

DOCUMENTS, TOKENS, SEQ = 3_000_000, 2_000_000_000, 4096
PAIRS = 7
GIB = 2**30


def sizes() -> NDArray[np.int32]:
    random = np.random.RandomState(5)
    lengths = random.exponential(TOKENS / DOCUMENTS, size=DOCUMENTS).astype(np.int32)
    lengths[-1] += TOKENS - int(lengths.sum(dtype=np.int64))
    return lengths


def plan_of(num_samples: int) -> OrderPlan:
    return OrderPlan(
        bounds=range(DOCUMENTS),
        tokens_per_epoch=TOKENS,
        num_samples=num_samples,
        seq_length=SEQ,
        seed=1,
    )


def test_an_order_has_bounds() -> None:
    refused(lambda: plan_of(10**10), "10000000000 samples are ... --train-iters")


def build_as_megatron(lengths: NDArray[np.int32], plan: OrderPlan) -> list[NDArray[np.generic]]:
    """megatron-core's work from the sizes to the three indices."""
    megatron_datasets()
    from megatron.core.datasets import gpt_dataset, helpers

    random = np.random.RandomState(plan.seed)
    documents = np.arange(DOCUMENTS, dtype=np.int32)
    apart = plan.samples_before_separate_epoch
    index = gpt_dataset._build_document_index(documents, plan.num_epochs, random, apart is not None)
    samples = helpers.build_sample_idx(lengths, index, SEQ, plan.num_epochs, TOKENS, True, True)
    total = len(samples) - 1
    shuffle = gpt_dataset._build_shuffle_index(apart or total, total, random)
    return [index, samples, shuffle]


@pytest.mark.verify
@pytest.mark.parametrize("num_samples", [TOKENS // SEQ - 1, int(2.5 * TOKENS / SEQ)])
def test_indices_of_a_large_corpus_are_those_of_megatron(
    num_samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths, plan = sizes(), plan_of(num_samples)
    build_as_megatron(lengths, plan)  # imports modules
    ratios, seconds = [], []
    for _ in range(PAIRS):
        begin = time.process_time()
        theirs = build_as_megatron(lengths, plan)
        between = time.process_time()
        ours = build_order(lengths, plan)
        seconds.append(time.process_time() - between)
        ratios.append(seconds[-1] / (between - begin))
    for mine, other in zip(ours, theirs, strict=True):
        assert np.array_equal(mine, other)
    with capsys.disabled():
        print(f"\n{plan.num_epochs} epochs: {statistics.median(seconds):.3f} s,", end=" ")
        print(f"{statistics.median(ratios):.2f} of megatron-core's (median of {PAIRS} pairs)")


def peak_of_building(results: object) -> None:
    lengths = sizes()
    build_order(lengths, plan_of(TOKENS // SEQ - 1))
    results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # type: ignore[attr-defined]


@pytest.mark.verify
def test_memory() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=peak_of_building, args=(results,))
    process.start()
    peak = results.get(timeout=HANGS_AFTER)
    process.join()
    assert 0 < peak < 4 * GIB
