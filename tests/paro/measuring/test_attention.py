"""Every way of computing attention is timed by its own kernel, and no kernel twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model.attention import QKV
from model.block_attention import AttentionKernels
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.measuring import attention
from paro.measuring.attention import attention_rates
from tests.paro.measuring.test_benchmark import alone
from tests.paro.measuring.test_device import TINY
from tools.collective_timing.training import training_config

# As torch returns them: equal to those that have these names, but other objects.
FLASH, CUDNN, MATH = (SDPBackend(n) for n in (1, 3, 0))
KEPT = "--recompute-granularity full --paro-recompute-keep core_attn"


@pytest.mark.parametrize(
    ("flags", "kernels", "sequence", "timed"),
    [
        ("", (CUDNN, CUDNN, FLASH), 48, ["whole 16", "whole 48", "documents 48"]),
        ("", (CUDNN, FLASH, FLASH), 48, ["whole 16", "whole 48", "parts 48"]),
        ("", (CUDNN, FLASH, FLASH), 16, ["whole 16", "parts 16"]),
        ("", (FLASH, FLASH, FLASH), 48, ["whole 16", "whole 48"]),
        ("", (MATH, MATH, MATH), 48, ["whole 16"]),
        (KEPT, (CUDNN, FLASH, FLASH), 16, ["parts 16", "whole 16"]),
        (KEPT, (CUDNN, CUDNN, FLASH), 48, ["parts 16", "whole 48", "documents 48"]),
    ],
)
def test_every_way_is_timed_by_its_kernel(
    flags: str,
    kernels: tuple[SDPBackend, SDPBackend, SDPBackend],
    sequence: int,
    timed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend, ways = attention.attend_saving, []

    def noted(backend: Any, qkv: QKV, documents: Any, saved: Any) -> Tensor:
        length = qkv[0].shape[1]
        way = "parts" if saved is not None else "whole"
        if documents is not None:
            assert documents.lengths == (length - 1, 1)
            way = "documents"
        ways.append(f"{way} {length}")
        return attend(backend, qkv, documents, saved)

    seconds: list[float] = []

    def median(action: Callable[[], object]) -> float:
        action()
        seconds.append(0.05 * (1 + len(seconds)))
        return seconds[-1]

    monkeypatch.setattr(attention, "attend_saving", noted)
    monkeypatch.setattr(attention, "kernels_of", lambda *_: AttentionKernels(*kernels))
    config = training_config(f"{TINY} {flags}", "gloo")
    rates = attention_rates(config.spec, sequence, alone(), median)
    assert [*dict.fromkeys(ways)] == timed
    found = dict(zip(timed, seconds, strict=True))
    by_kernel = dict(zip(kernels, rates[1:], strict=True))  # equal kernels have equal rates
    assert rates[1:] == tuple(by_kernel[kernel] for kernel in kernels)
    assert len({*rates[1:]}) == len({*kernels})
    width = config.model.num_attention_heads * config.model.kv_channels
    longest = 48 if any(way.endswith("48") for way in timed) else 16
    layers = 1 if longest == 48 else config.model.num_layers
    whole = found.get(f"whole {longest}", found[timed[0]])
    assert rates.of_sequence == pytest.approx(12 * layers * longest**2 * width / whole)


def test_all_ranks_time_as_often_where_their_kernels_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks with other kernels, as on nodes with another cuDNN, time the kernels of rank 0."""

    class FirstHasCudnn(Control):
        def gather(self, own: Any) -> list[Any]:
            return [["CUDNN_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION"], own]

    timed: list[None] = []
    rates = attention_rates(
        training_config(TINY, "gloo").spec,
        16,
        FirstHasCudnn(World(), torch.device("cpu")),
        lambda action: timed.append(None) or 1.0,
    )
    assert len(timed) == 2
    assert rates.of_parts == rates.of_sequence
