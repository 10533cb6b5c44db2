"""The longest sequences that fit, by strategy and number of ranks that share a sample."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from paro.context_parallel.layout import ContextLayout
from paro.planning.search.estimator import Estimator
from paro.planning.search.search_space import Workload
from tests.helpers.refusals import refused
from tools.plan import main
from tools.planning.workload import case_of, make_parser

FLAGS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --bf16 "
    "--seq-length 256 --paro-machine dgx-h100 --world-size 8 --device-memory-gb 20"
)


def workload() -> Workload:
    return case_of(make_parser().parse_args(FLAGS.split()))


def rows(capsys: pytest.CaptureFixture[str], flags: str) -> list[list[str]]:
    main([*FLAGS.split(), "--longest-sequence", *flags.split()])
    return [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]]


def needs(length: int, layout: ContextLayout) -> int:
    given = workload()
    own = replace(
        given,
        model=replace(given.model, max_position_embeddings=length),
        seq_length=length,
        context=layout,
        global_batch_size=8 // layout.size,
    )
    return Estimator(own).memory(own.candidate(own.strategy("GGG"))).total


def test_the_longest_fits_and_hardly_more_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row[1]: row for row in rows(capsys, "--cp-comm-type a2a") if "GGG" in row[0]}
    assert [*found] == ["1", "2", "4", "8"]
    for ranks, row in found.items():
        length = int(row[-4].replace(",", ""))
        layout = ContextLayout(size=int(ranks), heads=int(ranks))
        assert needs(length, layout) <= 20_000_000_000 < needs(length * 102 // 100 + 1024, layout)
    lengths = [int(row[-4].replace(",", "")) for row in found.values()]
    assert all(more > 1.8 * less for less, more in pairwise(lengths))


def test_auto_takes_the_type_with_the_most_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    size = "--context-parallel-size 4"
    lengths = {
        name: int(rows(capsys, f"{size} --cp-comm-type {name}")[0][-4].replace(",", ""))
        for name in ("p2p", "a2a", "allgather")
    }
    (row, *_) = rows(capsys, f"{size} --cp-comm-type auto")
    assert int(row[-4].replace(",", "")) >= max(lengths.values())


def test_a_plan_with_ranks_that_share_samples_is_refused_as_a_training_is() -> None:
    words = f"{FLAGS} --context-parallel-size 16".split()
    refused(lambda: case_of(make_parser().parse_args(words)), "16 does not fit: ... 1, 2, 4 and 8")
