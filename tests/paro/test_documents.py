"""Training with separate documents: flags reach the model; results do not depend on ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.corpora import write_conversations
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, train

# With 10 ids a tenth of the tokens end a document.
FLAGS = f"{TINY} --vocab-size 10 --global-batch-size 8 --train-iters 2"
PACKED = "--reset-position-ids --reset-attention-mask"
APART = f"{FLAGS} --eod-mask-loss {PACKED}"


@pytest.mark.parametrize(
    "flag", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]
)
def test_every_flag_changes_what_is_learned(flag: str) -> None:
    plain, changed = train(FLAGS).steps, train(f"{FLAGS} {flag}").steps
    assert plain[-1].loss != changed[-1].loss
    assert changed[-1].loss == pytest.approx(plain[-1].loss, rel=0.2)


def losses(runs: list[str], group_size: int | None) -> list[list[float]]:
    return [[step.loss for step in train(run, group_size=group_size).steps] for run in runs]


@pytest.mark.ranks
def test_ranks_make_no_difference(tmp_path: Path) -> None:
    draw = random.Random(0)
    talks = [
        (
            [draw.randrange(10) for _ in range(size)],
            [int(place > size // 2) for place in range(size)],
        )
        for size in (draw.randint(3, 20) for _ in range(40))
    ]
    prefix = write_conversations(tmp_path / "talks", [*talks, ([1, 2, 3], [0, 0, 0])])
    on_talks = f"{FLAGS} --data-path {prefix} --split 1,0,0".replace("--mock-data ", "")
    packed = f"{on_talks} {PACKED}"
    padded = f"{on_talks} --sft --calculate-per-token-loss"
    shared = " --num-attention-heads 2 --context-parallel-size 2 --cp-comm-type"
    alone = losses([f"{APART} --recompute-granularity full", packed, padded], None)
    runs = [APART, f"{packed}{shared} a2a", f"{padded}{shared} p2p --num-workers 1"]
    for found in run_ranks(losses, 4, runs, 2):
        for run, by_rank, wanted in zip(runs, found, alone, strict=True):
            assert_near(by_rank, wanted, 2e-6, run)
