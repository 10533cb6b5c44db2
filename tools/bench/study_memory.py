"""Memory that a rank needs under each way to shard a model, and the largest model that fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.atomic_file import replacing
from model.config import (
    LLAMA_PRESETS,
    LlamaConfig,
    RecomputeConfig,
    num_parameters,
    preset_name,
)
from paro.distributed.user_errors import run_script
from paro.errors import UserError
from paro.planning.memory.gathering import MemorySnapshot, PeakMemory
from paro.planning.memory.rotating import rotating_peak
from paro.planning.units import MicroBatch, activations_of, units_of
from paro.precision import BYTES_OF, PrecisionConfig
from paro.quantities import ranks_text
from paro.strategy import parse_strategy

DESCRIPTION = """\
Predicts, without ranks, the peak memory of a rank at one batch per rank, whatever the number of
ranks, and the deepest model of the same width that trains in a given memory. The predictions are
those of the trainer, which tests hold against what a rank allocates.

  python tools/bench/study_memory.py --world-size 8 --llama-preset 7B --memory-gb 80
"""
# Contenders: the strategy, and how its weights rotate (empty: parameters are gathered).
CONTENDERS = {
    "DDP (NNN)": ("NNN", ""),
    "III, gathered": ("III", ""),
    "GGG, gathered": ("GGG", ""),
    "III, rotated": ("III", "out of place"),
    "III, rotated in place": ("III", "in place"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The machine and the batch of a rank."""

    world_size: int
    group_size: int
    size: int
    seq_length: int
    precision: PrecisionConfig

    def peak(self, name: str, model: LlamaConfig) -> MemorySnapshot:
        """The memory snapshot at a rank's peak under a contender."""
        letters, rotation = CONTENDERS[name]
        strategy = parse_strategy(letters, world_size=self.world_size, group_size=self.group_size)
        batch = MicroBatch(
            size=self.size,
            seq_length=self.seq_length,
            compute_bytes=BYTES_OF[self.precision.compute],
            device_type="cuda",
        )
        rings = strategy.params if rotation else 1
        in_place = rotation == "in place"
        units = units_of(model, world_size=self.world_size, rotated_over=rings, in_place=in_place)
        if rotation:
            return rotating_peak(strategy, units, self.precision, model, batch, in_place=in_place)
        peaks = PeakMemory(
            world_size=self.world_size,
            units=units,
            precision=self.precision,
            activations=activations_of(model, batch, units),
            prefetch_units=1,
            num_micro_batches=2,
            device_type="cuda",
        )
        return peaks.of(strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table; sizes in bytes."""

    contender: str
    states: int
    peak: int
    at: str
    largest_parameters: int
    largest_layers: int


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if none does; assumes that all smaller ones fit too."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def study(setting: Setting, model: LlamaConfig, memory: int) -> list[Row]:
    """The rows of all contenders; III and GGG are the same on one group."""
    rows = []
    for name in CONTENDERS:
        moment = setting.peak(name, model)

        def fits(layers: int, name: str = name) -> bool:
            return setting.peak(name, replace(model, num_layers=layers)).total <= memory

        layers = largest(fits)
        parameters = num_parameters(replace(model, num_layers=layers)) if layers else 0
        rows.append(
            Row(
                contender=name,
                states=moment.states,
                peak=moment.total,
                at=moment.name,
                largest_parameters=parameters,
                largest_layers=layers,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [("contender", "states GB", "peak GB", "of DDP", "at", "deepest", "layers")]
    for row in rows:
        lines.append(
            (
                row.contender,
                f"{row.states / 1e9:.2f}",
                f"{row.peak / 1e9:.2f}",
                f"{row.peak / rows[0].peak:.3f}",
                row.at,
                f"{row.largest_parameters / 1e9:.2f}B",
                str(row.largest_layers),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--world-size", type=int, default=8, help="ranks; default 8")
    add("--group-size", type=int, help="ranks of a group; default: all")
    add("--llama-preset", type=preset_name, default="7B", metavar="NAME", help="default 7B")
    add("--micro-batch-size", type=int, default=1, help="samples per rank; default 1")
    add("--seq-length", type=int, default=1024, help="tokens of a sample; default 1024")
    add("--memory-gb", type=float, default=80.0, help="of a rank, for the deepest; default 80")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of compute; default bf16")
    add("--recompute", action="store_true", help="every block in backward")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.llama_preset not in LLAMA_PRESETS:
        raise UserError(f"--llama-preset {args.llama_preset}: {', '.join(LLAMA_PRESETS)}")
    recompute = RecomputeConfig(granularity="full") if args.recompute else None
    model = replace(LLAMA_PRESETS[args.llama_preset], recompute=recompute)
    setting = Setting(
        world_size=args.world_size,
        group_size=args.group_size or args.world_size,
        size=args.micro_batch_size,
        seq_length=args.seq_length,
        precision=PrecisionConfig(compute=args.dtype),
    )
    rows = study(setting, model, int(args.memory_gb * 1e9))
    print(
        f"{num_parameters(model) / 1e9:.2f}B parameters on "
        f"{ranks_text(setting.world_size, setting.group_size)}, "
        f"{setting.size} x {setting.seq_length} tokens a rank"
    )
    print(table(rows))
    if args.json is not None:
        with replacing(args.json) as temporary:
            temporary.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    run_script("study_memory.py", main)
