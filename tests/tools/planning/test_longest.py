"""The longest sequences that fit, by strategy and number of ranks that share a sample."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from paro.planning.estimator import Estimator
from paro.planning.search_space import PlanRequest
from paro.spec.context_layout import ContextLayout
from tests.helpers.commands import printed
from tests.helpers.refusals import refused
from tools.plan import main
from tools.planning.request import make_parser, plan_request_of_args

FLAGS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --bf16 "
    "--seq-length 256 --paro-machine dgx-h100 --world-size 8 --device-memory-gb 20"
)


def plan_request() -> PlanRequest:
    return plan_request_of_args(make_parser().parse_args(FLAGS.split()))


def rows(flags: str) -> list[list[str]]:
    lines = printed(main, *FLAGS.split(), "--longest-sequence", *flags.split()).splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[1:]]


def length_of(row: list[str]) -> int:
    return int(row[-4].replace(",", ""))


def needs(length: int, layout: ContextLayout) -> int:
    given = plan_request()
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


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--context-parallel-size 3", "--context-parallel-size 3 does not fit"),
        ("--context-parallel-size 16", "--context-parallel-size 16 does not fit"),
        ("--context-parallel-size 8 --cp-comm-type a2a --num-attention-heads 4", "8 ... 4 heads"),
        ("--context-parallel-size 2 --attention-backend local", "--attention-backend local"),
        ("--context-parallel-size 2 --paro-materialize rotate", "--paro-materialize rotate"),
        ("--paro-materialize rotate --num-attention-heads 4", "--paro-materialize rotate"),
        ("--device-memory-gb 1", "--device-memory-gb 1: with 1,024 tokens nothing fits"),
        ("--context-parallel-size 2 --device-memory-gb 1", "use larger devices"),
        ("--json a.json", "--longest-sequence ... --json"),
        ("--plot a.png", "--longest-sequence ... --plot"),
        ("--scaling a.png", "--longest-sequence ... --scaling"),
        ("--timeline a.png", "--longest-sequence ... --timeline"),
        ("--trace a.json", "--longest-sequence ... --trace"),
        ("--machine-file a.json", "--longest-sequence ... --machine-file"),
        ("--why-not GGG", "--longest-sequence ... --why-not"),
        ("--mtbf-hours 5", "--longest-sequence ... --mtbf-hours"),
    ],
)
def test_what_has_no_longest_sequence_is_refused(flags: str, told: str) -> None:
    refused(lambda: main([*FLAGS.split(), "--longest-sequence", *flags.split()]), told)


def test_a_strategy_under_which_nothing_fits_is_told() -> None:
    words = [*FLAGS.split(), "--longest-sequence", "--device-memory-gb", "1.6"]
    table, *none = printed(main, *words).split("\nNNI=NNG: not even 1,024 tokens fit\n")
    assert table.splitlines()[-1].startswith("NNN ")
    assert len(none) == 1
