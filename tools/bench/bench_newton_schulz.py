"""Times Newton-Schulz of matrices as Muon's step runs it, one after the other and as a batch."""

# A rank of a sharded optimizer state has one matrix at a time; a batch is what it could do with
# several of equal shape. Both are timed in turns.

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.timers import time_of
from paro.distributed.user_errors import run_script
from paro.errors import UserError, check_least
from paro.optim.muon import choose_muon_kernels, orthogonal
from paro.report.log import print_line
from paro.spec.muon_rounds import MuonMatrix
from paro.spec.optim_config import MuonConfig
from tools.bench.shared.turns import median_ratio
from tools.shared.command_line import Parser
from tools.shared.device import device_of, peak_flops
from tools.shared.output import write_json
from tools.shared.picture import check_outputs

DESCRIPTION = """\
Times Newton-Schulz, in bf16 where the device has bf16 matmuls, with its FLOP/s and their part of
the device's peak in bf16, as if symmetric products were computed whole. The default shapes are
those of LLaMA 7B.

  python tools/bench/bench_newton_schulz.py --shapes 256x256,688x256 --batch 4 --threads 1
"""
SHAPES = "4096x4096,11008x4096"
CONFIG = MuonConfig()

Row = dict[str, Any]


def batched(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply Newton-Schulz to equal matrices [number, rows, columns] by batched products."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = (x / torch.linalg.matrix_norm(x, keepdim=True)).to(dtype)
    for a, b, c in CONFIG.coefficients():
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def shapes_of(text: str) -> list[tuple[int, int]]:
    shapes = []
    for word in text.split(","):
        rows, _, columns = word.partition("x")
        if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
            raise UserError(f"--shapes {text}: {word!r} is no ROWSxCOLUMNS such as 4096x4096")
        shapes.append((int(rows), int(columns)))
    return shapes


def flops_of(rows: int, columns: int) -> int:
    matrix = MuonMatrix(0, rows * columns, start=0, rows=rows, columns=columns)
    return matrix.newton_schulz_flops(CONFIG.muon_num_ns_steps)


def measure(shape: tuple[int, int], args: argparse.Namespace, device: torch.device) -> Row:
    """Return the figures of one shape; the part of a peak comes later."""
    generator = torch.Generator(device).manual_seed(1234)
    matrices = torch.randn((args.batch, *shape), device=device, generator=generator)

    square = choose_muon_kernels("auto", device).square

    def apart() -> list[Tensor]:
        return [orthogonal(matrix, CONFIG, square) for matrix in matrices]

    one = torch.stack(apart())
    other = batched(matrices, one.dtype)
    if torch.linalg.vector_norm(one - other) > 0.1 * torch.linalg.vector_norm(one):
        raise RuntimeError(f"{shape}: batched products have another result")
    ways = (apart, lambda: batched(matrices, one.dtype))
    turns = [[time_of(way, device).wall for way in ways] for _ in range(args.rounds + 1)]
    each, together = zip(*turns[1:], strict=True)  # the first does not count
    return {
        "shape": list(shape),
        "dtype": str(one.dtype).removeprefix("torch."),
        "seconds": median(each) / args.batch,
        "flops_per_second": args.batch * flops_of(*shape) / median(each),
        "apart_over_batched": median_ratio(each, together),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="bench_newton_schulz.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--shapes", default=SHAPES, metavar="ROWSxCOLUMNS,...", help=f"default {SHAPES}")
    add("--batch", type=int, default=1, metavar="N", help="equal matrices; default 1")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    add("--threads", type=int, default=2, help="on a CPU; default 2")
    add("--rounds", type=int, default=9, help="default 9")
    add("--peak-tflops", type=float, help="of the device; on known GPUs from a table")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    check_least(1, rounds=args.rounds, batch=args.batch, threads=args.threads)
    shapes = shapes_of(args.shapes)
    check_outputs(args, "--json")
    torch.set_num_threads(args.threads)
    device = device_of(args.device)
    peak = peak_flops(device, "bf16", args.peak_tflops)
    rows = []
    for shape in shapes:
        row = measure(shape, args, device)
        line = f"{shape[0]} x {shape[1]}: {1e3 * row['seconds']:.2f} ms a matrix in {row['dtype']}"
        line += f", {row['flops_per_second'] / 1e12:.3g} TFLOP/s"
        if peak is not None:
            row["part_of_peak"] = row["flops_per_second"] / peak
            line += f", {row['part_of_peak']:.1%} of the peak in bf16"
        if args.batch > 1:
            line += f"; {args.batch} as a batch {row['apart_over_batched']:.2f} times as fast"
        print_line(line)
        rows.append(row)
    write_json(args.json, {"batch": args.batch, "rows": rows})


if __name__ == "__main__":
    run_script("bench_newton_schulz.py", main)
