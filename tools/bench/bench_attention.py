"""Times causal attention of LLaMA 7B's heads by the kernels that a device has for parts of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.block_attention import attend_block, block_grads, gpu_of
from paro.distributed.timers import time_of
from paro.distributed.user_errors import run_script
from paro.errors import check_least
from paro.report.log import print_line
from tools.shared.command_line import Parser
from tools.shared.device import device_of
from tools.shared.output import write_json
from tools.shared.picture import check_outputs

HEADS, HEAD, ROUNDS, CALLS = 32, 128, 6, 4


def measure(length: int, flash: bool, device: torch.device) -> dict[str, float]:
    """Measure TFLOP/s in bf16: two products in forward, five in backward, half masked."""
    q, k, v, grad = torch.randn(4, 1, length, HEADS, HEAD, device=device).bfloat16()
    forward = partial(attend_block, (q, k, v), causal=True, flash=flash)
    backward = partial(block_grads, grad, (q, k, v), forward(), causal=True, flash=flash)

    def rate(products: int, action: Callable[[], object]) -> float:
        turns = [time_of(lambda: [action() for _ in range(CALLS)], device) for _ in range(ROUNDS)]
        seconds = median(turn.wall for turn in turns[1:]) / CALLS  # the first does not count
        return products * length**2 * HEADS * HEAD / seconds / 1e12

    return {"forward": rate(2, forward), "backward": rate(5, backward)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="bench_attention.py", description=__doc__)
    add = parser.add_argument
    add("--seq-lengths", nargs="+", type=int, default=[4096, 32768], help="default 4096 32768")
    add("--device", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    check_least(1, seq_lengths=min(args.seq_lengths))
    check_outputs(args, "--json")
    device, rows = device_of(args.device), []
    has_cudnn = device.type == "cuda" and gpu_of(device).takes_cudnn
    for length in args.seq_lengths:
        for kernel in ["FlashAttention"] + ["cuDNN"] * has_cudnn:
            rates = measure(length, kernel != "cuDNN", device)
            rows.append({"seq_length": length, "kernel": kernel, "tflops": rates})
            text = ", ".join(f"{way} {rate:.3g} TFLOP/s" for way, rate in rates.items())
            print_line(f"{length} tokens, {kernel}: {text}")
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    run_script("bench_attention.py", main)
