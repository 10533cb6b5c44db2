"""Trains one LLaMA with this project, PyTorch and DeepSpeed in turns, and compares them.

    torchrun --nproc-per-node 8 tools/bench/compare_peers.py --group-size 4 --plot peers.png

Contenders: ddp, zero-redundancy, fsdp2, fsdp2-hybrid, deepspeed-1, -2, -3 and -hpz, and this
project's strategies as paro:IIG, paro:4/4/8 or, with a collective named, paro:GGG@ho-ring; with
rotating weights, out of place or in place, paro:IIG+rotate and paro:IIG+in-place; with 4 bits of
gradients and updates between groups, paro:IIG+4-bit; with Muon for the matrices of blocks,
paro:IIG+muon. Where ranks share samples (docs/context.md), +KIND/C follows:
paro:GGG+p2p/8, +allgather/8, +a2a/4, +a2a+p2p/4/2, and +flat/8 for one ring over groups;
fsdp2+allgather/8 and fsdp2+p2p/8 do so by torch's experimental context parallelism.
fsdp2-kept, fsdp2-hybrid-kept and deepspeed-3-kept trade memory for speed: they keep parameters
whole where they can. fsdp2-ahead and fsdp2-hybrid-ahead prefetch where there are no CUDA streams.

All train the same model from the same weights on the same tokens, and those of one optimizer must
agree in losses and gradient norms. They take turns, in an order that rotates from round to round,
each in its own processes; a ratio is the median over rounds, because a shared machine's speed
drifts. What counts as model state is defined in tools/bench/peers/task.py; what counts as memory
and as sent bytes, in tools/shared/meters.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.units import flops_per_token, num_parameters
from paro.arguments.parser import parse_args
from paro.config.run import configure
from paro.distributed.user_errors import run_script
from paro.distributed.world import World, read_world
from paro.errors import UserError, about, check_least
from paro.launch.prediction import planned_step
from paro.report.record import PlannedStep
from paro.text import ranks_text
from tools.bench.peers import figures
from tools.bench.peers.deepspeed_zero import MODES as DEEPSPEED_MODES
from tools.bench.peers.deepspeed_zero import import_deepspeed, lacks_deepspeed
from tools.bench.peers.figures import Rounds, TimedRun
from tools.bench.peers.registry import flags_of, is_own
from tools.bench.peers.run import in_own_process, run_contender
from tools.bench.peers.task import Task
from tools.bench.shared.turns import order_of_round, training_flags
from tools.shared.command_line import RankParser, add_trainer_flags
from tools.shared.output import write_json
from tools.shared.picture import check_outputs

CONTENDERS = (
    "ddp,zero-redundancy,fsdp2,fsdp2-ahead,fsdp2-hybrid,deepspeed-1,deepspeed-2,deepspeed-3,"
    "deepspeed-hpz,paro:NNG,paro:NIG,paro:IIG,paro:GGG"
)
SHAPE = {"num-layers": 6, "hidden-size": 256, "num-attention-heads": 4, "ffn-hidden-size": 688}
VOCAB_SIZE = 4096
SAME_IN_TRAINER = (
    *("llama-preset", "vocab-size", "seq-length", "micro-batch-size", "lr", "seed", "trainable"),
    *("lora-rank", "lora-target-modules", "distributed-backend", "distributed-timeout-minutes"),
)
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}


def make_parser() -> argparse.ArgumentParser:
    parser = RankParser(description=__doc__)
    group = parser.add_argument_group("the comparison")
    add = group.add_argument
    add("--contenders", default=CONTENDERS, metavar="NAMES", help=f"default {CONTENDERS}")
    add("--baselines", metavar="NAMES", help="a table of ratios for each; default: the first")
    add("--rounds", type=int, default=5, help="turns of every contender; default 5")
    add("--warmup-steps", type=int, default=2, help="of a run, not timed; default 2")
    add("--steps", type=int, default=2, help="of a run, timed; default 2")
    add("--group-size", type=int, metavar="RANKS", help="fast links; default: ranks per node")
    add_trainer_flags(group, distributed_backend="gloo", distributed_timeout_minutes=10)
    add(
        "--paro-flags",
        metavar="FLAGS",
        help="of pretrain_llama.py, for every paro: contender; default --grad-reduce-in-bf16 in "
        "bf16, as peers accumulate in the compute type too",
    )
    add(
        "--paro-machine",
        metavar="NAME",
        help="as in the trainer; steps of paro: contenders are predicted for it",
    )
    add("--tolerance", type=float, help="relative, of losses; default 1e-5 in fp32, 2e-3 in bf16")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE", help="draw them there (png, svg, pdf)")
    group = parser.add_argument_group("what is trained")
    add = group.add_argument
    add_trainer_flags(group, "llama_preset", "trainable", "lora_rank", "lora_target_modules")
    add_trainer_flags(group, seq_length=128, micro_batch_size=1, lr=1e-3, seed=1234)
    for flag, size in SHAPE.items():
        add(f"--{flag}", type=int, metavar="N", help=f"default {size}, or the preset's")
    add("--num-query-groups", type=int, metavar="N", help="default: no grouped-query attention")
    add("--vocab-size", type=int, metavar="N", help=f"default {VOCAB_SIZE}, or the preset's")
    add(
        "--micro-batches",
        type=int,
        default=4,
        help="of a rank in a step, where none share samples; default 4",
    )
    add("--global-batch-size", type=int, help="samples of a step, instead of --micro-batches")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of compute; default bf16")
    add("--recompute", action="store_true", help="every block in backward, in all contenders")
    return parser


def samples_of_step(args: argparse.Namespace, world_size: int) -> int:
    """Return the global batch size."""
    given: int | None = args.global_batch_size
    return args.micro_batch_size * args.micro_batches * world_size if given is None else given


def trainer_flags(args: argparse.Namespace, world_size: int) -> list[str]:
    """Return the arguments of pretrain_llama.py for the common training job, without a strategy."""
    sizes = {} if args.llama_preset else {"vocab-size": VOCAB_SIZE, **SHAPE}
    return training_flags(
        args,
        *(*SHAPE, *SAME_IN_TRAINER),
        global_batch_size=samples_of_step(args, world_size),
        train_iters=args.warmup_steps + args.steps,
        **{flag.replace("-", "_"): size for flag, size in sizes.items()},
    )


def task_of(args: argparse.Namespace, name: str, world: World) -> Task:
    """Return the training job as a contender runs it; `UserError` if it is impossible."""
    counts = ("rounds", "steps", "micro_batches", "micro_batch_size")
    check_least(1, **{name: getattr(args, name) for name in counts})
    check_least(2, warmup_steps=args.warmup_steps)
    group_size = world.ranks_per_node if args.group_size is None else args.group_size
    if group_size < 1 or world.size % group_size != 0:
        raise UserError(f"--group-size {group_size} does not divide the {world.size} ranks")
    flags = [*trainer_flags(args, world.size), *flags_of(name)]
    flags += ["--paro-group-size", str(group_size)]
    if is_own(name):
        own_flags = args.paro_flags
        if own_flags is None:
            own_flags = "--grad-reduce-in-bf16" if args.dtype == "bf16" else ""
        flags += own_flags.split()
        if args.paro_machine is not None:
            flags += ["--paro-machine", args.paro_machine]
    return Task(
        run=configure(parse_args(flags), world),
        group_size=group_size,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The contenders with their jobs, and those left out with the reason."""

    tasks: dict[str, Task]
    baselines: list[str]
    left_out: dict[str, str]


def plan_of(args: argparse.Namespace, world: World) -> Comparison:
    """Return the contenders that this machine can run; `UserError` for unknown names."""
    asked = list(dict.fromkeys(filter(None, args.contenders.split(","))))
    tasks = {name: task_of(args, name, world) for name in asked}
    lacks = lacks_deepspeed()
    left_out = {name: lacks for name in asked if lacks and name in DEEPSPEED_MODES}
    tasks = {name: task for name, task in tasks.items() if name not in left_out}
    if not tasks:
        reasons = "; ".join(dict.fromkeys(left_out.values())) or "no name is given"
        raise UserError(f"--contenders {args.contenders}: none is left: {reasons}")
    baselines = args.baselines.split(",") if args.baselines else list(tasks)[:1]
    strangers = [name for name in baselines if name not in asked]
    if strangers:
        raise UserError(f"--baselines {', '.join(strangers)}: not among {', '.join(asked)}")
    return Comparison(
        tasks=tasks, baselines=[b for b in baselines if b in tasks], left_out=left_out
    )


def run_rounds(args: argparse.Namespace, plan: Comparison, world: World) -> Rounds:
    """Run all contenders in all rounds; every rank returns equal figures."""
    rounds: Rounds = {name: [] for name in plan.tasks}
    tolerance = args.tolerance or TOLERANCE[args.dtype]
    references: dict[str, TimedRun] = {}  # by optimizer
    number = 0
    for index in range(args.rounds):
        for name in order_of_round(list(plan.tasks), index):
            number += 1
            task = plan.tasks[name]
            run = in_own_process(partial(run_contender, task, name, number=number))
            reference = references.setdefault(task.run.precision.optimizer, run)
            if world.rank == 0:
                print(
                    f"round {index + 1} {name}: {run.seconds:.3f} s/step, losses "
                    f"{' '.join(f'{loss:.4f}' for loss in run.losses)}",
                    flush=True,
                )
                figures.check_agreement(reference, run, tolerance)
            rounds[name].append(run)
    return rounds


def title_of(args: argparse.Namespace, plan: Comparison, world: World) -> str:
    task = next(iter(plan.tasks.values()))
    return (
        f"{num_parameters(task.model) / 1e6:.2f}M parameters, "
        f"{samples_of_step(args, world.size)} samples of {args.seq_length} tokens a step in "
        f"micro-batches of {args.micro_batch_size} on "
        f"{ranks_text(world.size, task.group_size)}, {args.dtype} on {args.distributed_backend}"
    )


def planned_steps(plan: Comparison) -> dict[str, PlannedStep]:
    """Return predicted steps of this project's contenders, where --paro-machine has a device."""
    planned = {}
    for name, task in plan.tasks.items():
        with about(f"--contenders {name}: "):
            planned[name] = planned_step(task.run)
    return {name: step for name, step in planned.items() if step is not None}


def report(
    args: argparse.Namespace,
    plan: Comparison,
    planned: Mapping[str, PlannedStep],
    rounds: Rounds,
    world: World,
) -> None:
    """Print the tables and write the files."""
    title, tokens = title_of(args, plan, world), samples_of_step(args, world.size) * args.seq_length
    run = next(iter(plan.tasks.values())).run
    flops = flops_per_token(run.model, args.seq_length, run.trained, causal=True)
    summaries = figures.summarize(rounds, tokens, tokens * flops / world.size)
    ratios = {baseline: figures.compare(rounds, baseline) for baseline in plan.baselines}
    print("", figures.summary_table(summaries), sep="\n")
    if planned or any(task.run.context.context_parallel_size > 1 for task in plan.tasks.values()):
        print("", figures.prediction_table(summaries, planned), sep="\n")
    for rows in ratios.values():
        print("", figures.ratio_table(rows), sep="\n")
    content = {
        "task": title,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "left_out": plan.left_out,
        "rows": summaries,
        "planned": {name: dict(step.seconds) for name, step in planned.items()},
        "ratios": [row for rows in ratios.values() for row in rows],
        "turns": [dataclasses.asdict(run) for turns in rounds.values() for run in turns],
    }
    write_json(args.json, content)
    if args.plot is not None:
        figures.plot(args.plot, title, summaries, rounds)


def main() -> None:
    args = make_parser().parse_args()
    world = read_world()
    if world.size < 2 or "MASTER_ADDR" not in os.environ:
        raise UserError("start it on 2 ranks or more: torchrun --nproc-per-node 2 ...")
    plan = plan_of(args, world)
    check_outputs(args, "--json", pictures=["--plot"])
    if world.rank == 0:
        for name, reason in plan.left_out.items():
            print(f"without {name}: {reason}", flush=True)
        print(title_of(args, plan, world), flush=True)
    if args.distributed_backend == "gloo" and DEEPSPEED_MODES.keys() & plan.tasks.keys():
        import_deepspeed("gloo")  # once, for all turns; on GPUs it would touch CUDA before a fork
    planned = planned_steps(plan)  # now, since the machine file may lack something
    rounds = run_rounds(args, plan, world)
    if world.rank == 0:
        report(args, plan, planned, rounds, world)


if __name__ == "__main__":
    run_script("compare_peers.py", main)
