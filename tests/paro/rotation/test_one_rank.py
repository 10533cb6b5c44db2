"""What one rank of a ring counts, stores and allocates, against the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from model.config import LlamaConfig, RecomputeConfig
from paro.planning.cost_model import model_state_bytes, traffic_per_step
from paro.planning.llama import units_of
from paro.precision import PrecisionConfig
from paro.rotation.ring import chunk_numel
from tests.paro.planning.lone_rank import allocated_at_most, lone_rank, silence
from tests.paro.planning.on_ranks import on_ranks
from tests.paro.planning.test_llama import SMALL as GROUPED
from tests.paro.planning.test_llama import keep_norms_and_embedding, upper_half

SMALL = replace(GROUPED, num_query_groups=4)
TIED = replace(SMALL, tie_embeddings_and_output_weights=True)
MODES = ("out of place", "in place")
CASES: dict[str, tuple[LlamaConfig, Callable[[str], bool]]] = {
    "untied": (SMALL, lambda _name: True),
    "tied": (TIED, lambda _name: True),
    "recomputed": (replace(SMALL, recompute=RecomputeConfig(granularity="full")), lambda _: True),
    "parts of units frozen": (SMALL, keep_norms_and_embedding),
    "lower units frozen": (SMALL, upper_half),
    "tied, embedding frozen": (TIED, upper_half),
}


@pytest.mark.parametrize(("case", "mode"), [*product(CASES, MODES)])
@pytest.mark.parametrize("letters", ["III", "IIG", "2,2,8"])
def test_formulas_equal_what_a_rank_counts_and_stores(
    monkeypatch: pytest.MonkeyPatch, case: str, mode: str, letters: str
) -> None:
    config, is_trained = CASES[case]
    strategy, topology = on_ranks(letters, world_size=8, group_size=4)
    precision = PrecisionConfig(compute="bf16", accumulate_allreduce_grads_in_fp32=True)
    units = units_of(config, world_size=8, is_trained=is_trained, rotated_over=strategy.params)
    silence(monkeypatch)
    rank = lone_rank(config, strategy, topology, precision, is_trained=is_trained, rotate=mode)
    assert rank.optimizer.model_state_bytes() == model_state_bytes(strategy, units, precision).total
    rank.step(2)  # sends no update yet
    for num_micro_batches in (1, 3):
        expected = traffic_per_step(strategy, topology, units, precision, num_micro_batches)
        assert rank.step(num_micro_batches) == expected


WIDE = replace(SMALL, hidden_size=128, ffn_hidden_size=4096, num_layers=2, vocab_size=8192)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("degree", [2, 4])
def test_no_rank_ever_holds_a_whole_block(
    monkeypatch: pytest.MonkeyPatch, mode: str, degree: int
) -> None:
    """Weights outweigh activations: what a step allocates is slices, and matrices of a slice."""
    strategy, topology = on_ranks(f"{degree},{degree},8", world_size=8, group_size=4)
    precision = PrecisionConfig(compute="fp32")
    silence(monkeypatch)
    rank = lone_rank(WIDE, strategy, topology, precision, rotate=mode)
    slices = [unit.layout.numel // degree * 4 for unit in rank.model.trainable_units]
    largest = max(slices)
    peak = allocated_at_most(lambda: rank.step(2, size=1, seq_length=4))
    held = rank.model.units[0].context.ledger.slices
    chunk = chunk_numel(largest // 4, torch.float32) * 4
    bound = 3 * largest if mode == "out of place" else largest + 2 * chunk
    assert held.peak_bytes <= bound
    # Beside them one gradient on its way to the slice it is added to, and little else.
    matrix = max(
        span.box.numel * 4 for unit in rank.model.trainable_units for span in unit.layout.spans
    )
    assert peak < bound + 2.5 * matrix


@pytest.mark.parametrize("mode", MODES)
def test_building_allocates_little_beside_what_stays(mode: str) -> None:
    strategy, topology = on_ranks("4,4,8", world_size=8, group_size=4)
    precision = PrecisionConfig(compute="fp32")
    built = []

    def build() -> None:
        rank = lone_rank(WIDE, strategy, topology, precision, rotate=mode)
        rank.optimizer.initialize(lambda _name, begin, end: torch.zeros(end - begin))
        built.append(rank)

    peak = allocated_at_most(build)
    (rank,) = built
    longest = max(unit.param_shard.nbytes for unit in rank.model.units)
    assert peak < rank.optimizer.model_state_bytes() + 3 * longest
