"""ShardingConfig: sharding and communication of model states, from flags and the machine file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from data.config import DataConfig
from model.config import LlamaConfig
from model.trainable import Trainable
from paro.arguments.parser import non_default, option_of, take
from paro.config.context_parallel import AUTO, ContextParallelConfig, take_context
from paro.distributed.world import LaunchConfig, World
from paro.errors import UserError, check_least, contradiction, count_text
from paro.machine.files import MEASURE, find_machine, machine_of_launch, why_unmeasurable
from paro.machine.machine import Machine
from paro.planning.search_space import PlanRequest
from paro.precision import PrecisionConfig
from paro.quantization.formats import FULL_BITS
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.optim_config import MuonConfig, OptimConfig
from paro.spec.outer_steps import OuterConfig
from paro.spec.run_spec import ContextLimits, Materialize, RunSettings, RunSpec
from paro.spec.strategy_limits import StrategyLimits
from paro.strategy import FLAG, Strategy, check_group_size, parse_strategy, strategy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """The sharding of the model states and its communication (the flags `--paro-*`)."""

    world: World  # ranks, nodes and groups of the run
    context: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    collective: str = "native"
    prefetch_units: int = 1
    updated_ahead: int | None = None  # units whose param all-gather is queued ahead; None: all
    machine: Machine | None = None  # measured link and compute speeds, for `auto` and the planner
    materialize: str = "gather"  # "gather": ranks all-gather weights; "rotate": weights ring-pass
    rotate_in_place: bool = False
    survive: int = 0  # number of nodes whose simultaneous loss loses no model state
    elastic: bool = False  # True: a restart may have fewer or more nodes
    outer: OuterConfig | None = None  # outer steps between groups; None: all are synchronous
    inter_bits: str | None = None  # "auto": the planner chooses bit widths between groups
    nccl_copy_engine: bool = False  # True: copy engines all-gather inside nodes

    def __post_init__(self) -> None:
        if self.rotate_in_place and self.materialize != "rotate":
            raise UserError("--paro-rotate-in-place needs --paro-materialize rotate")
        check_least(0, "demands nothing", paro_survive=self.survive)
        check_least(0, "prefetches nothing", paro_prefetch_units=self.prefetch_units)

    @property
    def limits(self) -> StrategyLimits:
        """The limits of strategies on the ranks of the run."""
        world = self.world
        sizes = world.size, world.group_size, world.ranks_per_node
        return StrategyLimits(*sizes, self.survive, self.outer)


def units_ahead(text: str | None, prefetch_units: int, *, by_nccl: bool) -> int | None:
    """Return how many units' all-gathers of updated parameters are queued ahead; None: all.

    The default is all on CPU ranks, and prefetch_units + 1, the minimum, under NCCL: that costs
    almost nothing, and saves most where NCCL executes in launch order (docs/planning.md).
    """
    if text == "all" or (text is None and not (by_nccl and prefetch_units)):
        return None
    if text is None:
        return prefetch_units + 1
    if not text.isdecimal() or int(text) <= prefetch_units:
        raise UserError(
            f"--paro-updated-ahead {text} must be all, or more than the {prefetch_units} of "
            "--paro-prefetch-units: a unit is gathered behind its updated parameters"
        )
    return int(text)


def take_outer(args: Namespace, num_groups: int) -> OuterConfig | None:
    """Build the settings of outer steps between groups, if flags ask for them."""
    if args.paro_outer_steps is None:
        if given := [name for name in non_default(vars(args)) if name.startswith("paro_outer_")]:
            raise UserError(f"{option_of(given[0])} needs --paro-outer-steps")
        return None
    lr, momentum = outer_defaults(num_groups, args.optimizer)
    return take(
        OuterConfig,
        args,
        outer_lr=lr if args.paro_outer_lr is None else args.paro_outer_lr,
        outer_momentum=momentum if args.paro_outer_momentum is None else args.paro_outer_momentum,
    )


def outer_defaults(num_groups: int, optimizer: str) -> tuple[float, float]:
    """Return the outer learning rate and momentum that papers found best for a number of groups.

    AdamW: arXiv 2503.09799, for 335M parameters and more. Muon: arXiv 2505.23725.
    """
    if optimizer == "muon":
        return (0.7, 0.6) if num_groups == 1 else (0.8, 0.9)
    if num_groups == 1:
        return 0.4, 0.9
    return (0.6, 0.9) if num_groups < 8 else (0.8, 0.9)


DEFAULT_STRATEGY = "IIG"
DISTRIBUTED_OPTIMIZER_STRATEGY = "NNG"


class ShardingFlags(NamedTuple):
    """The sharding that flags determine before planning."""

    sharding: ShardingConfig
    strategy: Strategy | None  # None: the planner chooses it
    is_unmeasured: bool  # True: the ranks first measure their machine, then plan
    measures_anew: bool  # True: machine files of earlier starts are not used


def strategy_text(args: Namespace) -> str:
    """Return the value of --paro-strategy, or its default."""
    if args.paro_strategy is not None:
        return str(args.paro_strategy)
    zero1 = args.use_distributed_optimizer
    return DISTRIBUTED_OPTIMIZER_STRATEGY if zero1 else DEFAULT_STRATEGY


def take_sharding(args: Namespace, world: World) -> ShardingFlags:
    """Build the sharding from flags; `UserError` if groups or machine do not fit the ranks."""
    strategy_flag, text, machine = args.paro_strategy, strategy_text(args), None
    group_size = world.ranks_per_node if args.paro_group_size is None else args.paro_group_size
    check_group_size(world.size, group_size)
    if args.paro_machine not in (None, MEASURE):
        machine, group_size = machine_of_launch(
            find_machine(args.paro_machine),
            world_size=world.size,
            ranks_per_node=world.ranks_per_node,
            group_size=args.paro_group_size,
            any_ranks=args.paro_elastic,
        )
    by_nccl = args.distributed_backend == "nccl"
    strategy = None
    if text != AUTO:
        strategy = parse_strategy(text, world_size=world.size, group_size=group_size)
    degrees = strategy.degrees if strategy else None
    if args.use_distributed_optimizer and strategy_flag and degrees != (1, 1, world.size):
        reason = f"the first means {DISTRIBUTED_OPTIMIZER_STRATEGY}"
        raise contradiction("--use-distributed-optimizer", f"{FLAG} {strategy_flag}", reason)
    ahead = units_ahead(args.paro_updated_ahead, args.paro_prefetch_units, by_nccl=by_nccl)
    sharding = take(
        ShardingConfig,
        args,
        world=replace(world, group=group_size),
        context=take_context(args),
        updated_ahead=ahead,
        machine=machine,
        outer=take_outer(args, world.size // group_size),
    )
    autos = {FLAG: text, "--paro-collective": args.paro_collective}
    if group_size < world.size:
        autos["--paro-inter-bits"] = args.paro_inter_bits
    flags = [f"{flag} {AUTO}" for flag, value in autos.items() if value == AUTO]
    is_unmeasured = machine is None and (bool(flags) or args.paro_machine == MEASURE)
    if is_unmeasured:
        check_measurable(flags or [f"--paro-machine {MEASURE}"], sharding.world, args.dry_run)
    return ShardingFlags(sharding, strategy, is_unmeasured, args.paro_machine == MEASURE)


def check_measurable(flags: Sequence[str], world: World, dry_run: bool) -> None:
    """Raise `UserError` if `flags` need a measured machine and measuring is impossible."""
    why = why_unmeasurable(world.size, world.group_size, dry_run=dry_run)
    if why is not None:
        raise UserError(
            f"{' and '.join(flags)}: the machine cannot be measured, {why}: give --paro-machine, a "
            "shipped name or a file that a training or tools/bench_collectives.py wrote"
        )


class TrainingTask(NamedTuple):
    """The model, its precision, optimizer and data, and the device that trains it."""

    model: LlamaConfig
    trainable: Trainable
    precision: PrecisionConfig
    optim: OptimConfig
    muon: MuonConfig
    data: DataConfig
    launch: LaunchConfig
    device_type: str

    def settings(self, batches: BatchSchedule, sharding: ShardingConfig) -> dict[str, Any]:
        """Return all fields of `RunSettings` but the micro-batch size, by name."""
        return {
            "model": self.model,
            "group_size": sharding.world.group_size,
            "context": sharding.context.layout,
            "seq_length": self.data.seq_length,
            "apart": self.data.reset_attention_mask,
            "precision": self.precision,
            "muon": self.muon,
            "prefetch_units": sharding.prefetch_units,
            "updated_ahead": sharding.updated_ahead,
            "outer": sharding.outer,
            "collective": sharding.collective,
            "materialize": Materialize.of_flags(sharding.materialize, sharding.rotate_in_place),
            "device_type": self.device_type,
            "eval_micro_batch_size": (batches.eval_micro_batch_size or 0) * batches.evaluates,
            "eval_ema": self.optim.eval_ema and batches.evaluates,
            "copy_engine": sharding.nccl_copy_engine,
        }

    def context_limits(self, sharding: ShardingConfig) -> ContextLimits:
        """Return the limits of context-parallel layouts, which depend on no batch size."""
        batches = BatchSchedule(micro_batch_size=1, global_batch_size=1, data_parallel_size=1)
        settings = RunSettings(**self.settings(batches, sharding), micro_batch_size=1)
        return ContextLimits(settings, sharding.world.size)

    def run_spec(
        self,
        batches: BatchSchedule,
        sharding: ShardingConfig,
        strategy: Strategy,
        trained: frozenset[str],
    ) -> RunSpec:
        """Build the description of a run in which the parameters named `trained` train."""
        return RunSpec(
            **self.settings(batches, sharding),
            trained=trained,
            recompute=self.model.recompute,
            world_size=sharding.world.size,
            strategy=strategy,
            micro_batch_size=batches.micro_batch_size if trained else batches.eval_micro_batch,
            num_micro_batches=batches.most_micro_batches,
        )

    def plan_request(self, batches: BatchSchedule, sharding: ShardingConfig) -> PlanRequest:
        """Build the planner's request from the task, its batches and its sharding."""
        assert sharding.machine is not None, "measured, or from --paro-machine"
        gigabytes = self.launch.device_memory_gb
        return PlanRequest(
            **self.settings(batches, sharding),
            machine=sharding.machine,
            micro_batch_size=batches.micro_batch_size,
            global_batch_size=batches.global_batch_size,
            largest_batch_size=batches.largest_step,
            memory_bytes=None if gigabytes is None else round(gigabytes * 1e9),
            ranks_per_node=sharding.world.ranks_per_node,
            survive=sharding.survive,
            trainable=self.trainable,
            chooses_bits=sharding.inter_bits is not None,
        )


def take_inter_bits(
    sharding: ShardingConfig, precision: PrecisionConfig
) -> tuple[ShardingConfig, PrecisionConfig, tuple[str, ...]]:
    """Resolve the bit widths between groups: chosen by the planner, as given, or 16 on one group.

    `UserError` for bit widths that contradict other flags.
    """
    bit_flags, inter_bits, world = bits_given(precision), sharding.inter_bits, sharding.world
    if inter_bits == AUTO and bit_flags:
        raise contradiction("--paro-inter-bits auto", bit_flags[0])
    if inter_bits == AUTO and precision.accumulate_allreduce_grads_in_fp32:
        raise contradiction("--accumulate-allreduce-grads-in-fp32", "--paro-inter-bits auto")
    if inter_bits == AUTO:
        bit_flags = ("--paro-inter-bits auto",)
    if world.group_size < world.size or not bit_flags:
        return sharding, precision, ()
    line = (
        f"{' and '.join(bit_flags)} without effect, 16 bits in use: with one group, of "
        f"{count_text(world.size, 'rank')}, nothing crosses groups (--paro-group-size)"
    )
    return replace(sharding, inter_bits=None), precision.with_inter_bits(FULL_BITS), (line,)


def bits_given(precision: PrecisionConfig) -> tuple[str, ...]:
    """Return the given flags that quantize messages, with their values."""
    flags = {
        "--paro-inter-param-bits": precision.inter_param_bits,
        "--paro-inter-grad-bits": precision.inter_grad_bits,
    }
    return tuple(f"{flag} {bits}" for flag, bits in flags.items() if bits != FULL_BITS)


def inter_bits_notices(
    precision: PrecisionConfig, group_size: int, strategy: Strategy, world_size: int
) -> tuple[str, ...]:
    """Build log lines for bit widths that have no effect under a strategy."""
    notices: list[str] = []
    for flag, bits, states, degree in (
        ("--paro-inter-param-bits", precision.inter_param_bits, "parameters", strategy.params),
        ("--paro-inter-grad-bits", precision.inter_grad_bits, "gradients", strategy.grads),
    ):
        if bits == FULL_BITS:
            continue
        if degree > group_size:
            params, grads = (min(degree, group_size) for degree in strategy.degrees[:2])
            sizes = {"world_size": world_size, "group_size": group_size}
            better = strategy_of(params, grads, strategy.optim, **sizes)
            notices.append(
                f"{flag} {bits}: under {strategy.name} {states} cross groups in every micro-batch, "
                f"in 16 bits; {better.name} sends them between groups once a step and would gain"
            )
        elif states == "parameters" and strategy.optim <= group_size:
            notices.append(
                f"{flag} {bits} has no effect under {strategy.name}: its updated parameters are "
                "gathered inside groups"
            )
    return tuple(notices)
