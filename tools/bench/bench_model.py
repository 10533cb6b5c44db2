"""Training speed of this LLaMA and its trainer against transformers' LlamaForCausalLM, in pairs."""

# All contenders train the same shape from the same weights on the same tokens with AdamW and clip
# gradients (transformers' Trainer does so too); their first losses are compared. They take turns of
# a few steps each, because a shared machine's speed drifts: a ratio is the median over rounds, each
# comparing neighbours in time.
#
#   ours                   this model, torch's fused AdamW
#   ours-compiled          the same through torch.compile
#   trainer                pretrain_llama.py's training step, bookkeeping included
#   trainer-compiled       the same with --torch-compile inductor
#   trainer-torch          the same without Triton's SwiGLU, rotary embedding and AdamW
#   trainer-fp8            the same with --fp8-format hybrid
#   trainer-fp8-compiled   the same with both
#   trainer-muon           the trainer with Muon for the matrices of blocks
#   transformers           LlamaForCausalLM and AdamW as a user gets them
#   transformers-fused     the same with AdamW(fused=True)
#   transformers-compiled  the same through torch.compile
#
# With --own-process each contender is in a process of its own, and its peak memory is measured. On
# a CPU the processes take turns. On a GPU one runs after the other, so that only one model is in
# memory; a ratio then compares medians, not neighbours. Without --own-process contenders on a CPU
# share malloc, and what the trainer asks of it (to keep freed memory) speeds up all of them.

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.loader import Batch
from model.units import flops_per_token, num_parameters
from paro.arguments.parser import parse_args
from paro.config.run import configure
from paro.distributed.user_errors import run_script
from paro.distributed.world import World
from paro.errors import UserError, check_least
from paro.report.log import print_line
from tools.bench.model_speed.benchmark import (
    Benchmark,
    Measured,
    Results,
    benchmark,
    in_own_processes,
    results_of,
)
from tools.bench.model_speed.contenders import (
    CONTENDERS,
    DEFAULT,
    LEARNING_RATE,
    REFERENCES,
    SEED,
    Task,
)
from tools.bench.shared.clocks import clock_of, clock_text, clocks_of
from tools.bench.shared.turns import training_flags
from tools.shared.command_line import Parser, add_trainer_flags
from tools.shared.device import device_of, peak_flops
from tools.shared.output import write_json
from tools.shared.picture import check_outputs

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
SAME_IN_TRAINER = {
    "num_layers": 8,
    "hidden_size": 384,
    "ffn_hidden_size": 1280,
    "num_attention_heads": 6,
    "vocab_size": 8192,
    "seq_length": 256,
    "micro_batch_size": 4,
    "clip_grad": 1.0,
}
OPTIONAL_IN_TRAINER = ("exp_avg_dtype", "exp_avg_sq_dtype", "paro_recompute_keep")

Row = dict[str, Any]


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--contenders",
        default=",".join(DEFAULT),
        metavar="NAMES",
        help=f"of {', '.join(CONTENDERS)}; default {','.join(DEFAULT)}",
    )
    add(
        "--own-process",
        action=argparse.BooleanOptionalAction,
        help="each contender in a process of its own: in turns on a CPU, one by one on a GPU",
    )
    add(
        "--most-seconds",
        type=float,
        metavar="SECONDS",
        help="with --own-process: stop a contender so long after its start",
    )
    add("--clocks", type=Path, help=argparse.SUPPRESS)  # recorded already, by check_gpu.py
    tied = "tie_embeddings_and_output_weights"
    add_trainer_flags(parser, tied, *OPTIONAL_IN_TRAINER, **SAME_IN_TRAINER)
    add("--num-query-groups", type=int, help="default: as many as --num-attention-heads")
    add("--recompute", action="store_true", help="every block, in all contenders")
    add("--num-micro-batches", type=int, default=1, help="accumulated in a step")
    add("--dtype", choices=("bf16", "fp32"), default="fp32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=2, help="on a CPU")
    add(
        "--clock",
        choices=("cpu", "wall"),
        default="wall",
        help="cpu: time of all threads, for a machine that others keep busy; use --threads 1",
    )
    add("--rounds", type=int, default=9, help="turns of each contender that are timed")
    add("--steps", type=int, default=2, help="optimizer steps in a turn")
    add("--peak-tflops", type=float, help="of the device, for MFU; on known GPUs from a table")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def task_of(args: argparse.Namespace) -> Task:
    device = device_of(args.device)
    flags = training_flags(
        args,
        *SAME_IN_TRAINER,
        *OPTIONAL_IN_TRAINER,
        distributed_backend="nccl" if args.device == "cuda" else "gloo",
        global_batch_size=args.micro_batch_size * args.num_micro_batches,
        train_iters=10**6,
        lr=LEARNING_RATE,
        seed=SEED,
    )
    if args.tie_embeddings_and_output_weights:
        flags.append("--tie-embeddings-and-output-weights")
    size = (args.micro_batch_size, args.seq_length + 1)
    text_BS = torch.randint(args.vocab_size, size, generator=torch.Generator().manual_seed(SEED))
    tokens_BS, labels_BS = text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous()
    mask_BS = torch.ones(tokens_BS.shape)
    batch = Batch(tokens_BS, labels_BS, mask_BS, mask_sum=mask_BS.numel()).to(device)
    run = configure(parse_args(flags), World())
    return Task(flags=tuple(flags), run=run, device=device, batch=batch)


def check_losses(losses: dict[str, float], tolerance: float) -> None:
    """Raise `RuntimeError` unless all losses agree: a faster model must be equal."""
    firsts = [*losses.values()]
    if not all(abs(loss - firsts[0]) <= tolerance * firsts[0] for loss in firsts):
        raise RuntimeError(f"the first losses differ: {losses}")


def start_benchmark(args: argparse.Namespace, names: Sequence[str]) -> Benchmark:
    """Begin a benchmark in this process."""
    torch.set_num_threads(args.threads)
    return benchmark(task_of(args), names, steps=args.steps, clock=args.clock)


def report(task: Task, results: Results, peak: float | None, clocks: Path | None) -> list[Row]:
    """Format a row per contender; those that failed come last."""
    seq_length = task.batch.tokens_BS.shape[1]
    flops = flops_per_token(task.run.model, seq_length, causal=False)
    causal = flops_per_token(task.run.model, seq_length, causal=True)
    measured = {name: result for name, result in results.items() if isinstance(result, Measured)}
    rows: list[Row] = []
    for name, result in measured.items():
        others = [other for other in measured if other in REFERENCES and other != name]
        speed = result.tokens_per_second
        row: Row = {
            "contender": name,
            "first_loss": result.first_loss,
            "tokens_per_second": speed,
            "tflops": speed * flops / 1e12,
            "ratios": {other: result.ratio(measured[other]) for other in others},
            "seconds": result.seconds,
            "turns": result.turns,
        }
        line = f"{name:22s}{speed:10.0f} tokens/s, {row['tflops']:.3f} TFLOP/s"
        if peak is not None:
            row |= {"mfu": speed * flops / peak, "mfu_causal": speed * causal / peak}
            line += f", MFU {row['mfu']:.1%} ({row['mfu_causal']:.1%} with attention halved)"
        if clocks is not None:
            row |= clock_of(clocks, result.turns)
            line += clock_text(row)
        if result.peak_bytes is not None:
            row["peak_bytes"] = result.peak_bytes
            line += f", {result.peak_bytes / 1e9:.2f} GB at most"
        for other, ratio in row["ratios"].items():
            line += f", {ratio:.3f} of {other}"
        rows.append({**row, "line": line})
    for name, failure in results.items():
        if isinstance(failure, str):
            line = f"{name:22s} failed: {failure}"
            rows.append({"contender": name, "failure": failure, "line": line})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    counts = ("rounds", "steps", "threads", "micro_batch_size", "num_micro_batches")
    check_least(1, **{flag: getattr(args, flag) for flag in (*counts, "seq_length", "vocab_size")})
    if not args.clip_grad >= 0.0:
        raise UserError(f"--clip-grad {args.clip_grad} is not a norm; 0 turns clipping off")
    names = [*dict.fromkeys(args.contenders.split(","))]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise UserError(f"--contenders knows {', '.join(CONTENDERS)}, not {', '.join(unknown)}")
    check_outputs(args, "--json")
    task = task_of(args)
    batch_size, seq_length = task.batch.tokens_BS.shape
    title = (
        f"{num_parameters(task.run.model) / 1e6:.2f}M parameters, {args.num_micro_batches} x "
        f"{batch_size} x {seq_length} tokens a step, {args.dtype} on {task.device}"
    )
    print_line(title)
    peak = peak_flops(task.device, args.dtype, args.peak_tflops)
    tolerance = LOSS_TOLERANCE[args.dtype]
    shape = {"task": title, "clock": args.clock, "parameters": num_parameters(task.run.model)}
    start = partial(start_benchmark, args)
    groups = (
        in_own_processes(start, names, task.device, args.most_seconds)
        if args.own_process
        else [[start(names)]]
    )
    with clocks_of(task.device, args.clocks) as clocks:
        for number, results in enumerate(results_of(groups, args.rounds)):
            rows = report(task, results, peak, clocks)
            write_json(args.json, {**shape, "rows": rows}, is_update=number > 0)
    measured = [row for row in rows if "failure" not in row]
    check_losses({row["contender"]: row["first_loss"] for row in measured}, tolerance)
    print_line(*(row["line"] for row in rows))
    if len(measured) < len(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    run_script("bench_model.py", main)
