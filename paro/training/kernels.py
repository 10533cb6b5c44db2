"""Tries the kernels that a run may use on every rank; all ranks use the same."""

# Replicas of an optimizer shard stay equal only if the same kernel updates them.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from model.attention import check_attention
from model.block_attention import check_block_attention
from model.compilation import check_compiler
from model.fusion import usable_kernels
from model.matmul import check_matmul_types
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.rendezvous import by_value
from paro.optim.adamw import choose_adamw
from paro.quantization.blocks import choose_kernels
from paro.sharding.buffers import TORCH_TYPES

# Which flags choose torch's operations, where a kernel works on some ranks only. Codes have the
# same bits by either, and attention's kernels the same memory.
_WITHOUT: dict[str, Callable[[RunConfig], RunConfig]] = {
    "blocks": lambda config: replace(config, fusions=None),
    "AdamW": lambda config: replace(
        config, optim=replace(config.optim, adam_implementation="torch")
    ),
}


def agree_on_kernels(config: RunConfig, control: Control) -> tuple[RunConfig, list[str]]:
    """The configuration with kernels that work on all ranks, and what was chosen, in lines.

    Collective. `UserError` on all ranks where one that the flags name does not work on some rank.
    """
    with control.raise_on_all_ranks(name_rank=True):
        mine = dict(_tried(config, control))
    everyone = control.gather(mine)
    lines = []
    for what, line in mine.items():
        found = {rank: choices[what] for rank, choices in enumerate(everyone)}
        if len(set(found.values())) > 1:
            line = f"WARNING: ranks differ: {by_value(found)}"
            if what in _WITHOUT:
                config = _WITHOUT[what](config)
                line += ": all use torch's operations"
        if line:
            lines.append(f"> {line}")
    return config, lines


def _tried(config: RunConfig, control: Control) -> Iterator[tuple[str, str]]:
    """What this rank would use for each purpose; empty where there is no choice."""
    device, dtype = control.device, TORCH_TYPES[config.precision.compute]
    check_matmul_types(config.model.fp8_format, dtype, device)
    check_compiler(config.model, device)
    apart = config.data.reset_attention_mask
    kernel = check_attention(config.model, dtype, device, documents=apart)
    if config.context.layout.ring > 1:
        check_block_attention(dtype, config.model.kv_channels, device)
    yield "attention", f"attention: {kernel}"
    yield "blocks", usable_kernels(config.model, config.fusions, dtype, device).line or ""
    name, rounds = config.optim.adam_implementation, config.precision.rounds_moments
    chosen = choose_adamw(name, device, rounds=rounds)
    yield "AdamW", chosen.line or ""
    if config.precision.has_codes:
        yield "codes", choose_kernels(device).line or ""
