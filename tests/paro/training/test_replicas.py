"""A replica that differs in one bit is found and named, under any strategy."""

from __future__ import annotations

import pytest
import torch

from paro.errors import RunError
from paro.training.replicas import check_replicas, hash_of
from paro.training.step import Training
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, built, run_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_and_its_place_count(dtype: torch.dtype) -> None:
    values = torch.arange(1, 2**16 + 8, dtype=torch.float32).to(dtype)
    before = hash_of(values)
    assert hash_of(values.clone()) == before
    for index in (0, 2**16 - 1, 2**16, 2**16 + 6):
        other = values.clone()
        other.view(torch.uint8)[index * values.element_size()] ^= 1
        assert hash_of(other) != before
    assert hash_of(values.flip(0)) != before
    assert hash_of(torch.zeros(0, dtype=dtype)) == 0


def test_a_highest_bit_counts_and_so_does_the_column_of_a_word() -> None:
    words = torch.arange(3 * 1024 + 10)  # three whole rows, and a rest
    before = hash_of(words)
    for at in (0, 1023, 1024, 3 * 1024, 3 * 1024 + 9):
        other = words.clone()
        other[at] ^= torch.iinfo(torch.int64).min
        assert hash_of(other) != before
    for one, two in ((0, 1), (5, 3 * 1024 + 5), (3 * 1024, 3 * 1024 + 1)):
        other = words.clone()
        other[[one, two]] = words[[two, one]]
        assert hash_of(other) != before


def flip_a_bit(training: Training, state: str) -> None:
    if state == "params":
        bits = training.model.units[1].param_shard
    else:
        (bits, *_) = (s.values for s in training.optimizer.flat_shards() if s.state == state)
    bits.view(torch.uint8)[5] ^= 1


def found(strategy: str, state: str, rank: int) -> str:
    """What all ranks raise where a bit of a rank has flipped."""
    flags = f"--bf16 --train-iters 2 --global-batch-size 4 --paro-strategy {strategy}"
    config, training = built(f"{TINY} {flags} --paro-group-size 2")
    run_steps(config, training)
    check_replicas(training, iteration=2)
    if training.control.world.rank == rank:
        flip_a_bit(training, state)
    try:
        check_replicas(training, iteration=2)
    except RunError as error:
        return str(error).partition(", and ")[0]
    finally:
        training.close()
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "state", "told"),
    [
        ("NNN", "exp_avg_sq", "exp_avg_sq of embedding.weight on rank 2 differs from its 3 other"),
        ("NNG", "params", "the parameters of blocks.0 on rank 2 differs from its 3 other replicas"),
        ("III", "param", "param of embedding.weight differs between ranks 0, 2"),
        ("GGG", "param", ""),  # each range is on one rank
    ],
)
def test_the_rank_and_the_state_that_differ_are_named(strategy: str, state: str, told: str) -> None:
    everywhere = run_ranks(found, 4, strategy, state, 2)
    assert len(set(everywhere)) == 1
    assert everywhere[0].removeprefix("after iteration 2 ").startswith(told)
    assert bool(everywhere[0]) is bool(told)
