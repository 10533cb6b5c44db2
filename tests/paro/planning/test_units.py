"""Bytes that a rank holds and sends: formulas, compared with the real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from model.config import LlamaConfig, LoraConfig, is_adapter, targets_of
from paro.planning.run_memory import RunMemory
from paro.planning.sending import traffic_of
from paro.precision import PrecisionConfig
from paro.spec.run_spec import Materialize
from paro.spec.sharding_spec import specs_of, state_bytes
from paro.strategy import legal_letters
from tests.helpers.models import llama
from tests.paro.planning.lone_rank import lone_rank, silence
from tests.paro.planning.on_ranks import on_ranks, one_unit, run_of

SMALL = llama(3, 20, 37, heads=(4, 2, 6), length=16, vocab=59)
TIED = replace(SMALL, tie_embeddings_and_output_weights=True)
ADAPTED = replace(SMALL, lora=LoraConfig(rank=2, targets=targets_of("all-linear")))
MODERN = replace(SMALL, add_qkv_bias=True, qk_layernorm=True)


EXACT_SUMS = PrecisionConfig(compute="bf16", accumulate_allreduce_grads_in_fp32=True)


def all_train(_name: str) -> bool:
    return True


def keep_norms_and_embedding(name: str) -> bool:
    return "norm" in name or name == "embedding.weight"


def upper_half(name: str) -> bool:
    return name.startswith(("blocks.1.w", "blocks.2.", "head."))


CASES: dict[str, tuple[LlamaConfig, Callable[[str], bool]]] = {
    "untied": (SMALL, all_train),
    "tied": (TIED, all_train),
    "biases and norms of heads": (MODERN, all_train),
    "parts of units frozen": (SMALL, keep_norms_and_embedding),
    "lower units frozen": (SMALL, upper_half),
    "tied, embedding frozen": (TIED, upper_half),
    "adapters": (ADAPTED, is_adapter),
}


@pytest.mark.parametrize(
    ("name", "letters"),
    [
        *product(["untied"], [*legal_letters(), "2,4,8", "1,2,8"]),
        *product([name for name in CASES if name != "untied"], ["NNG", "GGG", "4,2,8"]),
    ],
)
def test_formulas_equal_what_a_rank_counts_and_stores(
    monkeypatch: pytest.MonkeyPatch, name: str, letters: str
) -> None:
    config, is_trained = CASES[name]
    assert_counted(monkeypatch, config, is_trained, letters)


def assert_counted(
    monkeypatch: pytest.MonkeyPatch,
    config: LlamaConfig,
    is_trained: Callable[[str], bool],
    letters: str,
    *,
    rotates: bool = False,
    in_place: bool = False,
    **changes: Any,
) -> None:
    """The last rank holds the model states and sends the bytes of the formulas."""
    strategy, topology = on_ranks(letters, world_size=8, group_size=4)
    precision = replace(EXACT_SUMS, **changes)
    materialize = "rotate" if rotates else "gather"
    way = Materialize.of_flags(materialize, in_place)
    run = run_of(config, letters, precision, is_trained=is_trained, materialize=way)
    plans = RunMemory(None)
    specs = run.specs(plans.units(run))
    silence(monkeypatch)
    rank = lone_rank(
        config,
        strategy,
        topology,
        precision,
        is_trained=is_trained,
        materialize=materialize,
        rotate_in_place=in_place,
    )
    assert rank.optimizer.model_state_bytes() == state_bytes(specs).total
    rank.step(2)  # sends no updated parameters yet
    for num_micro_batches in (1, 3):
        assert rank.step(num_micro_batches) == plans.sent(run, num_micro_batches, rank=7)
    rank.step(2, full_precision=True)
    moves, exact = plans.step(run).of_step(2), [spec.exact for spec in specs]
    wanted = traffic_of(moves, exact, plans.sender(run, rank=7))
    assert rank.step(2, full_precision=True) == wanted
    assert (wanted == plans.sent(run, 2, rank=7)) is not precision.quantizes


WIDE = replace(SMALL, hidden_size=96, ffn_hidden_size=160, num_query_groups=4, kv_channels=24)
WITH_ADAPTERS = replace(WIDE, lora=LoraConfig(rank=32, targets=("wo", "w_up")))
CODES = {"inter_param_bits": 4, "inter_grad_bits": 4, "accumulate_allreduce_grads_in_fp32": False}


@pytest.mark.parametrize(
    ("letters", "config", "is_trained", "changes"),
    [
        ("NIG", WIDE, all_train, CODES),
        ("NNG", WIDE, all_train, {"optimizer": "muon", "ema_decay": 0.9}),
        ("IIG", WITH_ADAPTERS, is_adapter, {"lora_base_dtype": "bf16", "compute": "fp32"}),
        # Adapters are in one unit with the norms, which are replicated.
        (
            "IIG",
            WITH_ADAPTERS,
            is_adapter,
            {"ema_decay": 0.9, "inter_param_bits": 4, "rotates": True},
        ),
    ],
)
def test_codes_buckets_and_types_are_counted_too(
    monkeypatch: pytest.MonkeyPatch,
    letters: str,
    config: LlamaConfig,
    is_trained: Callable[[str], bool],
    changes: dict[str, Any],
) -> None:
    assert_counted(monkeypatch, config, is_trained, letters, **changes)


def test_the_master_is_stored_unless_it_is_the_parameter_shard() -> None:
    """And the average of a parameter in any case, if there is one."""
    fp32, bf16 = PrecisionConfig(compute="fp32"), PrecisionConfig(compute="bf16")
    rounded = replace(fp32, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    for letters, precision, of_element in (
        ("GIG", fp32, 8), ("IIG", fp32, 12), ("IIG", rounded, 8), ("GIG", bf16, 12),
        ("GIG", replace(fp32, ema_decay=0.9), 12), ("GIG", replace(bf16, ema_decay=0.9), 16),
    ):  # fmt: skip
        placed = on_ranks(letters, world_size=4, group_size=2)
        states = state_bytes(specs_of(one_unit(400), *placed, precision))
        assert states.optim == of_element * 100
