"""The command line of tools/plan.py: its flags, and the plan request that they make."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from data.config import DataConfig
from model.config import LLAMA_PRESETS, LlamaConfig
from model.trainable import Trainable
from paro.arguments.model import (
    add_lora_args,
    add_mixed_precision_args,
    add_model_args,
    add_outer_args,
    add_recompute_args,
)
from paro.arguments.parser import add_context_args, take
from paro.collectives.schedule import COLLECTIVES
from paro.config.context_parallel import (
    ContextParallelConfig,
    data_parallel_size_of,
    fastest_config,
    possible_configs,
    take_context,
    with_micro_batches,
)
from paro.config.model import take_model, vocab_size_given
from paro.config.parts import take_loss_scale, take_precision
from paro.config.planned_checks import PLANNED_CHECKS, check_feedback, needs_of
from paro.config.sharding import ShardingConfig, TrainingTask, take_inter_bits, units_ahead
from paro.distributed.world import LaunchConfig, World
from paro.errors import UserError, check_least
from paro.machine.files import find_machine, machine_of_launch
from paro.machine.machine import Machine, Nic
from paro.planning.search_space import MEMORY_MARGIN, PlanRequest, SearchSpace
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.context_layout import SIZE_FLAG
from paro.spec.optim_config import MuonConfig, OptimConfig
from paro.spec.run_spec import ContextLimits
from tools.planning.made_machine import GPUS, machine_of_gpus
from tools.shared.command_line import Parser, add_trainer_flags

DESCRIPTION = """\
Plans a training run without ranks, GPUs or torch: what each of the 14 letter strategies needs and
takes on a machine, the best setting of all, and what more memory or bandwidth would buy.

  python tools/plan.py --llama-preset 7B --paro-machine dgx-a100-roce100 --world-size 32 \\
      --micro-batch-size 4 --global-batch-size 1280 --seq-length 512 --bf16
"""


def make_parser() -> Parser:
    parser = Parser(prog="plan.py", description=DESCRIPTION)
    group = parser.add_argument_group("the run, as in pretrain_llama.py")
    add = group.add_argument
    add("--world-size", type=int, metavar="RANKS", help="default: the machine's, or one node")
    add("--paro-machine", metavar="NAME", help="a shipped machine, or a file; or give --gpu")
    add("--paro-group-size", type=int, metavar="RANKS", help="of I; default: the machine's groups")
    add("--paro-collective", choices=(*COLLECTIVES, "auto"), default="native", help="of the rows")
    add_trainer_flags(group, "paro_prefetch_units", "paro_updated_ahead", "paro_survive")
    add_trainer_flags(group, "paro_rotate_in_place", "trainable")
    add(
        "--paro-nccl-launch-order",
        choices=("free", "implicit"),
        help="as in pretrain_llama.py; default: the machine's",
    )
    add("--paro-materialize", choices=("gather", "rotate"), default="gather", help="of the search")
    add("--micro-batch-size", type=int, default=1, help="of the rows; default 1")
    add("--global-batch-size", type=int, help="default: one micro-batch a rank")
    add("--seq-length", type=int, help="default: the model's positions")
    add("--vocab-size", type=int, help="of the tokenizer; default: the preset's")
    add = parser.add_argument_group("memory").add_argument
    add("--device-memory-gb", type=float, metavar="GB", help="default: the machine's")
    add(
        "--memory-margin",
        type=float,
        default=MEMORY_MARGIN,
        metavar="SHARE",
        help=f"of a device's memory that the choice leaves free; default {MEMORY_MARGIN}. Rows fit "
        "without it",
    )
    add_gpu_args(parser)
    add_model_args(parser)
    add_lora_args(parser)
    add_recompute_args(parser)
    add_trainer_flags(
        parser.add_argument_group("optimizer"),
        "optimizer",
        "muon_num_ns_steps",
        "ema_decay",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
    )
    add_mixed_precision_args(parser)
    add_context_args(parser)
    group = parser.add_argument_group("fewer bits between groups")
    add_trainer_flags(group, "paro_inter_param_bits", "paro_inter_grad_bits", "paro_inter_bits")
    add_trainer_flags(group, "paro_inter_grad_error_feedback")
    add_outer_args(parser)
    add_failure_args(parser)
    add_result_args(parser)
    return parser


def add_result_args(parser: Parser) -> None:
    out = parser.add_argument_group("results").add_argument
    out("--why-not", metavar="STRATEGY", help="also say what the best with this one would cost")
    out("--json", type=Path, metavar="FILE", help="write rows, candidates and what was found")
    out(
        "--longest-sequence",
        action="store_true",
        help="only print, for every strategy and number of ranks that share a sample, the longest "
        "that fits in micro-batches of one, and its tokens per second",
    )
    out("--plot", type=Path, metavar="FILE.png", help="draw memory against time")
    out(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write the best setting's step for chrome://tracing or Perfetto",
    )
    out("--timeline", type=Path, metavar="FILE.png", help="draw the same")
    out(
        "--scaling",
        type=Path,
        metavar="FILE.png",
        help="plan for 8 ranks and more, up to 16,384, at the same batch a rank, and draw it",
    )


def add_gpu_args(parser: Parser) -> None:
    add = parser.add_argument_group(
        "a machine of three figures", "Instead of --paro-machine; its other figures ship."
    ).add_argument
    add("--gpu", choices=tuple(GPUS), help="of which kind, each of 80 GB")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    add("--inter", metavar="RATE", help="of a NIC, in one direction: 25gbit, 400gbit")
    add(
        "--nic",
        choices=[nic.value for nic in Nic],
        default=Nic.SHARED.value,
        help="one for all GPUs of a node (default), or one for each",
    )
    add("--intra", metavar="RATE", help="of a GPU in its node, in one direction; default: NVLink")
    add("--machine-file", type=Path, metavar="FILE", help="write it, for --paro-machine of a run")


def add_failure_args(parser: Parser) -> None:
    add = parser.add_argument_group("failing nodes").add_argument
    add(
        "--mtbf-hours",
        type=float,
        metavar="HOURS",
        help="also say what is expected to be trained if each node fails so often (mean time "
        "between failures of one node), with recovery from disk and from memory",
    )
    add(
        "--restart-seconds",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="from a failure until states are read: noticing it, starting, building; default 120",
    )
    add(
        "--storage-gb-per-second",
        type=float,
        default=10.0,
        metavar="GB",
        help="at which checkpoints are written and read, by all ranks together; for an object "
        "store, what tools/bench_checkpoint.py measures there, upload included; default 10",
    )


def plan_request_of_args(args: Namespace) -> PlanRequest:
    """Make the plan request of the flags; a `UserError` names the flag to change."""
    machine = machine_of(args)
    world_size = machine.world_size if args.world_size is None else args.world_size
    machine, group_size = machine_of_launch(
        machine,
        world_size=world_size,
        ranks_per_node=None,
        group_size=args.paro_group_size,
        subject="--paro-machine" if args.gpu is None else "--gpu",
    )
    if args.paro_nccl_launch_order is not None:
        machine = replace(machine, launch_order=args.paro_nccl_launch_order)
    ahead, prefetch_units = args.paro_updated_ahead, args.paro_prefetch_units
    context = take_context(args)
    world = World(size=world_size, ranks_per_node=machine.group_size, group=group_size)
    sharding = take(
        ShardingConfig,
        args,
        world=world,
        context=context,
        updated_ahead=units_ahead(ahead, prefetch_units, by_nccl=machine.is_of_gpus),
        machine=machine,
        outer=None,
        elastic=False,
        nccl_copy_engine=False,
    )
    args.seq_length = seq_length_of(args)
    model = take_model(args, vocab_size_of(args))
    if args.max_position_embeddings is None and args.seq_length > model.max_position_embeddings:
        model = replace(model, max_position_embeddings=args.seq_length)
    if not 0 <= args.memory_margin < 1:
        raise UserError(f"--memory-margin {args.memory_margin:g} must be at least 0 and below 1")
    task, sharding = task_of(args, model, sharding)
    batch, size = args.global_batch_size, args.micro_batch_size
    data_parallel_size = data_parallel_size_of(world, context.context_parallel_size)
    batches = BatchSchedule(
        micro_batch_size=size,
        global_batch_size=size * data_parallel_size if batch is None else batch,
        data_parallel_size=data_parallel_size,
    )
    fields = task._asdict() | {"task": task, "batches": batches, "sharding": sharding}
    for check in PLANNED_CHECKS:
        check(*(fields[name] for name in needs_of(check)))
    request = task.plan_request(batches, sharding)
    return replace(request, memory_margin=args.memory_margin)


def task_of(
    args: Namespace, model: LlamaConfig, sharding: ShardingConfig
) -> tuple[TrainingTask, ShardingConfig]:
    """Make the training task of the flags, and the sharding with its bits between groups."""
    world, machine = sharding.world, sharding.machine
    assert machine is not None, "of a plan"
    given = take_precision(args)
    take_loss_scale(args)  # a launch has it
    if sharding.survive:
        check_feedback("--paro-survive", given)
    sharding, precision, _ = take_inter_bits(sharding, given)
    kind = "cpu" if machine.device and machine.device.cores else "cuda"
    gigabytes = args.device_memory_gb
    trainable = Trainable.of_flag(args.trainable)
    trainable.names(model)  # refuses patterns that match no parameter
    task = TrainingTask(
        model,
        trainable,
        precision,
        OptimConfig(),
        MuonConfig(muon_num_ns_steps=args.muon_num_ns_steps),
        DataConfig(seq_length=args.seq_length, mock_data=True),
        LaunchConfig(dry_run=True, world_size=world.size, device_memory_gb=gigabytes),
        kind,
    )
    return task, sharding


def seq_length_of(args: Namespace) -> int:
    length = args.seq_length
    if length is None:
        preset = args.llama_preset and LLAMA_PRESETS[args.llama_preset].max_position_embeddings
        length = args.max_position_embeddings or preset
    if length is None:
        raise UserError("--seq-length is missing; --llama-preset gives it too")
    check_least(1, seq_length=length)
    return int(length)


def with_context(args: Namespace) -> tuple[Namespace, tuple[str, ...]]:
    """Replace auto in the flags of context parallelism; return lines that say why, too."""
    if not (context := take_context(args)).auto:
        return args, ()
    flag, *_ = context.auto
    alone = ContextParallelConfig()
    base = plan_request_of_args(_with(args, **alone.flags, global_batch_size=None))
    batch = args.global_batch_size or base.global_batch_size
    args = _with(args, seq_length=base.seq_length, global_batch_size=batch)
    configs = [*possible_configs(context, ContextLimits(base, base.world_size))]

    def make(config: ContextParallelConfig, micro_batch_size: int) -> PlanRequest:
        changes = config.flags | {"micro_batch_size": micro_batch_size}
        return plan_request_of_args(_with(args, **changes))

    if len(configs) < 2:  # the plan says why none fits
        (only,) = configs or [context]
        return _with(args, **only.flags), (f"{flag} auto: {only.describe()}",) * len(configs)
    made = with_micro_batches(configs, args.micro_batch_size, make, grows=flag == SIZE_FLAG)
    space = SearchSpace(collectives=(args.paro_collective,))
    config, size, lines = fastest_config(flag, next(iter(made.values())), made, space)
    return _with(args, **config.flags, micro_batch_size=size), lines


def _with(args: Namespace, **fields: object) -> Namespace:
    return Namespace(**vars(args) | fields)


def machine_of(args: Namespace) -> Machine:
    """Return the machine that a plan is for, with its own ranks; a `UserError` names the flag."""
    check_least(1, world_size=args.world_size)
    if (args.gpu is None) == (args.paro_machine is None):
        verb = "is missing" if args.gpu is None else "and --gpu contradict each other"
        raise UserError(
            f"--paro-machine {verb}: give it, or --gpu with --gpus-per-node and --inter"
        )
    if args.gpu is not None:
        return machine_of_gpus(
            args.gpu,
            world_size=args.world_size or args.gpus_per_node,
            gpus_per_node=args.gpus_per_node,
            intra=args.intra,
            inter=args.inter,
            nic=Nic(args.nic),
        )
    flags = {"--inter": args.inter, "--intra": args.intra, "--machine-file": args.machine_file}
    for flag, value in flags.items():
        if value is not None:
            raise UserError(f"{flag} {value} needs --gpu: a machine file has its own")
    return find_machine(args.paro_machine)


def device_flag(args: Namespace) -> str:
    """Return the flag that says how much memory a device has, with its value."""
    if args.device_memory_gb is not None:
        return f"--device-memory-gb {args.device_memory_gb:g}"
    return f"--gpu {args.gpu}" if args.gpu else f"--paro-machine {args.paro_machine}"


def vocab_size_of(args: Namespace) -> int:
    check_least(1, vocab_size=args.vocab_size)
    size = vocab_size_given(args)
    if size is None:
        raise UserError("--vocab-size is missing; --llama-preset gives it too")
    return size
