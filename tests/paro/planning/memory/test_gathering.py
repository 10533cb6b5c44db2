"""The predicted peak, compared with the allocations of a training rank."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import pytest
import torch

from model import cross_entropy
from model.config import LlamaConfig, RecomputeConfig
from model.fusion import Fusions, usable_kernels
from model.lora_config import LoraConfig, targets_of
from paro.context_parallel.layout import ALONE, ContextLayout
from paro.planning import units as planning_llama
from paro.planning.memory.tally import MemorySnapshot
from paro.planning.run_plan import Materialize, RunPlan
from paro.planning.search.run_memory import RunMemory
from paro.planning.search.trainable import Trainable, TrainableKind
from paro.precision import PrecisionConfig
from tests.paro.planning.lone_rank import allocated_at_most, lone_rank, silence
from tests.paro.planning.on_ranks import on_ranks

FP32 = PrecisionConfig(compute="fp32")
BASE_BF16 = replace(FP32, lora_base_dtype="bf16")
BF16 = PrecisionConfig(compute="bf16")
ALL_BF16 = PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True)
RUNS_OF_TWO = RecomputeConfig(granularity="full", num_layers=2)
EACH = RecomputeConfig(granularity="full")
KEEPS_CORE = replace(EACH, keeps_core=True)
ALL = Trainable()
LAST_HALF = Trainable(kind=TrainableKind.LAST_BLOCKS, share=0.5)


SMALL = LlamaConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=176,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    max_position_embeddings=64,
    vocab_size=64,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A run whose peak is at a point of interest."""

    strategy: str
    config: LlamaConfig = SMALL
    _: KW_ONLY
    precision: PrecisionConfig = FP32
    batch_size: int = 8
    seq_length: int = 64
    prefetch_units: int = 1
    num_micro_batches: int = 2
    loss_chunk: int = 512  # tokens
    trainable: Trainable = ALL
    context: ContextLayout = ALONE
    materialize: str = "gather"
    in_place: bool = False
    at: str = "backward"


def adapted(config: LlamaConfig = SMALL, targets: str = "all-linear") -> LlamaConfig:
    return replace(config, lora=LoraConfig(rank=4, targets=targets_of(targets)))


WIDE = replace(SMALL, ffn_hidden_size=2048)  # weights outweigh activations
LOGITS, LARGE_HEAD = (replace(SMALL, vocab_size=size) for size in (2048, 16384))
IN_CHUNKS = Workload("GGG", LOGITS, batch_size=4, loss_chunk=64, at="forward")
SHORT = Workload("NNG", batch_size=1, seq_length=8)
CASES = {
    "logits": Workload("IIG", LOGITS, precision=BF16, batch_size=4, at="forward"),
    "chunks of logits": replace(IN_CHUNKS, precision=BF16),
    "chunks of logits in fp32": IN_CHUNKS,
    "a tied weight, wanted by two units": Workload(
        "IIG",
        replace(LARGE_HEAD, tie_embeddings_and_output_weights=True),
        batch_size=1,
        at="forward",
    ),
    "a large embedding": replace(SHORT, config=LARGE_HEAD, at="forward of head"),
    "a large embedding in bf16": replace(
        SHORT,
        strategy="NIG",
        config=LARGE_HEAD,
        precision=ALL_BF16,
        num_micro_batches=1,
        prefetch_units=0,
        at="backward of embedding",
    ),
    "activations": Workload("NNG"),
    "scores that are kept": Workload(
        "NNG", replace(SMALL, attention_backend="unfused", ffn_hidden_size=512)
    ),
    "recomputed blocks": Workload("IIG", replace(SMALL, recompute=EACH)),
    "recomputed blocks that keep attention": Workload(
        "IIG", replace(SMALL, recompute=KEEPS_CORE, num_layers=8)
    ),
    "runs of recomputed blocks that keep attention": Workload(
        "GGG", replace(SMALL, recompute=replace(RUNS_OF_TWO, keeps_core=True), num_query_groups=2)
    ),
    "recomputed blocks below the first that trains": Workload(
        "GGG", replace(SMALL, recompute=EACH), trainable=LAST_HALF
    ),
    "adapters": Workload("ING", adapted(), precision=BF16),
    "adapters of recomputed blocks": Workload("GGG", adapted(replace(SMALL, recompute=EACH))),
    "adapters of the MLP": Workload("GGG", adapted(targets="gate_proj")),
    "frozen weights in bf16 that outweigh activations": Workload(
        "GGG", adapted(WIDE, "down_proj"), precision=BASE_BF16, batch_size=1
    ),
    "whole units and gradients": Workload("GGG", WIDE, batch_size=1),
    "nothing ahead": Workload("GGG", WIDE, batch_size=1, prefetch_units=0, num_micro_batches=1),
    "three whole units": Workload("GIG", WIDE, batch_size=1, prefetch_units=2),
    "gradients converted for their reduction": replace(
        SHORT, strategy="ING", config=WIDE, precision=BF16, num_micro_batches=1, at="reduction"
    ),
    "gradients of four blocks, reduced at once": replace(
        SHORT,
        strategy="2,2,8",
        precision=replace(BF16, optimizer="muon"),
        prefetch_units=0,
        at="the reduction of blocks.0",
    ),
    "bf16 gradients converted for the update": replace(
        SHORT, strategy="NNN", config=WIDE, precision=ALL_BF16, at="update"
    ),
}


def assert_predicted(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, *, accuracy: float = 0.01
) -> None:
    """A rank on a CPU allocates at most what is predicted, and there."""
    predicted = predict(workload, device="cpu")
    assert workload.at in predicted.name
    silence(monkeypatch)
    assert measure(workload, "cpu") == pytest.approx(predicted.total, rel=accuracy), predicted


def set_loss_chunk(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    for module in (cross_entropy, planning_llama):
        monkeypatch.setattr(module, "LOSS_CHUNK_TOKENS", workload.loss_chunk)


@pytest.mark.parametrize("name", CASES)
def test_prediction_is_what_a_rank_allocates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_loss_chunk(monkeypatch, CASES[name])
    assert_predicted(monkeypatch, CASES[name])


COMPILED = [name for name, workload in CASES.items() if workload.config.lora is None]


@pytest.mark.verify
@pytest.mark.parametrize("name", COMPILED)
def test_prediction_holds_for_compiled_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workload = CASES[name]
    workload = replace(workload, config=replace(workload.config, torch_compile="inductor"), at="")
    set_loss_chunk(monkeypatch, workload)
    assert_predicted(monkeypatch, workload, accuracy=0.02)


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
    workload = Workload(
        strategy=strategy, config=config, precision=BF16, batch_size=4, seq_length=2048, at=""
    )
    silence(monkeypatch)
    predicted = predict(workload, device="cuda")
    assert measure(workload, "cuda") == pytest.approx(predicted.total, rel=0.1)


def predict(workload: Workload, *, device: str) -> MemorySnapshot:
    strategy, _ = on_ranks(workload.strategy, world_size=8, group_size=4)
    run = RunPlan(
        model=workload.config,
        trained=workload.trainable.names(workload.config),
        recompute=workload.config.recompute,
        world_size=8,
        group_size=4,
        strategy=strategy,
        materialize=Materialize.of_flags(workload.materialize, workload.in_place),
        collective="native",
        prefetch_units=workload.prefetch_units,
        precision=workload.precision,
        device_type=device,
        seq_length=workload.seq_length,
        micro_batch_size=workload.batch_size,
        num_micro_batches=workload.num_micro_batches,
        context=workload.context,
    )
    return RunMemory(None).of(run).allocations


def measure(workload: Workload, device: str) -> int:
    """Model states and the peak of a step; the step before allocates what stays."""
    strategy, topology = on_ranks(workload.strategy, world_size=8, group_size=4)
    rank = lone_rank(
        workload.config,
        strategy,
        topology,
        workload.precision,
        device=device,
        is_trained=workload.trainable.names(workload.config).__contains__,
        prefetch_units=workload.prefetch_units,
        materialize=workload.materialize,
        rotate_in_place=workload.in_place,
    )

    length = workload.seq_length // workload.context.size
    if workload.context.size > 1:
        rank.share_samples(workload.context)

    def step() -> None:
        rank.step(workload.num_micro_batches, size=workload.batch_size, seq_length=length)

    step()
    return rank.optimizer.model_state_bytes() + allocated_at_most(step, device)
