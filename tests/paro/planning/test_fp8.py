"""The predicted peak in fp8 and of Triton's loss, compared with the allocations of a rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model import kernels
from model.config import LoraConfig, targets_of
from paro.precision import PrecisionConfig
from paro.spec.run_spec import RunSpec
from tests.paro.planning.test_gathering import (
    BF16,
    EACH,
    FP32,
    LOGITS,
    RUNS_OF_TWO,
    SMALL,
    assert_predicted,
    run,
)


def in_fp8(
    text: str, precision: PrecisionConfig = BF16, *, size: int = 8, count: int = 2, **config: Any
) -> RunSpec:
    by_triton: dict[str, Any] = {"fp8_format": "hybrid", "fuses_fp8_casts": True}
    model = replace(SMALL, **(by_triton | config))
    return run(text, model, precision, micro_batch_size=size, num_micro_batches=count)


ADAPTERS = LoraConfig(rank=4, targets=targets_of("all-linear"))
CASES = {
    "fp8, operands by torch": in_fp8("NNG", ffn_hidden_size=512, fuses_fp8_casts=False),
    "fp8, operands in fp32 by torch": in_fp8("NIG", FP32, fuses_fp8_casts=False),
    "fp8, weights outweigh activations": in_fp8("GGG", size=1, ffn_hidden_size=2048),
    "fp8, the same by torch": in_fp8("GGG", size=1, ffn_hidden_size=2048, fuses_fp8_casts=False),
    "fp8, recomputed blocks": in_fp8("IIG", FP32, recompute=EACH),
    "fp8, recomputed blocks of one micro-batch": in_fp8("NNG", FP32, count=1, recompute=EACH),
    "fp8, runs of recomputed blocks": in_fp8(
        "GGG", size=1, recompute=RUNS_OF_TWO, ffn_hidden_size=1024
    ),
    "fp8, scores that are kept": in_fp8(
        "NNG", FP32, attention_backend="unfused", ffn_hidden_size=512
    ),
    "fp8, adapters": in_fp8("NNG", lora=ADAPTERS),
    "fp8, adapters by torch": in_fp8(
        "NNG", lora=ADAPTERS, fuses_fp8_casts=False, ffn_hidden_size=2048
    ),
    "the loss by Triton, in chunks": run(
        "GGG", replace(LOGITS, fuses_loss=True), BF16, micro_batch_size=4
    ),
}
IN_FORWARD = ("fp8, adapters by torch", "the loss by Triton, in chunks")


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


@pytest.mark.parametrize("name", CASES)
def test_prediction_is_what_a_rank_allocates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    allocate_as_gpus(monkeypatch)
    monkeypatch.setattr("model.config.LOSS_CHUNK_TOKENS", 64)
    monkeypatch.setattr("model.config._FUSED_LOSS_BYTES", 128 * 2 * LOGITS.vocab_size)
    assert_predicted(monkeypatch, CASES[name], "forward" if name in IN_FORWARD else "backward")
