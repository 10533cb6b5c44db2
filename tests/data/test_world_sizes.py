"""The same global batches on any number of ranks, also after resuming on another number."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest

from data.batch import Fetch
from data.config import DataConfig
from data.loader import MicroBatches, Samples, SplitCounts, build_datasets
from paro.config.batch_schedule import BatchSchedule
from tests.helpers.corpora import write_corpus

WORLDS = (1, 2, 6, 8)
SAMPLES = 24 * 9
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """A blend of two corpora."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.RandomState(0)
    for name in ("a", "b"):
        lengths = (random.randint(0, 40) for _ in range(50))
        write_corpus(folder / name, ([random.randint(0, 1000, size=n)] for n in lengths))
    words = ("0.3", str(folder / "a"), "0.7", str(folder / "b"))
    config = DataConfig(seq_length=8, data_path=words, split="1,0,0")
    return build_datasets(config, SplitCounts(train=SAMPLES), vocab_size=1000).train


def schedule(world_size: int, rampup: tuple[int, int, int] | None) -> BatchSchedule:
    return BatchSchedule(
        micro_batch_size=1,
        global_batch_size=24,
        data_parallel_size=world_size,
        rampup_batch_size=rampup,
    )


def global_batches(
    samples: Samples, batches: BatchSchedule, consumed: int, num_workers: int = 0
) -> Iterator[Tokens]:
    """The tokens of each step, over all ranks, in sample order."""
    world_size = batches.data_parallel_size
    ranks = [
        MicroBatches(
            Fetch(samples),
            data_parallel_rank=rank,
            data_parallel_size=world_size,
            micro_batch_size=batches.micro_batch_size,
            consumed_samples=consumed,
            num_workers=num_workers,
        )
        for rank in range(world_size)
    ]
    while True:
        batch: Tokens = []
        for _ in range(batches.num_micro_batches_at(consumed)):
            for rank in ranks:
                batch += next(rank).tokens_BS.tolist()
        yield batch
        consumed += batches.batch_size_at(consumed)


@pytest.mark.parametrize("rampup", [None, (24, 24, 24)])
def test_the_world_makes_no_difference(
    samples: Samples, rampup: tuple[int, int, int] | None
) -> None:
    alone = list(islice(global_batches(samples, schedule(1, rampup), 0), 8))
    assert sum(map(len, alone)) == 8 * 24
    for world_size in WORLDS[1:]:
        found = list(islice(global_batches(samples, schedule(world_size, rampup), 0), 8))
        assert found == alone


@pytest.mark.parametrize("before", WORLDS)
@pytest.mark.parametrize("after", WORLDS)
def test_resuming_on_another_world(samples: Samples, before: int, after: int) -> None:
    whole = [samples[i][:-1].tolist() for i in range(SAMPLES)]
    for steps in range(1, 5):
        first = list(islice(global_batches(samples, schedule(before, None), 0), steps))
        rest = list(islice(global_batches(samples, schedule(after, None), 24 * steps), 3))
        assert list(chain(*first, *rest)) == whole[: 24 * (steps + 3)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_stopping_at_any_sample(samples: Samples, world_size: int) -> None:
    """After a ramp-up or another batch size, at a sample that no global batch divides."""
    for consumed in (1, 5, 23, 31, 100):
        (batch,) = islice(global_batches(samples, schedule(world_size, None), consumed), 1)
        assert batch == [samples[consumed + i][:-1].tolist() for i in range(24)]


@pytest.mark.process
def test_processes_that_read_ahead_make_no_difference(samples: Samples) -> None:
    plain = list(islice(global_batches(samples, schedule(2, None), 7), 3))
    assert list(islice(global_batches(samples, schedule(2, None), 7, num_workers=2), 3)) == plain
