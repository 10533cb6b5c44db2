"""The predicted peak, compared with the allocations of a training rank; shared samples; fp8."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from model import kernels
from model.config import LlamaConfig, LoraConfig, RecomputeConfig, targets_of
from model.fusion import Fusions, usable_kernels
from model.trainable import Trainable
from paro.planning.run_memory import RunMemory
from paro.precision import PrecisionConfig
from paro.spec.context_layout import ContextLayout
from paro.spec.outer_steps import OuterConfig
from paro.spec.run_spec import RunSpec
from tests.helpers.training import llama
from tests.paro.planning.cases import allocated_at_most, rank_of, run_of, silence

FP32 = PrecisionConfig(compute="fp32")
BASE_BF16 = replace(FP32, lora_base_dtype="bf16")
BF16 = PrecisionConfig(compute="bf16")
ALL_BF16 = PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True)
RUNS_OF_TWO = RecomputeConfig(granularity="full", num_layers=2)
EACH = RecomputeConfig(granularity="full")
KEEPS_CORE = replace(EACH, keeps_core=True)
ALL = Trainable()


SMALL = llama(4, 64, 176, heads=(4, 4, 16), length=64, vocab=64)


def run(
    text: str,
    config: LlamaConfig = SMALL,
    precision: PrecisionConfig = FP32,
    *,
    trainable: Trainable = ALL,
    **changes: Any,
) -> RunSpec:
    """A run of two micro-batches of 8 samples on 8 CPU ranks."""
    given = {"micro_batch_size": 8, "seq_length": 64, "device_type": "cpu"} | changes
    trains = trainable.names(config).__contains__
    return run_of(config, text, precision, is_trained=trains, **given)


def adapted(config: LlamaConfig = SMALL, targets: str = "all-linear") -> LlamaConfig:
    return replace(config, lora=LoraConfig(rank=4, targets=targets_of(targets)))


WIDE = replace(SMALL, ffn_hidden_size=2048)  # weights outweigh activations
LOGITS, LARGE_HEAD = (replace(SMALL, vocab_size=size) for size in (2048, 16384))
TIED = replace(LARGE_HEAD, tie_embeddings_and_output_weights=True)
# Blocks outweigh their largest matrices, and model states what is alive in backward.
NARROW = replace(SMALL, ffn_hidden_size=64, num_layers=16)
UNFUSED = replace(SMALL, attention_backend="unfused", ffn_hidden_size=512)
GROUPED_RUNS = replace(SMALL, recompute=replace(RUNS_OF_TWO, keeps_core=True), num_query_groups=2)
one, short = (partial(run, micro_batch_size=1, seq_length=length) for length in (64, 8))
of_four = partial(
    short, config=SMALL, precision=replace(BF16, optimizer="muon"), prefetch_units=0, group_size=2
)
IN_CHUNKS = "chunks of logits"
OUTER = OuterConfig(outer_steps=1, outer_warmup=0, outer_bits=16)


HALF = run("GGG", replace(SMALL, recompute=EACH), trainable=Trainable(share=0.5))
BY_MUON = of_four("NNG", config=NARROW, precision=replace(FP32, optimizer="muon"))
CASES = {
    "logits": run("IIG", LOGITS, BF16, micro_batch_size=4),
    "chunks of logits": run("GGG", LOGITS, BF16, micro_batch_size=4),
    "a tied weight, wanted by two units": one("IIG", TIED),
    "a large embedding": short("NNG", LARGE_HEAD),
    "one in bf16": short("NIG", LARGE_HEAD, ALL_BF16, num_micro_batches=1, prefetch_units=0),
    "activations": run("NNG"),
    "scores that are kept": run("NNG", UNFUSED),
    "all but attention": run("IIG", replace(SMALL, recompute=KEEPS_CORE, num_layers=8)),
    "runs of all but attention": run("GGG", GROUPED_RUNS),
    "recomputed blocks below the first that trains": HALF,
    "adapters": run("ING", adapted(), BF16),
    "adapters of recomputed blocks": run("GGG", adapted(replace(SMALL, recompute=EACH))),
    "adapters of the MLP": run("GGG", adapted(targets="gate_proj")),
    "frozen weights outweigh activations": one("GGG", adapted(WIDE, "down_proj"), BASE_BF16),
    "whole units and gradients": one("GGG", WIDE),
    "three whole units": one("GIG", WIDE, prefetch_units=2),
    "converted for the reduction": short("ING", WIDE, BF16, num_micro_batches=1),
    "gradients of four blocks, reduced at once": of_four("IIG"),
    "parts of the gradients of four blocks": BY_MUON,
    "bf16 gradients converted for the update": short("NNN", WIDE, ALL_BF16),
    # Of many groups of one rank, after each step.
    "a round of outer steps": short("NNN", LARGE_HEAD, world_size=64, group_size=1, outer=OUTER),
    "states in host memory": short("NNI", WIDE, replace(BF16, optimizer_cpu_offload=True)),
}
# Where the peak is, if it is in no backward.
AT = {
    **dict.fromkeys(("logits", IN_CHUNKS, "a tied weight, wanted by two units"), "forward"),
    **dict.fromkeys(("adapters by torch", "the loss by Triton, in chunks"), "forward"),
    "a large embedding": "forward of head",
    "one in bf16": "backward of embedding",
    "converted for the reduction": "reduction",
    "a round of outer steps": "a round",
    "gradients of four blocks, reduced at once": "the reduction of blocks.0",
    "parts of the gradients of four blocks": "the reduction of blocks.12",
    **dict.fromkeys(("bf16 gradients converted for the update", "states in host memory"), "update"),
}


def assert_predicted(
    monkeypatch: pytest.MonkeyPatch, run: RunSpec, at: str = "backward", *, accuracy: float = 0.01
) -> None:
    """A rank allocates at most what is predicted, and there."""
    predicted = RunMemory(None).of(run).allocations
    assert at in predicted.name
    silence(monkeypatch)
    rank = rank_of(run, device=run.device_type)
    if run.context.size > 1:
        rank.share_samples(run.context)
    length = run.seq_length // run.context.size

    def step() -> None:
        rank.step(run.num_micro_batches, size=run.micro_batch_size, seq_length=length)

    step()  # allocates what stays
    held = rank.optimizer.model_state_bytes() + allocated_at_most(step, run.device_type)
    assert held == pytest.approx(predicted.total, rel=accuracy), predicted


def set_loss_chunk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("model.config.LOSS_CHUNK_TOKENS", 64 if name == IN_CHUNKS else 512)


@pytest.mark.slow("profiles a rank's memory")
@pytest.mark.parametrize("name", CASES)
def test_prediction_is_what_a_rank_allocates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_loss_chunk(monkeypatch, name)
    assert_predicted(monkeypatch, CASES[name], AT.get(name, "backward"))


COMPILED = [name for name, run in CASES.items() if run.model.lora is None]


@pytest.mark.verify
@pytest.mark.parametrize("name", COMPILED)
def test_prediction_holds_for_compiled_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = CASES[name]
    compiled = replace(given, model=replace(given.model, torch_compile="inductor"))
    set_loss_chunk(monkeypatch, name)
    assert_predicted(monkeypatch, compiled, at="", accuracy=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["NNG", "IIG", "GGG"])
@pytest.mark.parametrize("recompute", [None, EACH])
def test_prediction_is_what_a_gpu_allocates(
    monkeypatch: pytest.MonkeyPatch, strategy: str, recompute: RecomputeConfig | None
) -> None:
    """Large enough that the allocator's rounding and library workspaces do not matter."""
    config = replace(
        SMALL,
        num_layers=8,
        hidden_size=1024,
        ffn_hidden_size=2752,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=128,
        max_position_embeddings=2048,
        vocab_size=32000,
        recompute=recompute,
    )
    config = usable_kernels(config, Fusions(), torch.bfloat16, torch.device("cuda")).config
    given = run(strategy, config, BF16, micro_batch_size=4, seq_length=2048, device_type="cuda")
    assert_predicted(monkeypatch, given, at="", accuracy=0.1)


HEADS = ContextLayout(size=4, heads=4)


# In bf16 a CPU's attention has buffers of its own, of whole samples where heads are exchanged.
def shared(layout: ContextLayout = HEADS, *, size: int = 4, **config: Any) -> RunSpec:
    """1,024 tokens in `size` samples."""
    model, length = replace(SMALL, **config), 1024 // size
    return run("GGG", model, micro_batch_size=size, seq_length=length, context=layout)


def every_third(names: Iterable[str]) -> list[Any]:
    """The names of cases, of which `make verify` has the others."""
    verify = pytest.mark.verify
    return [pytest.param(name, marks=[verify] * (n % 3 > 0)) for n, name in enumerate(names)]


HEADS_AND_RING = ContextLayout(size=8, heads=4, inner=4)
TURNS = ContextLayout(size=8, inner=2)
OF_SHARED_SAMPLES = {
    "heads are exchanged": shared(),
    "kv are repeated, blocks recomputed": shared(num_query_groups=2, recompute=EACH),
    "blocks are recomputed but for attention": shared(recompute=KEEPS_CORE),
    "the core is recomputed": shared(recompute=RecomputeConfig(granularity="selective")),
    "a ring inside a group": shared(ContextLayout(size=4)),
    "a ring over groups": shared(ContextLayout(size=8, inner=8)),
    "a ring between groups, and in each": shared(ContextLayout(size=8)),
    "more turns, blocks recomputed": shared(TURNS, num_query_groups=2, recompute=EACH),
    "keys and values are gathered": shared(ContextLayout(size=8, gathers=True)),
    "heads are exchanged, keys and values go round": shared(HEADS_AND_RING),
    # Of one sample, heads are views of the message that brought them.
    "the same of one sample": shared(HEADS_AND_RING, size=1),
}


@pytest.mark.slow("profiles a rank's memory")
@pytest.mark.parametrize("name", every_third(OF_SHARED_SAMPLES))
def test_prediction_holds_for_shared_samples(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert_predicted(monkeypatch, OF_SHARED_SAMPLES[name])


def in_fp8(
    text: str, precision: PrecisionConfig = BF16, *, size: int = 8, **config: Any
) -> RunSpec:
    by_triton: dict[str, Any] = {"fp8_format": "hybrid", "fuses_fp8_casts": True}
    model = replace(SMALL, **(by_triton | config))
    return run(text, model, precision, micro_batch_size=size)


ADAPTERS = LoraConfig(rank=4, targets=targets_of("all-linear"))
BY_TORCH = {"fuses_fp8_casts": False}
IN_FP8 = {
    "operands by torch": in_fp8("NNG", ffn_hidden_size=512, **BY_TORCH),
    "weights outweigh activations": in_fp8("GGG", size=1, ffn_hidden_size=2048),
    "recomputed blocks": in_fp8("IIG", FP32, recompute=EACH),
    "runs of blocks": in_fp8("GGG", size=1, recompute=RUNS_OF_TWO, ffn_hidden_size=1024),
    "scores": in_fp8("NNG", FP32, attention_backend="unfused", ffn_hidden_size=512),
    "adapters": in_fp8("NNG", lora=ADAPTERS),
    "adapters by torch": in_fp8("NNG", lora=ADAPTERS, ffn_hidden_size=2048, **BY_TORCH),
    "the loss by Triton, in chunks": run(
        "GGG", replace(LOGITS, fuses_loss=True), BF16, micro_batch_size=4
    ),
}


def allocate_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes matmuls in fp8 allocate their result alone, and kernels nothing; no values."""

    def product(
        left_MK: Tensor, right_KN: Tensor, *, out_dtype: torch.dtype, **_: object
    ) -> Tensor:
        return torch.empty(left_MK.shape[0], right_KN.shape[1], dtype=out_dtype)

    # Else torch.compile, which lists torch's functions once, would not know the one put back.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    monkeypatch.setattr(torch, "_scaled_mm", product)
    for name in ("_largest", "_cast", "_cross_entropy"):
        monkeypatch.setattr(kernels, name, defaultdict(lambda: lambda *_, **__: None))


@pytest.mark.slow("profiles a rank's memory")
@pytest.mark.parametrize("name", every_third(IN_FP8))
def test_prediction_holds_in_fp8(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    allocate_as_gpus(monkeypatch)
    monkeypatch.setattr("model.config.LOSS_CHUNK_TOKENS", 64)
    monkeypatch.setattr("model.config._FUSED_LOSS_BYTES", 128 * 2 * LOGITS.vocab_size)
    assert_predicted(monkeypatch, IN_FP8[name], AT.get(name, "backward"))
