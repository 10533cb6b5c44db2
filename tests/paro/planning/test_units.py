"""Formulas of LLaMA's units and activations, compared with the real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from model.config import LlamaConfig, LoraConfig, RecomputeConfig, is_adapter, targets_of
from model.initialization import initialize_whole
from model.llama import Llama
from model.rotary import rotations
from paro.planning.run_memory import RunMemory
from paro.precision import PrecisionConfig
from paro.sharding.buffers import TORCH_TYPES
from paro.spec.run_spec import Materialize, RunSpec
from paro.spec.sharding_spec import state_bytes
from paro.strategy import legal_letters
from tests.paro.planning.lone_rank import lone_rank, silence
from tests.paro.planning.on_ranks import on_ranks, run_of

SMALL = LlamaConfig(
    num_layers=3,
    hidden_size=20,
    ffn_hidden_size=37,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    max_position_embeddings=16,
    vocab_size=59,
)
TIED = replace(SMALL, tie_embeddings_and_output_weights=True)
ADAPTED = replace(SMALL, lora=LoraConfig(rank=2, targets=targets_of("all-linear")))
MODERN = replace(SMALL, add_qkv_bias=True, qk_layernorm=True)


def keep_norms_and_embedding(name: str) -> bool:
    return "norm" in name or name == "embedding.weight"


def upper_half(name: str) -> bool:
    return name.startswith(("blocks.1.w", "blocks.2.", "head."))


CASES: dict[str, tuple[LlamaConfig, Callable[[str], bool]]] = {
    "untied": (SMALL, lambda _name: True),
    "tied": (TIED, lambda _name: True),
    "biases and norms of heads": (MODERN, lambda _name: True),
    "parts of units frozen": (SMALL, keep_norms_and_embedding),
    "lower units frozen": (SMALL, upper_half),
    "tied, embedding frozen": (TIED, upper_half),
    "adapters": (ADAPTED, is_adapter),
}


@pytest.mark.parametrize(
    ("plan_request", "letters"),
    [
        *product(["untied"], [*legal_letters(), "2,4,8", "1,2,8"]),
        *product([name for name in CASES if name != "untied"], ["NNG", "IIG", "GGG", "4,2,8"]),
    ],
)
def test_formulas_equal_what_a_rank_counts_and_stores(
    monkeypatch: pytest.MonkeyPatch, plan_request: str, letters: str
) -> None:
    config, is_trained = CASES[plan_request]
    assert_counted(monkeypatch, config, is_trained, letters)


def assert_counted(
    monkeypatch: pytest.MonkeyPatch,
    config: LlamaConfig,
    is_trained: Callable[[str], bool],
    letters: str,
    *,
    rotates: bool = False,
    in_place: bool = False,
    **bits: int,
) -> None:
    """A rank holds the model states and sends the bytes of the formulas."""
    strategy, topology = on_ranks(letters, world_size=8, group_size=4)
    precision = PrecisionConfig(compute="bf16", accumulate_allreduce_grads_in_fp32=True, **bits)
    materialize = "rotate" if rotates else "gather"
    way = Materialize.of_flags(materialize, in_place)
    run, plans = (
        run_of(config, letters, precision, is_trained=is_trained, materialize=way),
        RunMemory(None),
    )
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
    states = state_bytes(run.specs(plans.units(run)))
    assert rank.optimizer.model_state_bytes() == states.total
    rank.step(2)  # sends no updated parameters yet
    for num_micro_batches in (1, 3):
        assert rank.step(num_micro_batches) == plans.sent(run, num_micro_batches)


COMPILED = replace(MODERN, torch_compile="aot_eager")
UNFUSED = replace(SMALL, attention_backend="unfused")
RECOMPUTE = {
    "none": None,
    "selective": RecomputeConfig(granularity="selective"),
    "every block": RecomputeConfig(granularity="full"),
    "runs of two": RecomputeConfig(granularity="full", num_layers=2),
    "the first two": RecomputeConfig(granularity="full", method="block", num_layers=2),
}


@pytest.mark.slow("one of them imports the compiler")
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    ("compute", "model"),
    [
        *product(("fp32", "bf16"), (SMALL, COMPILED, UNFUSED)),
        *product(("bf16",), (replace(SMALL, num_query_groups=4), MODERN)),
        ("fp32", replace(UNFUSED, num_query_groups=4)),
    ],
)
def test_activations_are_what_autograd_saves(
    recompute: str, compute: str, model: LlamaConfig
) -> None:
    config = replace(model, recompute=RECOMPUTE[recompute])
    precision, shape = PrecisionConfig(compute=compute), {"world_size": 1, "group_size": 1}
    run = run_of(config, "NNN", precision, micro_batch_size=2, device_type="cpu", **shape)
    *units, head = (own for _, own in RunMemory(None).tally(run).activations)
    # The gradient of the head's normalized input is no saved tensor: the loss itself keeps it.
    gradient = run.num_tokens * config.hidden_size * run.compute_bytes
    expected = sum(unit.kept for unit in units) + head.kept - gradient
    assert saved_bytes(run) == expected


def saved_bytes(run: RunSpec) -> int:
    """Bytes of the storages saved for backward, without parameters and rotary tables."""
    config, dtype = run.config, TORCH_TYPES[run.precision.compute]
    model = Llama(config).to(dtype)
    initialize_whole(model, config, seed=1)
    turned = rotations(config, run.seq_length, dtype, torch.device("cpu"))
    resident = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *turned)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens_BS = torch.zeros(run.micro_batch_size, run.seq_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens_BS, tokens_BS.clone(), torch.ones(tokens_BS.shape))
    return sum(
        tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in resident
    )
