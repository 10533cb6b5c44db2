"""A device is timed so that the planner reproduces the measured times, attention by its kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model.attention import QKV
from model.block_attention import AttentionKernels
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.machine.machine import Device, Machine
from paro.measuring import attention
from paro.measuring import device as timing
from paro.measuring.attention import attention_rates
from paro.measuring.device import Effort, measure_device, slice_of
from paro.planning.estimator import Estimator
from paro.planning.search_space import PlanRequest
from tests.paro.measuring.test_measure import alone
from tests.paro.planning.test_units import SMALL
from tools.collective_timing.training import training_config

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --seq-length 16 "
    "--make-vocab-size-divisible-by 1 --bf16"
)


# Takes flags, the seconds of timings in their order, and more of `measure_device`.
Timing = Callable[..., tuple[RunConfig, Device]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timing:
    """The device of a training whose timings take these seconds, in their order."""

    def measure(flags: str, *seconds: float, **more: Any) -> tuple[RunConfig, Device]:
        times, config = iter(seconds), training_config(f"{TINY} {flags}", "gloo")
        monkeypatch.setattr(timing._StepTimer, "median", lambda *_: next(times))
        return config, measure_device(config, alone(), **{"group_size": 1, **more})

    monkeypatch.setattr(timing, "_cores", lambda _: 0.25)
    return measure


@pytest.mark.parametrize("part", ["", "--trainable last-blocks:0.5", "--lora-rank 2"])
def test_the_planner_computes_what_was_timed(timed: Timing, part: str) -> None:
    # Update, 1 and 5 micro-batches, attention, product, codes, jobs.
    config, device = timed(part, 0.3, 1.4, 1.4 + 4 * 1.0, 0.1, 1e-9, 0.017, 0.2)
    assert device.job_seconds == pytest.approx(0.2 / 100)
    assert device.attention_flops == pytest.approx(2 * 12 * 16 * 16 * 32 / 0.1)  # of two blocks
    assert device.coding_bytes_per_second == pytest.approx(170 * 2**20 / 0.017)
    for count, seconds in ((1, 1.4), (5, 5.4)):
        assert planned_seconds(config, device, 16, count) == pytest.approx(seconds, rel=1e-6)


def planned_seconds(config: RunConfig, device: Device, length: int, count: int = 1) -> float:
    """A step of one rank alone of `count` micro-batches of one sample."""
    case = PlanRequest(
        model=config.model,
        machine=Machine(name="one", source="", world_size=1, group_size=1, device=device),
        group_size=1,
        seq_length=length,
        micro_batch_size=1,
        global_batch_size=count,
        precision=config.precision,
        trainable=config.trainable,
        device_type="cpu",
    )
    return Estimator(case).estimate(case.candidate(case.strategy("NNN"))).seconds


@pytest.mark.parametrize(
    ("flags", "sequence", "longest", "heads"),
    [
        ("", 16, 16, 2),
        ("", 48, 48, 2),
        ("", 1024, 80, 1),  # in 0.4 s
        ("--attention-backend unfused", 48, 16, 2),
    ],
)
def test_attention_is_timed_for_the_sequence_to_plan_for(
    timed: Timing, flags: str, sequence: int, longest: int, heads: int
) -> None:
    # Two heads and 16 tokens take 0.0245 s, one head and 80 tokens 0.31 s.
    attention = (0.049, *([0.3] if longest > 16 else []))
    times = (0.3, 1.4, 1.4 + 4 * 1.0, *attention, 1e-9, 1e-9, 1e-9)
    config, device = timed(flags, *times, sequence=sequence)
    of_micro_batch = 2 * 12 * 16 * 16 * 32 / 0.049
    of_longest = 12 * longest**2 * heads * 16 / 0.3 if longest > 16 else of_micro_batch
    assert device.attention_flops == pytest.approx(of_longest)
    as_timed = replace(device, attention_flops=of_micro_batch)
    assert planned_seconds(config, as_timed, 16) == pytest.approx(1.4)


def test_blocks_that_are_not_timed_take_as_long_as_those_that_are(timed: Timing) -> None:
    # Update; 1 and 3 micro-batches of 2 layers, then of 1; attention, product, codes, jobs.
    times = (0.3, 1.4, 1.4 + 2 * 1.0, 0.9, 0.9 + 2 * 0.6, 0.1, 1e-9, 0.017, 0.2)
    effort = Effort(num_layers=2, micro_batches=2)
    config, device = timed("--num-layers 6", *times, effort=effort)
    rates = device.sustained_flops, device.memory_bytes_per_second, device.attention_flops
    computed = timing._planned(config.spec, *rates)
    assert computed.micro_batch == pytest.approx(1.0 + 4 * (1.0 - 0.6))
    assert device.piece_seconds == 0


def test_slices_cost_what_as_many_small_models_take_longer(timed: Timing) -> None:
    # Of it, its attention, of a slice.
    times = (0.3, 1.4, 5.4, 0.1, 0.9, 0.9 + 4 * 0.8, 1e-9, 1e-9, 1e-9)
    _, device = timed("", *times, group_size=2)
    longer = 2 * 0.8 - 1.0
    adding = 2 * 3 * 16 * 32 * 2 / device.memory_bytes_per_second
    assert device.piece_seconds == pytest.approx(longer / 6 - adding)  # 6 parts, each with one cut


@pytest.mark.slow("times a model")
def test_a_device_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_PRODUCT", 64)
    device = measure_device(training_config(TINY, "gloo"), alone(), group_size=2)
    assert 0 < device.sustained_flops <= device.peak_flops
    assert device.attention_flops is not None
    assert device.memory_bytes_per_second > 0
    assert 0 < device.job_seconds < 0.01
    assert device.reserved_bytes < device.memory_bytes
    assert device.cores == len(os.sched_getaffinity(0))


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


def test_all_ranks_time_as_often_with_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_slice_of_a_model_has_its_share_of_each_size() -> None:
    model = replace(SMALL, num_attention_heads=4, num_query_groups=2, vocab_size=101)
    model = replace(model, ffn_hidden_size=65)
    half = slice_of(model, 2)
    assert (half.num_attention_heads, half.num_query_groups) == (2, 1)
    assert (half.ffn_hidden_size, half.vocab_size) == (33, 51)  # rounded up
    assert (half.hidden_size, half.num_layers) == (model.hidden_size, model.num_layers)
