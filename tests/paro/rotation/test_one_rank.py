"""One rank of a ring by the formulas; rotating and gathering runs compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import LlamaConfig, LoraConfig, RecomputeConfig, is_adapter
from paro.distributed.comm_stream import DONE, Event, InlineStreams, Job
from paro.distributed.groups import CommResources
from paro.spec.run_spec import Materialize
from paro.training.evaluation import evaluate
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Trained, begun, built, train
from tests.paro.checkpoint.test_resharding import Pair, Setting, check, save_and_load
from tests.paro.planning.cases import LoneRank, allocated_at_most, rank_of, run_of, silence
from tests.paro.planning.test_gathering import BF16, FP32, assert_predicted, run
from tests.paro.planning.test_units import SMALL as GROUPED
from tests.paro.planning.test_units import assert_counted, keep_norms_and_embedding, upper_half
from tests.paro.test_parity_rotation import IN_PLACE, MODEL, ROTATE

SMALL = replace(GROUPED, num_query_groups=4, max_position_embeddings=64)
TIED = replace(SMALL, tie_embeddings_and_output_weights=True)
MODES = (False, True)  # in place?


def rotating_rank(config: LlamaConfig, *, in_place: bool) -> LoneRank:
    way = Materialize.of_flags("rotate", in_place)
    return rank_of(run_of(config, "4,4,8", FP32, materialize=way))


CASES: dict[str, tuple[LlamaConfig, Callable[[str], bool]]] = {
    "untied": (SMALL, lambda _name: True),
    "tied": (TIED, lambda _name: True),
    "recomputed": (replace(SMALL, recompute=RecomputeConfig(granularity="full")), lambda _: True),
    "parts of units frozen": (SMALL, keep_norms_and_embedding),
    "lower units frozen": (SMALL, upper_half),
    "tied, embedding frozen": (TIED, upper_half),
    "adapters": (replace(SMALL, lora=LoraConfig(rank=2, targets=("wo", "w_up"))), is_adapter),
}


# Without `verify` each case but the first under one strategy, in place or not.
GRID = [
    pytest.param(
        case,
        letters,
        in_place,
        marks=[pytest.mark.verify] * ((i + j + in_place) % 2 or (i > 0 and j != i // 2 % 2)),
    )
    for (i, case), (j, letters), in_place in product(
        enumerate(CASES), enumerate(("III", "IIG", "2,2,8")), MODES
    )
]


@pytest.mark.slow("counts messages and memory of a training")
@pytest.mark.parametrize(("case", "letters", "in_place"), GRID)
def test_formulas_equal_what_a_rank_counts_and_stores(
    monkeypatch: pytest.MonkeyPatch, case: str, letters: str, in_place: bool
) -> None:
    config, is_trained = CASES[case]
    way = Materialize.of_flags("rotate", in_place)
    assert_counted(monkeypatch, config, is_trained, letters, way)


WIDE = replace(SMALL, hidden_size=128, ffn_hidden_size=4096, num_layers=2, vocab_size=8192)


@pytest.mark.parametrize("in_place", MODES)
def test_building_allocates_little_beside_what_stays(in_place: bool) -> None:
    built = []

    def build() -> None:
        rank = rotating_rank(WIDE, in_place=in_place)
        rank.optimizer.initialize(lambda _name, begin, end: torch.zeros(end - begin))
        built.append(rank)

    peak = allocated_at_most(build)
    (rank,) = built
    longest = max(unit.param_shard.nbytes for unit in rank.model.units)
    assert peak < rank.optimizer.model_state_bytes() + 3 * longest


class Noted(InlineStreams):
    """Records when a job is submitted."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def submit(self, stream: Hashable, job: Job, *, after: Event = DONE) -> Event:
        self._notes.append("shift")
        return super().submit(stream, job, after=after)


# Three shifts for four slices; each overlaps with computation on the departing slice.
@pytest.mark.parametrize(
    ("in_place", "forwards"),
    [(False, [*("shift", "slice") * 3, "slice"]), (True, [*("slice", "shift") * 3, "slice"])],
)
def test_out_of_place_a_slice_leaves_before_it_is_computed_with(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, forwards: list[str]
) -> None:
    silence(monkeypatch)
    rank = rotating_rank(SMALL, in_place=in_place)
    model, notes = rank.model, list[str]()
    ring = model.units[-1]._ring
    ring.groups = replace(ring.groups, resources=CommResources(Noted(notes)))
    attention = next(part for part in model._parts if part.spec.method == "attention")
    computed = attention._of_slice

    def noted(*args: Any) -> Any:
        notes.append("slice")
        return computed(*args)

    attention._of_slice = noted
    whole = attention.__call__

    def alone(*args: Any) -> Any:
        notes.clear()
        out = whole(*args)
        assert notes == forwards
        return out

    attention.module.attention = alone  # type: ignore[assignment]
    notes.append("not yet run")
    rank.step(1)
    assert "not yet run" not in notes


SQUARE = replace(SMALL, hidden_size=64, kv_channels=16)
TALL = replace(WIDE, vocab_size=32768, ffn_hidden_size=64)
LOGITS = replace(SMALL, vocab_size=8192)
EACH = RecomputeConfig(granularity="full")
rotating = partial(run, "IIG", micro_batch_size=32, seq_length=16, materialize=Materialize.ROTATE)
PEAKS = {
    "activations": rotating(SQUARE),
    "activations in bf16": rotating(SQUARE, BF16),
    "recomputed": rotating(replace(SQUARE, num_layers=8, recompute=EACH)),
    "recomputed in groups": rotating(
        replace(SQUARE, num_layers=6, recompute=replace(EACH, num_layers=3))
    ),
    "logits in bf16": rotating(LOGITS, BF16),
    "slices in bf16": rotating(WIDE, BF16, micro_batch_size=1),
    "vocabulary": rotating(TALL, micro_batch_size=1),
}


@pytest.mark.slow("counts every allocation of a step")
@pytest.mark.parametrize(
    ("name", "in_place"),
    [
        pytest.param(name, in_place, marks=[pytest.mark.verify] * ((i + in_place) % 2))
        for (i, name), in_place in product(enumerate(PEAKS), MODES)
    ],
)
def test_prediction_is_what_a_rank_allocates(
    monkeypatch: pytest.MonkeyPatch, name: str, in_place: bool
) -> None:
    way = Materialize.of_flags("rotate", in_place)
    at = "head" if "logits" in name else "backward"
    assert_predicted(monkeypatch, replace(PEAKS[name], materialize=way), at, accuracy=0.05)


GATHERED = f"{MODEL} --num-attention-heads 4 --global-batch-size 16 --micro-batch-size 2"
ROTATED = f"{GATHERED} {ROTATE}"
TWO_BYTES = [
    "--bf16 --paro-strategy IIG --paro-rotate-in-place --grad-reduce-in-bf16",
    "--fp16 --loss-scale 1024 --paro-strategy III",
]


EVALUATED = [
    f"{GATHERED} --paro-strategy GGG",
    *(f"{ROTATED} --paro-strategy {more}" for more in ("IIG", f"III {IN_PLACE}")),
]


def held_out(flags: str) -> float | None:
    config, training = built(f"{flags} --train-iters 1 --paro-group-size 2")
    loss = evaluate(training, begun(config, training)[1], 2).loss
    training.close()
    return loss


def train_and_evaluate(cases: Sequence[str]) -> tuple[list[Trained], list[float | None]]:
    trained = [train(f"{flags} --train-iters 2", group_size=2) for flags in cases]
    return trained, [*map(held_out, EVALUATED)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "flags", [TWO_BYTES[0], pytest.param(TWO_BYTES[1], marks=pytest.mark.verify)]
)
def test_two_byte_types_and_evaluations_follow_the_gathered_run(flags: str) -> None:
    cases = [f"{ROTATED} {flags}", f"{GATHERED} {flags.replace(IN_PLACE, '')}"]
    for (rotated, wanted), (loss, *losses) in run_ranks(train_and_evaluate, 4, cases):
        for step, step_wanted in zip(rotated.steps, wanted.steps, strict=True):
            assert_near([step.loss], [step_wanted.loss], 0.001, flags)
            assert_near([step.grad_norm], [step_wanted.grad_norm], 0.01, flags)
            # Gathers of the embedding and of the head differ; steps between groups do not.
            assert step.sent.inter == pytest.approx(step_wanted.sent.inter, rel=0.2), flags
        assert_near(losses, [loss] * 2, 2e-6, "evaluated")


PLACED = partial(Setting, world_size=4, group_size=2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            *(PLACED(strategy="IIG", more=ROTATE), PLACED(strategy="GGG")),
            marks=pytest.mark.verify,
            id="to gathered",
        ),
        pytest.param(
            *(PLACED(strategy="NIG"), PLACED(strategy="III", more=f"{ROTATE} {IN_PLACE}")),
            id="from gathered",
        ),
    ],
)
def test_a_checkpoint_moves_between_rotated_and_gathered(
    tmp_path: Path, before: Setting, after: Setting
) -> None:
    there, here = zip(*run_ranks(save_and_load, 4, [before, after], tmp_path), strict=True)
    check(Pair(before, after, asynchronous=False), (there, here))
