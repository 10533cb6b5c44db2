"""The longest sequences that fit, by strategy and number of ranks that share a sample."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

from paro.context_parallel.layout import ContextLayout
from paro.planning.search.estimator import Estimator
from paro.planning.search.search_space import Workload
from tests.helpers.commands import printed
from tools.plan import main
from tools.planning.workload import case_of, make_parser

FLAGS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --bf16 "
    "--seq-length 256 --paro-machine dgx-h100 --world-size 8 --device-memory-gb 20"
)


def workload() -> Workload:
    return case_of(make_parser().parse_args(FLAGS.split()))


def rows(flags: str) -> list[list[str]]:
    lines = printed(main, *FLAGS.split(), "--longest-sequence", *flags.split()).splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[1:]]


def length_of(row: list[str]) -> int:
    return int(row[-4].replace(",", ""))


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


def test_the_longest_fits_and_hardly_more_does() -> None:
    found = {row[1]: length_of(row) for row in rows("--cp-comm-type a2a") if "GGG" in row[0]}
    assert [*found] == ["1", "2", "4", "8"]
    for ranks, length in found.items():
        layout = ContextLayout(size=int(ranks), heads=int(ranks))
        assert needs(length, layout) <= 20_000_000_000 < needs(length * 102 // 100 + 1024, layout)
    assert all(more > 1.8 * less for less, more in pairwise(found.values()))


def test_auto_takes_the_type_with_the_most_tokens() -> None:
    longest = {
        name: length_of(rows(f"--context-parallel-size 4 --cp-comm-type {name}")[0])
        for name in ("p2p", "a2a", "allgather", "auto")
    }
    assert longest["auto"] == max(longest.values())
